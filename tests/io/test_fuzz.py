"""A few hundred hostile files, the same in every run: rows in = rows out, each with a status, and never a traceback."""

from __future__ import annotations

import gzip
import json
import random

import pyarrow
import pytest
from pyarrow import parquet

from diffscore_fast.errors import InputError
from diffscore_fast.io.files import open_reader
from tests.support.rows import read_rows, run_lengths

TEXTS = [
    "",
    "NA",
    "007",
    "a\u2028b\u0085c",
    'quote " and \\',
    "ends \\",
    "[{]},:",
    "line\nend\r",
    "\ud800",
    "é\U0001f600",
]
VALUES = ["null", "true", "-0", "1e999", "NaN", "-Infinity", "9" * 4000, "[]", "{}", '[{"a": [1, {"b": "]}"}]}]']
BROKEN = [
    b"{",
    b"}",
    b"nope",
    b'{"text": "a"',
    b'{"text": "a}',
    b'{"text" "a"}',
    b'{"text": "\xff"}',
    b"[1, 2]",
    b"7",
    b'"\\',
    b'{"a": 1, "a": 2}',
    b"[" * 2000,
    b'{"x": ' + b"[" * 990 + b"]" * 990 + b"}",
    b"\0",
    b"\xff\xfe{",
    b"'text'",
    b'{"text": "a"} x',
    b'{"text": "\x01"}',
    b'{"text": +1}',
    b"\xef\xbb\xbf{}",
]
ENDS = [b"\n", b"\r\n", b"\n\n", b" \n\t\n"]
OUTPUTS = ["jsonl", "csv", "parquet"]


def element(chance: random.Random) -> bytes:
    fields = [f'"text": {chance.choice([json.dumps(chance.choice(TEXTS)), *VALUES[:5]])}']
    fields += [f'"x{i}": {chance.choice(VALUES)}' for i in range(chance.randrange(3))]
    blank = chance.choice(["", " ", "\t"])
    return ("{" + blank + f",{blank}".join(fields) + blank + "}").encode("utf-8", "surrogatepass")


def check(folder, name: str, form: str, rows: int | None = None) -> None:
    """Through reader and writer; as many rows come out as the reader finds, and as there are where that is known."""
    source, target = folder / name, folder / f"out.{form}"
    found = len(list(open_reader(str(source))))
    try:
        run = run_lengths(source, target)
    except InputError as error:
        assert name in str(error) or "column" in str(error)
        assert not target.exists()
        return
    written = read_rows(target)
    assert len(written) == run.statuses.total() == found == (found if rows is None else rows)
    for row in written:
        assert row["status"] and (row["status"] == "ok" or (row["message"] and not row["score"]))
    target.unlink()
    (folder / f"out.{form}.partial").unlink(missing_ok=True)


@pytest.mark.parametrize("seed", range(12))
def test_json_lines(tmp_path, seed):
    chance = random.Random(seed)
    for _ in range(10):
        rows = [b'{"text": "first", "x0": 1, "x1": 2}']
        rows += [
            chance.choice(BROKEN) if chance.random() < 0.4 else element(chance) for _ in range(chance.randrange(9))
        ]
        content = b"".join(row + chance.choice(ENDS) for row in rows)
        (tmp_path / "in.jsonl").write_bytes(content)
        check(tmp_path, "in.jsonl", chance.choice(OUTPUTS), len(rows))


@pytest.mark.parametrize("seed", range(12))
def test_json_arrays(tmp_path, seed):
    """One element on each line: a broken one costs itself, unless its brackets hide the next."""
    chance = random.Random(seed)
    for _ in range(10):
        rows = [element(chance) for _ in range(chance.randrange(1, 9))]
        separators = [chance.choice([b",\n", b" , ", b",", b"\r\n,"]) for _ in rows[1:]]
        content = b"".join(row + end for row, end in zip(rows, [*separators, b""], strict=True))
        (tmp_path / "in.json").write_bytes(chance.choice([b"", b"\xef\xbb\xbf", b"\n "]) + b"[" + content + b"]\n")
        check(tmp_path, "in.json", chance.choice(OUTPUTS), len(rows))
        for place in range(len(rows)):
            if chance.random() < 0.4:
                rows[place] = chance.choice(BROKEN)
        (tmp_path / "in.json").write_bytes(b"[\n" + b",\n".join(rows) + b"\n]\n")
        check(tmp_path, "in.json", chance.choice(OUTPUTS))


@pytest.mark.parametrize("seed", range(6))
def test_bytes_changed_anywhere(tmp_path, seed):
    chance = random.Random(seed)
    for _ in range(10):
        rows = [element(chance) for _ in range(6)]
        name = chance.choice(["in.jsonl", "in.json", "in.jsonl.gz", "in.json.gz"])
        content = b"\n".join(rows) if "jsonl" in name else b"[" + b",\n".join(rows) + b"]"
        content = gzip.compress(content, mtime=0) if name.endswith(".gz") else content
        changed = bytearray(content[: chance.choice([len(content), chance.randrange(1, len(content))])])
        for _ in range(chance.randrange(4)):
            changed[chance.randrange(len(changed))] = chance.choice(b'"\\[]{},:\n\r\0\xff1a')
        (tmp_path / name).write_bytes(changed)
        check(tmp_path, name, chance.choice(OUTPUTS))
        (tmp_path / name).unlink()


@pytest.mark.parametrize("seed", range(6))
def test_parquet(tmp_path, seed):
    chance = random.Random(seed)
    for _ in range(10):
        count = chance.randrange(1, 9)
        raw = [
            chance.choice([None, b"", b"text", b"\xff", b"a\xed\xa0\x80", "é".encode(), b"\xc3"]) for _ in range(count)
        ]
        strings = pyarrow.Array.from_buffers(pyarrow.string(), count, pyarrow.array(raw, pyarrow.binary()).buffers())
        lists = pyarrow.ListArray.from_arrays(pyarrow.array(range(count + 1), pyarrow.int32()), strings)
        table = pyarrow.table(
            {
                "text": strings,
                "list": lists,
                "n": pyarrow.array([chance.random()] * count),
                "struct": pyarrow.StructArray.from_arrays([strings], ["s"]),
            }
        )
        table = table.select(["text", *chance.sample(["list", "n", "struct"], chance.randrange(4))])
        compression = chance.choice(["none", "snappy", "zstd"])
        parquet.write_table(
            table, tmp_path / "in.parquet", row_group_size=chance.randrange(1, 9), compression=compression
        )
        bad = {index for index, item in enumerate(raw) if item is not None and not is_text(item)}
        check(tmp_path, "in.parquet", "parquet", count)
        run = run_lengths(tmp_path / "in.parquet", tmp_path / "out.parquet")
        assert run.statuses["invalid_record"] == len(bad)
        parquet.read_table(tmp_path / "out.parquet").validate(full=True)
        check(tmp_path, "in.parquet", chance.choice(OUTPUTS), count)
        content = bytearray((tmp_path / "in.parquet").read_bytes())
        for _ in range(chance.randrange(1, 4)):
            content[chance.randrange(len(content))] = chance.randrange(256)
        (tmp_path / "in.parquet").write_bytes(content)
        try:
            open_reader(str(tmp_path / "in.parquet"))
        except InputError as error:
            assert "in.parquet" in str(error)
        else:
            check(tmp_path, "in.parquet", chance.choice(OUTPUTS))


def is_text(item: bytes) -> bool:
    try:
        item.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
