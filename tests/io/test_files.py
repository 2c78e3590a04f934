"""All formats together: the same rows through each of them, and hostile files of each."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffscore_fast.errors import InputError
from diffscore_fast.io.files import format_of, open_reader
from tests.support.rows import ADDED, NAMES, delimited_bytes, dialect_of, pack, read_rows, run_lengths, write_rows

# Characters that split, end, quote, escape or hide somewhere, among ordinary ones.
HOSTILE = "\"',;\t\n\r\0\\ \u2028\u2029\u0085\x0b\x0c\x1c\ufeff\u200b\x1aé\U0001f600aN/1-={}[]"
texts = st.text(HOSTILE, max_size=12) | st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
texts |= st.sampled_from(["NA", "null", "None", "nan", "007", "1234567890123456789", "true", "=1+1", ""])


def same(value: str | None, form: str) -> str | None:
    """A value as a format has it: CSV and TSV have no null."""
    return value or "" if form in ("csv", "tsv") else value


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("a.jsonl", "jsonl"),
        ("A.JSON", "jsonl"),
        ("b.ndjson.zst", "jsonl"),
        ("c.csv.gz", "csv"),
        ("d.x.tsv", "tsv"),
        ("e.parquet", "parquet"),
        ("f", None),
        ("g.txt", None),
        ("h.gz", None),
        ("csv", None),
    ],
)
def test_names_stand_for_formats(name, form):
    assert format_of(f"some.folder/{name}") == form


@settings(deadline=None)
@given(
    rows=st.lists(st.fixed_dictionaries({"id": texts, "text": texts | st.none(), "a,b\t\n": texts}), max_size=4),
    names=st.tuples(st.sampled_from(NAMES), st.sampled_from(NAMES)),
)
def test_every_value_survives_every_pair_of_formats(tmp_path_factory, rows, names):
    folder = tmp_path_factory.mktemp("pair")
    source, target = folder / names[0], folder / f"out_{names[1]}"
    columns = ["id", "text", "a,b\t\n"]
    write_rows(source, rows, columns)
    run = run_lengths(source, target, dialect=dialect_of(names[0]))
    written = read_rows(target)
    assert len(written) == len(rows) == run.statuses.total()
    forms = [format_of(name) for name in names]
    for row, back in zip(rows, written, strict=True):
        values = {name: same(row[name], forms[0]) for name in columns}
        assert {name: back[name] for name in columns} == {n: same(value, forms[1]) for n, value in values.items()}
        text = values["text"]
        assert back["status"] == ("missing" if text is None else "ok" if text else "empty_text")
        score = back["score"] if forms[1] in ("jsonl", "parquet") else json.loads(back["score"] or "null")
        assert score == (-float(len(text)) if text else None)


BROKEN = {
    "jsonl": [
        b"{",
        b"[1]",
        b'{"text": 1} x',
        b'{"text": "\xff"}',
        b'"\\',
        b'{"a": 1, "a": 2}',
        b"\xff\xfe{\0}\0",
        b"text,a",
    ],
    "csv": [b"1,2,3", b'"a"b,c', b"a\rb,c", b"\xff,b", b"a,\xed\xa0\x80", b",,x", b"\0,\0,\0"],
    "tsv": [b"1\t2\t3", b"\xff\tb", b"1,2\t\t3", b'\t\t"', b"\0\t\0\t\0"],
}


@settings(deadline=None)
@given(data=st.data(), name=st.sampled_from(NAMES[:-1]), output=st.sampled_from(NAMES))
def test_rows_in_are_rows_out_whatever_is_broken(tmp_path_factory, data, name, output):
    """Good rows among broken ones, in every text format: each has its place, its status, and the good ones a score."""
    form = format_of(name)
    good = st.tuples(texts.filter(len), texts)
    # A first good row, as JSON Lines take the names of columns from the head of the file.
    rows = [("first", "row"), *data.draw(st.lists(good | st.sampled_from(BROKEN[form]), max_size=6))]
    pieces = [] if form == "jsonl" else [delimited_bytes([["text", "x"]], form)]
    for row in rows:
        if isinstance(row, bytes):
            pieces.append(row + data.draw(st.sampled_from([b"\n", b"\r\n"])))
        elif form == "jsonl":
            pieces.append(json.dumps({"text": row[0], "x": row[1]}, ensure_ascii=False).encode() + b"\n")
        else:
            pieces.append(delimited_bytes([row], form))
    folder = tmp_path_factory.mktemp("hostile")
    pack(folder / name, b"".join(pieces))
    run = run_lengths(folder / name, folder / f"out_{output}", dialect=dialect_of(name))
    written = read_rows(folder / f"out_{output}")
    assert len(written) == len(rows) == run.statuses.total()
    for row, back in zip(rows, written, strict=True):
        if isinstance(row, bytes):
            assert back["status"] == "invalid_record" and not back["score"] and back["message"]
            if format_of(output) == "jsonl":
                assert back["raw"] == row.rstrip(b"\r\n").decode("utf-8", "backslashreplace")
        else:
            assert (back["text"], back["x"], back["status"]) == (*row, "ok")


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.jsonl.zst", "rows.csv.gz", "rows.csv.zst"])
def test_a_cut_file_keeps_its_rows_and_says_where_it_ends(tmp_path, name):
    rows = [{"text": f"row {i}", "x": str(i**9)} for i in range(20_000)]
    write_rows(tmp_path / name, rows, ["text", "x"])
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[: len(content) // 2])
    records = list(open_reader(str(tmp_path / name)))
    assert 1000 < len(records) < 20_000
    assert [record.fields for record in records[:-1]] == rows[: len(records) - 1]
    form = "gzip" if name.endswith(".gz") else "zstd"
    assert records[-1].problem.startswith(
        f"the file cannot be read beyond line {records[-1].line - 1}: its {form} data"
    )
    assert f"are cut off (the file is not whole) after {len(content) // 2:,} bytes, " in records[-1].problem


@pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl", "rows.parquet"])
@pytest.mark.parametrize(
    "content",
    [
        b"\x1f\x8b\x08garbage",
        b"\x28\xb5\x2f\xfdgarbage",
        bytes(range(128, 256)) * 9,
        "text\nä\n".encode("utf-16"),
        b"PAR1PAR1",
    ],
)
def test_what_is_no_file_of_rows_is_refused_by_name(tmp_path, name, content, capsys):
    (tmp_path / name).write_bytes(content)
    if name == "rows.jsonl" and content[:1] in b"\x80P":  # a line like any other, and a row that fails
        assert run_lengths(tmp_path / name, tmp_path / "out.jsonl").statuses == {"invalid_record": 1}
        said = capsys.readouterr().err
        assert "rows.jsonl: the only row fails: line 1 is not" in said and "name it with --format" in said
        return
    with pytest.raises(InputError, match=name):
        run_lengths(tmp_path / name, tmp_path / "out.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == [name]


BROKEN_LINE = {"jsonl": b"{", "csv": b'"a"b,1', "tsv": b"1\t2\t3"}
EMPTY_LINE = {"jsonl": b'{"text": "", "x": "1"}', "csv": b",1", "tsv": b"\t1"}
GOOD_LINE = {"jsonl": b'{"text": "good", "x": "1"}', "csv": b"good,1", "tsv": b"good\t1"}
HEADER = {"jsonl": [], "csv": [b"text,x"], "tsv": [b"text\tx"]}


@pytest.mark.parametrize("form", ["jsonl", "csv", "tsv"])
@pytest.mark.parametrize("output", ["jsonl", "csv", "tsv", "parquet"])
def test_broken_rows_at_the_start_refuse_no_file_and_are_said_at_once(tmp_path, capsys, form, output):
    lines = [*HEADER[form], *[BROKEN_LINE[form]] * 150, GOOD_LINE[form]]
    (tmp_path / f"in.{form}").write_bytes(b"\n".join(lines))
    run = run_lengths(tmp_path / f"in.{form}", tmp_path / f"out.{output}")
    assert run.statuses == {"invalid_record": 150, "ok": 1} and run.failed() == 150
    assert read_rows(tmp_path / f"out.{output}")[-1]["text"] == "good"
    said = capsys.readouterr().err
    assert f"in.{form}: each of the first 100 rows fails in the same way: line {len(HEADER[form]) + 1} " in said
    assert ("--format" if form == "jsonl" else "--delimiter or --quoting") in said


@pytest.mark.parametrize("form", ["jsonl", "csv", "tsv"])
def test_a_common_fault_is_said_only_where_it_is_common(tmp_path, capsys, form):
    for lines, expected in (
        (
            [EMPTY_LINE[form]] * 120,
            "each of the first 100 rows fails in the same way: the field 'text' is empty. If the"
            " texts are in another field, name it with --text-column",
        ),
        ([EMPTY_LINE[form]] * 99 + [GOOD_LINE[form]], ""),
        ([BROKEN_LINE[form]] * 99 + [EMPTY_LINE[form]], ""),
        ([BROKEN_LINE[form]] * 99 + [GOOD_LINE[form]], ""),
        ([BROKEN_LINE[form]], "the only row fails: line"),
        ([GOOD_LINE[form]], ""),
        ([], ""),
    ):
        (tmp_path / f"in.{form}").write_bytes(b"\n".join(HEADER[form] + lines))
        run = run_lengths(tmp_path / f"in.{form}", tmp_path / "out.jsonl")
        assert run.statuses.total() == len(lines)
        said = capsys.readouterr().err
        assert expected in said and bool(expected) == bool(said)


def test_a_fault_that_only_scoring_finds_is_said_after_the_first_rows(tmp_path, capsys):
    (tmp_path / "in.jsonl").write_bytes(b'{"text": "\\ud800"}\n' * 250)
    assert run_lengths(tmp_path / "in.jsonl", tmp_path / "out.jsonl").statuses == {"invalid_text": 250}
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "each of the first 100 rows is invalid_text: " in said and "surrogate" in said
    (tmp_path / "in.jsonl").write_bytes(b'{"text": "\\ud800"}\n' * 250 + b'{"text": "a"}\n')
    run_lengths(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    assert "each of the first 100 rows" in capsys.readouterr().err
    (tmp_path / "in.jsonl").write_bytes(b'{"text": "a"}\n' + b'{"text": "\\ud800"}\n' * 250)
    run_lengths(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    assert not capsys.readouterr().err


def test_a_column_of_other_things_than_text_is_said_at_once(tmp_path, capsys):
    (tmp_path / "in.jsonl").write_bytes(b'{"text": 5, "body": "a"}\n' * 3)
    assert run_lengths(tmp_path / "in.jsonl", tmp_path / "out.jsonl").statuses == {"invalid_text": 3}
    assert (
        "each of the first 3 rows fails in the same way: the field 'text' is a number, not" in capsys.readouterr().err
    )


@pytest.mark.parametrize("name", ["rows.csv", "rows.tsv", "rows.parquet", "rows.jsonl"])
def test_columns_are_checked_before_any_row(tmp_path, name):
    write_rows(tmp_path / name, [{"text": "a", "score": "1"}], ["text", "score"])
    with pytest.raises(InputError, match=f"{name} has no field 'body'; it has: text, score. Name one with --text-colu"):
        run_lengths(tmp_path / name, tmp_path / "out.jsonl", column="body")
    with pytest.raises(InputError, match=f"{name} already has the field score"):
        run_lengths(tmp_path / name, tmp_path / "out.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_a_field_of_json_lines_that_comes_late_has_no_column(tmp_path, form):
    lines = [b'{"text": "a", "n": 1.10, "o": {"b" : [1e400]}, "u": "\\ud800"}'] * 100 + [b'{"text": "b", "late": 1}']
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(lines))
    run_lengths(tmp_path / "in.jsonl", tmp_path / f"out.{form}")
    rows = read_rows(tmp_path / f"out.{form}")
    assert {name: rows[0][name] for name in ("text", "n", "o", "u")} == {
        "text": "a",
        "n": "1.10",
        "o": '{"b" : [1e400]}',
        "u": "\\ud800",
    }
    assert len(rows) == 101 and rows[100]["status"] == "invalid_record"
    assert rows[100]["message"].startswith("line 101 has a field 'late'") and '"late": 1' in rows[100]["message"]


@pytest.mark.parametrize("name", NAMES)
def test_a_file_without_rows_has_its_columns(tmp_path, name):
    write_rows(tmp_path / name, [], ["text", "x"])
    run_lengths(tmp_path / name, tmp_path / f"out_{name}")
    assert read_rows(tmp_path / f"out_{name}") == []
    if format_of(name) != "jsonl":
        reader = open_reader(str(tmp_path / f"out_{name}"))
        assert reader.columns == ["text", "x", *ADDED]


@pytest.mark.parametrize("name", ["rows.csv", "rows.parquet"])
def test_a_row_of_a_million_characters(tmp_path, name):
    text = "x\u2028" * 500_000
    write_rows(tmp_path / name, [{"text": text}, {"text": "b"}], ["text"])
    run_lengths(tmp_path / name, tmp_path / f"out_{name}")
    written = read_rows(tmp_path / f"out_{name}")
    assert written[0]["text"] == text and float(written[0]["score"]) == -1_000_000 and len(written) == 2


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.parquet"])
def test_reading_is_constant_in_memory(tmp_path, name):
    """Rows are streamed: the peak stays far below the size of the file, one row group in Parquet."""
    rows = [{"text": f"{i:08d}" * 300, "x": "y"} for i in range(40_000)]
    write_rows(tmp_path / name, rows, ["text", "x"])
    # What getrusage says of a new process begins with the memory of the one that started it.
    code = (
        "import re, sys; from pathlib import Path; from diffscore_fast.io.files import open_reader\n"
        "def peak(): return int(re.search(r'VmHWM:\\s*(\\d+)', Path('/proc/self/status').read_text())[1])\n"
        "records = iter(open_reader(sys.argv[1])); next(records).fields['text']\n"
        "before = peak(); print(sum(len(record.fields['text']) for record in records), peak() - before)"
    )
    read, grown = map(int, subprocess.check_output([sys.executable, "-c", code, str(tmp_path / name)]).split())
    assert read == 2400 * 39_999 and grown < 25_000  # KiB, of 94 MiB


def test_the_command_starts_without_the_libraries_of_files():
    code = "import sys, diffscore_fast.cli.main as m; sys.exit(bool({'pyarrow', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
