"""JSON Lines: hostile files in, the same rows out, every byte of a row kept."""

from __future__ import annotations

import fcntl
import gzip
import io
import json
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from diffscore_fast.errors import InputError
from diffscore_fast.io.jsonl import JsonlReader, JsonlWriter
from tests.support.rows import json_values, run_lengths


def read(tmp_path, content: bytes, name: str = "in.jsonl"):
    path = tmp_path / name
    path.write_bytes(content)
    reader = JsonlReader(str(path))
    return list(reader), reader


def test_byte_order_mark_crlf_blank_lines_and_a_last_line_without_end(tmp_path):
    records, reader = read(tmp_path, b'\xef\xbb\xbf{"a": 1}\r\n\r\n  \n{"a": 2}')
    assert [record.fields for record in records] == [{"a": 1}, {"a": 2}]
    assert [record.line for record in records] == [1, 4] and reader.blank_lines == 2


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"a": ', "line 2 is not JSON"),
        (b"[1, 2]", "line 2 is a list, not an object"),
        (b'"text"', "line 2 is a string"),
        (b'{"a": 1, "b": 2, "a": 3}', "line 2 has the key 'a' twice"),
        (b'{"a": nan}', "line 2 is not JSON"),
        (b'{"a": "\xff"}', "line 2 is not UTF-8: byte 7 is 0xff"),
        (b"[" * 100_000, "line 2 is nested too deeply"),
    ],
)
def test_a_broken_line_is_a_record_with_a_problem_and_its_neighbours_are_read(tmp_path, line, problem):
    records, _ = read(tmp_path, b'{"a": 1}\n' + line + b'\n{"a": 3}\n')
    assert [record.fields for record in records] == [{"a": 1}, None, {"a": 3}]
    assert problem in records[1].problem and records[1].raw == line


def test_a_repeated_key_inside_an_extra_column_is_not_our_business(tmp_path):
    records, _ = read(tmp_path, b'{"a": 1, "extra": {"x": 1, "x": 2}}\n')
    assert records[0].fields is not None


def test_line_separators_inside_strings_do_not_split_a_row(tmp_path):
    text = "a\u2028b\u0085c\x0bd\x1ce"
    records, _ = read(tmp_path, json.dumps({"a": text}, ensure_ascii=False).encode() + b"\n")
    assert records[0].fields == {"a": text}


