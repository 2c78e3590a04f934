"""One JSON array of objects: each element is a row, read as a stream, and a broken one costs itself."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffscore_fast.io import json_array
from diffscore_fast.io.files import open_reader
from tests.support.rows import json_values, pack, run_lengths

GOOD = b'{"text": "b"}'


def read(folder, content: bytes, name: str = "in.json"):
    pack(folder / name, content)
    return list(open_reader(str(folder / name)))


@pytest.mark.parametrize("chunk", [1, 3, 1 << 16])
@pytest.mark.parametrize("indent", [None, 0, 2])
@pytest.mark.parametrize("name", ["in.json", "in.json.gz", "in.json.zst", "in"])
def test_elements_are_rows_and_are_written_as_json_lines(tmp_path, monkeypatch, chunk, indent, name):
    monkeypatch.setattr(json_array, "CHUNK", chunk)
    rows: list[dict] = [{"text": 'a ] } , [ { \\ " \n', "x": [1, {"y": "]"}]}, {"text": "b", "n": {}}, {"text": "é"}]
    pack(tmp_path / name, b"\n " + json.dumps(rows, indent=indent, ensure_ascii=False).encode() + b"\n")
    run = run_lengths(tmp_path / name, tmp_path / "out.json")
    written = [json.loads(line) for line in (tmp_path / "out.json").read_bytes().split(b"\n")[:-1]]
    assert [{key: row[key] for key in before} for row, before in zip(written, rows, strict=True)] == rows
    assert run.statuses == {"ok": 3}


def test_an_element_keeps_its_bytes_but_for_line_ends(tmp_path):
    content = b'\xef\xbb\xbf[\r\n  {"text" : "a",\r\n     "n": 1.10, "x": NaN}\r\n,{"text":"b\\n"}]'
    records = read(tmp_path, content)
    assert [record.raw for record in records] == [b'{"text" : "a", "n": 1.10, "x": NaN}', b'{"text":"b\\n"}']
    assert [record.line for record in records] == [2, 4]


@pytest.mark.parametrize("content", [b"[]", b" [ ] ", b"[\n]\n"])
def test_an_empty_array_has_no_rows(tmp_path, content):
    assert read(tmp_path, content) == []


@pytest.mark.parametrize(("name", "arguments"), [("in.json", {}), ("in.jsonl", {}), ("in.json", {"format": "jsonl"})])
def test_json_lines_are_read_as_before(tmp_path, name, arguments):
    content = b'{"text": "a"}\n[1, 2]\n\n{"text": "b"}'
    content = content if name == "in.json" and not arguments else b"[1, 2]\n" + content
    (tmp_path / name).write_bytes(content)
    records = list(open_reader(str(tmp_path / name), arguments.get("format")))
    assert [record.raw for record in records] == content.replace(b"\n\n", b"\n").split(b"\n")
    assert "is a list, not an object" in records[1 if content.startswith(b"{") else 0].problem


@pytest.mark.parametrize(
    ("element", "problem"),
    [
        (b'{"text": nope}', "element 2 (line 3) is not JSON: Expecting value at column 10"),
        (b'{"text" "b", "x": [1, {}]}', "element 2 (line 3) is not JSON"),
        (b'{"text": "b\xff"}', "element 2 (line 3) is not UTF-8"),
        (b'{"text": "b", "text": 1}', "element 2 (line 3) has the key 'text' twice"),
        (b"17", "element 2 (line 3) is a number, not an object"),
        (b'["text", {}]', "element 2 (line 3) is a list, not an object"),
        (b"", "element 2 is missing"),
        (b'{"text": "b}', "element 2 (line 3) has a line end inside a string: a quote is not closed"),
        (b'{"text": "b", "x": [1}', "element 2 (line 3) has a bracket } that closes none"),
        (b'{"text": "b", "x": {"y": 1}', "element 2 (line 3) has a bracket ] that closes none"),
    ],
)
@pytest.mark.parametrize("chunk", [1, 1 << 16])
def test_a_broken_element_costs_itself(tmp_path, monkeypatch, element, problem, chunk):
    monkeypatch.setattr(json_array, "CHUNK", chunk)
    records = read(tmp_path, b"[\n" + b",\n".join([GOOD, element, GOOD, GOOD]) + b"\n]")
    assert [record.fields is None for record in records] == [False, True, False, False]
    assert records[1].problem.startswith(problem) and records[1].raw == element


def test_elements_without_a_comma_between_and_a_comma_at_the_end_are_read(tmp_path):
    assert [record.raw for record in read(tmp_path, b"[" + GOOD + b"\n" + GOOD + GOOD + b", ]")] == [GOOD] * 3


@pytest.mark.parametrize(
    ("end", "problem"),
    [
        (b',\n{"text": "b, {"text": "c"}\n ]', "element 3 (line 3) has a line end inside a string"),
        (b',\n{"text": "b\n', "element 3 (line 3) has a line end inside a string"),
        (b',\n{"text": "b', "element 3 (line 3) ends with the file: a quote is not closed"),
        (b',\n{"text": ["b"', "element 3 (line 3) ends with the file: a bracket is not closed"),
        (b"", "the array has no closing bracket: the file ends behind element 2"),
        (b'] {"text": "c"}', "text follows the end of the array, after element 2 (line 2)"),
    ],
)
def test_where_the_end_of_an_element_is_unknown_reading_ends_and_says_so(tmp_path, end, problem):
    records = read(tmp_path, b"[" + GOOD + b",\n" + GOOD + end)
    assert [record.raw for record in records[:2]] == [GOOD, GOOD] and len(records) == 3
    assert records[2].fields is None and records[2].problem.startswith(problem)
    assert "not read beyond line 3" in records[2].problem or "nothing beyond is read" in records[2].problem


def test_an_element_without_end_is_not_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(json_array, "MAX_ELEMENT", 1 << 20)
    records = read(tmp_path, b"[" + GOOD + b', {"text": "' + b"x" * (9 << 20) + b'"}]')
    assert len(records) == 2 and "has no end within 1 MiB" in records[1].problem and len(records[1].raw) < 1 << 17


def test_a_cut_archive_of_an_array_says_where(tmp_path):
    pack(tmp_path / "in.json.gz", json.dumps([{"text": f"row {i**9}"} for i in range(9000)], indent=1).encode())
    content = (tmp_path / "in.json.gz").read_bytes()
    (tmp_path / "in.json.gz").write_bytes(content[: len(content) // 2])
    *good, last = open_reader(str(tmp_path / "in.json.gz"))
    assert len(good) > 1000 and all(record.fields is not None for record in good)
    assert f"cannot be read beyond element {len(good)}, line" in last.problem
    assert f"its gzip data are cut off (the file is not whole) after {len(content) // 2:,} bytes" in last.problem


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(st.dictionaries(st.text(), json_values), max_size=5),
    escaped=st.booleans(),
    indent=st.sampled_from([None, 0, 1, "\t"]),
    chunk=st.integers(1, 9),
)
def test_any_array_gives_its_objects(tmp_path_factory, rows, escaped, indent, chunk):
    content = json.dumps(rows, ensure_ascii=escaped, indent=indent).encode("utf-8", "backslashreplace")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_array, "CHUNK", chunk)
        records = read(tmp_path_factory.mktemp("array"), content)
    assert [dict(record.fields) for record in records] == json.loads(content)
    assert [json.loads(record.raw) for record in records] == json.loads(content)
    assert not any(b"\n" in record.raw for record in records)


def test_an_array_is_read_in_constant_memory(tmp_path):
    element = b'{"text": "' + b"0123456789" * 240 + b'", "x": {"y": [1]}}'
    (tmp_path / "in.json").write_bytes(b"[" + b",".join([element] * 20_000) + b"]")  # one line of 48 MB
    code = (
        "import re, sys; from pathlib import Path; from diffscore_fast.io.files import open_reader\n"
        "def peak(): return int(re.search(r'VmHWM:\\s*(\\d+)', Path('/proc/self/status').read_text())[1])\n"
        "records = iter(open_reader(sys.argv[1])); next(records).fields['text']\n"
        "before = peak(); print(sum(len(record.fields['text']) for record in records), peak() - before)"
    )
    out = subprocess.check_output([sys.executable, "-c", code, str(tmp_path / "in.json")])
    read, grown = map(int, out.split())
    assert read == 2400 * 19_999 and grown < 4000  # KiB
