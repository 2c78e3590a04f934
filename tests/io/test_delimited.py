"""CSV and TSV: hostile files in, the same rows out, every byte of a row kept."""

from __future__ import annotations

import csv
import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffscore_fast.errors import InputError
from diffscore_fast.io import delimited
from diffscore_fast.io.delimited import DelimitedReader
from tests.support.rows import run_lengths


def read(tmp_path, content: bytes, file_format: str = "csv"):
    path = tmp_path / f"in.{file_format}"
    path.write_bytes(content)
    reader = DelimitedReader(str(path), file_format)
    return list(reader), reader


def test_values_are_text_whatever_they_look_like(tmp_path):
    row = ["007", "NA", "null", "1e5", "", "2020-01-01", "true", "9223372036854775808", " x "]
    records, reader = read(tmp_path, b"a,b,c,d,e,f,g,h,i\n" + ",".join(row).encode() + b"\n")
    assert list(records[0].fields.values()) == row and reader.columns == list("abcdefghi")


def test_separators_and_long_fields_neither_split_nor_vanish(tmp_path):
    text = "a\u2028b\u0085c\x0bd\x1ce\0f" + "x" * 1_000_000 + '"\r\n,'
    written = io.StringIO(newline="")
    csv.writer(written).writerows([["id", "text"], ["1", text], ["2", "next"]])
    records, _ = read(tmp_path, written.getvalue().encode())
    assert [record.fields for record in records] == [{"id": "1", "text": text}, {"id": "2", "text": "next"}]
    assert [record.line for record in records] == [2, 4]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"1,2,3", "line 3 has 3 fields, the header 2"),
        (b"1", "line 3 has 1 field, the header 2"),
        (b'"a"b,c', "line 3 is not CSV: text follows a closing quote"),
        (b"a\rb,c", "line 3 is not CSV: a carriage return stands outside quotes"),
        (b"a,\xff", "line 3 is not UTF-8: byte 2 is 0xff"),
        (b"a,\xed\xa0\x80", "line 3 is not UTF-8"),  # a lone surrogate
        (b'a,"b', "line 3 is not CSV: a quote is opened and never closed"),
    ],
)
def test_a_broken_line_is_a_record_with_a_problem_and_its_neighbours_are_read(tmp_path, line, problem):
    records, _ = read(tmp_path, b"a,b\n1,2\n" + line + b"\n3,4\n5,6")
    assert [record.fields and list(record.fields.values()) for record in records] == [
        ["1", "2"], None, ["3", "4"], ["5", "6"],
    ]  # fmt: skip
    assert problem in records[1].problem and records[1].raw == line


def test_a_quote_that_closes_in_a_later_row_costs_one_row(tmp_path):
    records, _ = read(tmp_path, b'a,b\n1,"x\n2,y\n3,"z"\n4,w\n')
    assert [record.fields and record.fields["b"] for record in records] == [None, "y", "z", "w"]


def test_a_quote_that_is_never_closed_is_given_up_after_a_while(tmp_path, monkeypatch):
    monkeypatch.setattr(delimited, "LONGEST_QUOTED", 100)
    records, reader = read(tmp_path, b'a,b\n1,"x\n' + b"2,y\n" * 1000)
    assert [record.fields is None for record in records] == [True] + [False] * 1000
    records, _ = read(tmp_path, b'a,b\n1,"' + b"x" * 1000 + b'\ny"\n')  # a long line by itself is no sign of it
    assert records[0].fields == {"a": "1", "b": "x" * 1000 + "\ny"}


def test_blank_lines_are_passed_over_and_are_texts_where_there_is_one_column(tmp_path):
    records, reader = read(tmp_path, b"a,b\n\n1,2\n  \r\n,\n")
    assert [list(record.fields.values()) for record in records] == [["1", "2"], ["", ""]] and reader.blank_lines == 2
    records, reader = read(tmp_path, b"text\nx\n\ny\n")
    assert [record.fields["text"] for record in records] == ["x", "", "y"] and reader.blank_lines == 0
    records, _ = read(tmp_path, b"a\tb\n\t\n", "tsv")
    assert records[0].fields == {"a": "", "b": ""}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no header line"),
        (b"\n1,2\n", "has no header line"),
        (b"a,b,a\n", "has the column 'a' twice"),
        ("a,b\n1,2\n".encode("utf-16"), "is UTF-16"),
        ("é,b\n1,2\n".encode("latin-1"), "header line of .* is not UTF-8: byte 0 is 0xe9"),
        (b"a,b\r1,2\r", "no usable header line: a carriage return"),
        (b'a,"b\n1,2\n', "no usable header line: a quote is opened and never closed"),
    ],
)
def test_a_header_that_cannot_be_used_is_refused(tmp_path, content, message):
    with pytest.raises(InputError, match=message):
        read(tmp_path, content)


@pytest.mark.parametrize("line_end", ["\r\n", "\n"])
def test_rows_come_back_byte_for_byte_with_columns_behind(tmp_path, line_end):
    lines = ['\ufefftext,"odd, name"', '"quoted",1', 'x,"a\n""b"""', "ragged", ",", 'x"y,']
    (tmp_path / "in.csv").write_bytes((line_end.join(lines) + line_end).encode())
    run_lengths(tmp_path / "in.csv", tmp_path / "out.csv")
    written = (tmp_path / "out.csv").read_bytes().decode()
    expected = [
        lines[0] + ",score,tokens,status,message,profile,token_scores,interval",
        lines[1] + ',-6.0,1,ok,,"{""0.1"": -6.0, ""0.2"": null}","[[0, 1, -6.0], [1, 2, null]]","[-6.0, 0.0]"',
        lines[2] + ',-1.0,1,ok,,"{""0.1"": -1.0, ""0.2"": null}","[[0, 1, -1.0], [1, 2, null]]","[-1.0, 0.0]"',
        ',,,0,invalid_record,"line 5 has 1 field, the header 2; it reads: ragged",,,"[null, null]"',
        lines[4] + ',,0,empty_text,no tokens,,,"[null, null]"',
        lines[5] + ',-3.0,1,ok,,"{""0.1"": -3.0, ""0.2"": null}","[[0, 1, -3.0], [1, 2, null]]","[-3.0, 0.0]"',
    ]
    assert written == line_end.join(expected) + line_end


def test_csv_to_tsv_and_back_keeps_every_value(tmp_path):
    (tmp_path / "in.csv").write_bytes(b'text,x\n"a\tb","1,2"\n"c\nd\r",\n"""",e\n')
    run_lengths(tmp_path / "in.csv", tmp_path / "out.tsv")
    with (tmp_path / "out.tsv").open(newline="") as file:
        rows = [row[:2] for row in csv.reader(file, delimiter="\t", strict=True)]
    assert rows == [["text", "x"], ["a\tb", "1,2"], ["c\nd\r", ""], ['"', "e"]]


@settings(deadline=None)
@given(st.lists(st.sampled_from([b'"', b",", b"\n", b"\r\n", b"\r", b"a", b"\xff", b"\0", b" ", "\u2028".encode()])))
def test_whatever_the_bytes_none_vanishes(tmp_path_factory, pieces):
    body = b"".join(pieces)
    records, reader = read(tmp_path_factory.mktemp("bytes"), b"x,y\n" + body)
    kept = b"".join(record.raw for record in records)

    def visible(text: bytes) -> bytes:
        return text.translate(None, b" \r\n")

    assert visible(kept) == visible(body)
    assert all(record.fields is None or len(record.fields) == 2 for record in records)