def test_gzip_is_recognised_by_content_and_a_cut_one_keeps_its_rows(tmp_path):
    lines = b"".join(b'{"a": %d, "noise": "%d"}\n' % (i, i**9) for i in range(20_000))
    packed = gzip.compress(lines)
    assert len(read(tmp_path, packed, "whole")[0]) == 20_000
    records, _ = read(tmp_path, packed[: len(packed) // 2], "cut")
    assert len(records) > 1000 and records[-1].fields is None
    assert "cannot be read beyond line" in records[-1].problem
    assert all(record.fields["a"] == i for i, record in enumerate(records[:-1]) if record.fields)


@settings(max_examples=200, deadline=None)
@given(
    rows=st.lists(st.dictionaries(st.text().filter(lambda key: key != "score"), json_values), max_size=5),
    escaped=st.booleans(),
    indent=st.sampled_from([(", ", ": "), (",", ":"), (" , ", " : ")]),
)
def test_every_extra_column_comes_back_byte_for_byte(tmp_path_factory, rows, escaped, indent):
    folder = tmp_path_factory.mktemp("round")
    lines = []
    for row in rows:
        try:
            lines.append(json.dumps(row, ensure_ascii=escaped, separators=indent).encode())
        except UnicodeEncodeError:  # a lone surrogate can only be written escaped
            lines.append(json.dumps(row, separators=indent).encode())
    records, _ = read(folder, b"\n".join(lines))
    writer = JsonlWriter(str(folder / "out.jsonl"))
    for record in records:
        writer.write(record, {"score": -1.5})
    writer.finish()
    written = (folder / "out.jsonl").read_bytes().splitlines() if rows else []
    assert len(written) == len(rows)
    for line, back, row in zip(lines, io.BytesIO((folder / "out.jsonl").read_bytes()), rows, strict=True):
        assert back.startswith(line[:-1].rstrip())
        assert json.loads(back) == {**row, "score": -1.5}


def test_numbers_that_python_would_rewrite_are_kept(tmp_path):
    line = b'{"id": 1234567890123456789, "x": 1.10, "y": 1E5, "z": "\\u00e9"}'
    records, _ = read(tmp_path, line)
    writer = JsonlWriter(str(tmp_path / "out.jsonl"))
    writer.write(records[0], {"score": None})
    writer.finish()
    assert (tmp_path / "out.jsonl").read_bytes() == line[:-1] + b', "score": null}\n'


def test_numbers_that_json_lacks_are_kept_and_are_no_text(tmp_path):
    """As Python and pandas write them; and whole numbers of more digits than Python reads."""
    kept = b'{"text": "ab", "x": NaN, "y": [Infinity, {"z": -Infinity}], "n": ' + b"9" * 5000
    lines = [kept + b"}", b'{"text": NaN}', b'{"text": Infinity}', b'{"text": ' + b"9" * 5000 + b"}"]
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(lines))
    for form in ("jsonl", "csv", "parquet"):
        run = run_lengths(tmp_path / "in.jsonl", tmp_path / f"out.{form}")
        assert run.statuses == {"ok": 1, "invalid_text": 3}
    first = (tmp_path / "out.jsonl").read_bytes().splitlines()[0]
    assert first.startswith(kept + b', "score": -2.0, ')
    row = parquet.read_table(tmp_path / "out.parquet").to_pylist()[0]
    assert (row["x"], row["y"], row["n"]) == ("NaN", '[Infinity, {"z": -Infinity}]', "9" * 5000)


def test_a_row_that_could_be_read_can_be_written_however_deep(tmp_path):
    """Near the limit of nesting, writing its fields as text must not need more room than parsing had."""
    for depth in range(850, 1000, 3):
        (tmp_path / "in.jsonl").write_bytes(
            b'{"text": "a"}\n{"text": "ab", "x": ' + b"[" * depth + b"]" * depth + b"}\n"
        )
        run = run_lengths(tmp_path / "in.jsonl", tmp_path / "out.csv")
        assert run.statuses.total() == 2 and run.statuses["ok"] >= 1


def test_the_output_appears_only_when_it_is_whole(tmp_path):
    path = tmp_path / "out.jsonl.gz"
    path.write_bytes(b"before")
    records, _ = read(tmp_path, b'{"a": 1}\n')
    writer = JsonlWriter(str(path))
    writer.write(records[0], {"score": -1.0})
    assert path.read_bytes() == b"before"
    with pytest.raises(InputError, match="another run is writing"):
        JsonlWriter(str(path))
    writer.finish()
    assert json.loads(gzip.decompress(path.read_bytes())) == {"a": 1, "score": -1.0}
    assert not (tmp_path / "out.jsonl.gz.partial").exists()


def test_a_run_that_writes_nothing_touches_nothing(tmp_path):
    partial = tmp_path / "out.jsonl.partial"
    JsonlWriter(str(tmp_path / "out.jsonl")).abandon()
    assert not partial.exists()
    partial.write_bytes(b"rows of a killed run\n")
    assert JsonlWriter(str(tmp_path / "out.jsonl")).abandon() is None
    assert partial.read_bytes() == b"rows of a killed run\n"


def test_a_run_that_meets_another_s_finished_file_opens_its_own(tmp_path, monkeypatch):
    """Between its opening and its locking of the partial file, another run may finish and take it away."""
    path = tmp_path / "out.jsonl"
    (tmp_path / "out.jsonl.partial").write_bytes(b"whole result\n")
    real, calls = fcntl.flock, []

    def late(file, how):
        if not calls:
            os.replace(tmp_path / "out.jsonl.partial", path)
        calls.append(how)
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    writer = JsonlWriter(str(path))
    assert path.read_bytes() == b"whole result\n" and len(calls) == 2
    writer.finish()
    assert path.read_bytes() == b""


def test_links_are_followed_and_pipes_written_into(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "real" / "out.jsonl")
    records, _ = read(tmp_path, b'{"a": 1}\n')
    writer = JsonlWriter(str(tmp_path / "link.jsonl"))
    writer.write(records[0], {"score": -1.0})
    writer.finish()
    assert (tmp_path / "link.jsonl").is_symlink()
    assert json.loads((tmp_path / "real" / "out.jsonl").read_bytes()) == {"a": 1, "score": -1.0}
    os.mkfifo(tmp_path / "pipe")
    reader = subprocess.Popen(["cat", str(tmp_path / "pipe")], stdout=subprocess.PIPE)
    writer = JsonlWriter(str(tmp_path / "pipe"))
    writer.write(records[0], {"score": -1.0})
    writer.finish()
    assert json.loads(reader.communicate(timeout=60)[0]) == {"a": 1, "score": -1.0}
    assert not (tmp_path / "pipe.partial").exists() and not writer.is_file


def test_the_name_of_standard_output_is_a_pipe_like_others():
    """As in `-o /dev/stdout | head`: the name leads to one that does not exist."""
    program = (
        "from diffscore_fast.io.jsonl import JsonlWriter\n"
        "writer = JsonlWriter('/dev/stdout'); writer.finish(); print('whole')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "whole\n", "")


def test_what_a_killed_run_left_is_written_over(tmp_path):
    (tmp_path / "out.jsonl.partial").write_bytes(b"old rows of a killed run\n" * 100)
    writer = JsonlWriter(str(tmp_path / "out.jsonl"))
    writer.finish()
    assert (tmp_path / "out.jsonl").read_bytes() == b""


@pytest.mark.parametrize("path", ["missing/folder/out.jsonl", "."])
def test_an_output_that_cannot_be_written_is_refused(tmp_path, path):
    with pytest.raises(InputError, match="cannot write"):
        JsonlWriter(str(tmp_path / path))


def test_an_input_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(InputError, match="cannot read .*No such file"):
        JsonlReader(str(tmp_path / "none.jsonl"))
    with pytest.raises(InputError, match="cannot read .*directory"):
        JsonlReader(str(tmp_path))
