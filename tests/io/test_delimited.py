"""CSV and TSV: hostile files in, the same rows out, every byte of a row kept."""

from __future__ import annotations

import csv
import io
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffscore_fast.errors import InputError
from diffscore_fast.io import delimited
from diffscore_fast.io.delimited import DelimitedReader, DelimitedWriter
from diffscore_fast.io.dialect import AUTO, DialectOptions
from diffscore_fast.io.files import open_reader
from tests.support.rows import ADDED, run_lengths


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
        (b",,x", "line 3 has 3 fields, the header 2"),
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
        ["1", "2"],
        None,
        ["3", "4"],
        ["5", "6"],
    ]
    assert problem in records[1].problem and records[1].raw == line


def test_a_quote_that_closes_in_a_later_row_costs_one_row(tmp_path):
    records, _ = read(tmp_path, b'a,b\n1,"x\n2,y\n3,"z"\n4,w\n')
    assert [record.fields and record.fields["b"] for record in records] == [None, "y", "z", "w"]


def test_a_quote_that_is_never_closed_is_given_up_after_a_while(tmp_path, monkeypatch):
    monkeypatch.setattr(delimited, "MAX_QUOTED", 100)
    records, reader = read(tmp_path, b'a,b\n1,"x\n' + b"2,y\n" * 1000)
    assert [record.fields is None for record in records] == [True] + [False] * 1000
    records, _ = read(tmp_path, b'a,b\n1,"' + b"x" * 1000 + b'\ny"\n')  # a long line by itself is no sign of it
    assert records[0].fields == {"a": "1", "b": "x" * 1000 + "\ny"}


def test_blank_lines_are_passed_over_and_are_texts_where_there_is_one_column(tmp_path):
    records, reader = read(tmp_path, b"a,b\n\n1,2\n  \r\n,\n")
    assert [list(record.fields.values()) for record in records] == [["1", "2"], ["", ""]] and reader.blank_lines == 2
    records, reader = read(tmp_path, b"text\nx\n\ny\n")
    assert [record.fields["text"] for record in records] == ["x", "", "y"] and reader.blank_lines == 0
    records, reader = read(tmp_path, b"a\tb\n\t\n\n \n", "tsv")  # there every line is a row
    assert [list(record.fields.values()) for record in records] == [["", ""], ["", ""], [" ", ""]]
    assert reader.blank_lines == 0 and reader.short_rows == 2


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
        'ragged,,-6.0,1,ok,,"{""0.1"": -6.0, ""0.2"": null}","[[0, 1, -6.0], [1, 2, null]]","[-6.0, 0.0]"',
        lines[4] + ',,0,empty_text,no tokens,,,"[null, null]"',
        lines[5] + ',-3.0,1,ok,,"{""0.1"": -3.0, ""0.2"": null}","[[0, 1, -3.0], [1, 2, null]]","[-3.0, 0.0]"',
    ]
    assert written == line_end.join(expected) + line_end


def test_csv_to_tsv_and_back_keeps_every_value(tmp_path):
    (tmp_path / "in.csv").write_bytes(b'text,x\n"a\tb","1,2"\n"c\nd\r",\n"""",e\n"\\t\\",\\x\n')
    expected = [["a\tb", "1,2"], ["c\nd\r", ""], ['"', "e"], ["\\t\\", "\\x"]]
    run = run_lengths(tmp_path / "in.csv", tmp_path / "out.tsv")
    lines = (tmp_path / "out.tsv").read_text(encoding="utf-8").split("\n")
    assert [line.split("\t")[:2] for line in lines[1:-1]] == [
        [r"a\tb", "1,2"],
        [r"c\nd\r", ""],
        ['"', "e"],
        [r"\\t\\", r"\\x"],
    ]
    assert isinstance(run._writer, DelimitedWriter) and run._writer.escaped_rows == 3
    for quoting, values in (("escaped", expected), ("auto", [line.split("\t")[:2] for line in lines[1:-1]])):
        reader = DelimitedReader(str(tmp_path / "out.tsv"), "tsv", DialectOptions(quoting=quoting))
        assert [list(record.fields.values())[:2] for record in reader] == values
    options = DialectOptions(quoting="escaped")
    run_lengths(tmp_path / "in.csv", tmp_path / "first.tsv")
    cut = [b"\t".join(line.split(b"\t")[:2]) for line in (tmp_path / "first.tsv").read_bytes().split(b"\n")]
    (tmp_path / "second.tsv").write_bytes(b"\n".join(cut))
    run_lengths(tmp_path / "second.tsv", tmp_path / "back.csv", dialect=options)
    with (tmp_path / "back.csv").open(newline="") as file:
        assert [row[:2] for row in csv.reader(file, strict=True)][1:] == expected


HOSTILE_TSV = [
    b'1\t"Open quote only\tA cat',
    b'2\tends with a quote"\tB',
    b'3\t"whole"\t"C"',
    b'4\ta "b" c\t""',
    b"5\ta\rb\tc",
    b"6\t\\t is no tab\t\\\\",
    b"7\tlast\t\rz",
]


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_in_tsv_a_line_is_a_row_whatever_quotes_it_has(tmp_path, line_end):
    content = line_end.join([b"id\ttext\tx", *HOSTILE_TSV]) + line_end
    records, reader = read(tmp_path, content, "tsv")
    assert [[value.encode() for value in record.fields.values()] for record in records] == [
        line.split(b"\t") for line in HOSTILE_TSV
    ]
    assert reader.quoted_rows == 2 and "--quoting rfc4180" in str(reader.remarks)
    run_lengths(tmp_path / "in.tsv", tmp_path / "out.tsv")
    written = (tmp_path / "out.tsv").read_bytes().split(line_end)
    assert [line.split(b"\t")[:3] for line in written[1:-1]] == [line.split(b"\t") for line in HOSTILE_TSV]
    assert {line.count(b"\t") for line in written[:-1]} == {2 + len(ADDED)}


def test_tsv_of_an_earlier_version_is_read_where_quoting_is_asked_for(tmp_path):
    content = b'text\tx\n"a\tb"\t1\n"c\nd"\t"""e"""\n'
    (tmp_path / "in.tsv").write_bytes(content)
    quoting = DialectOptions(quoting="rfc4180")
    reader = DelimitedReader(str(tmp_path / "in.tsv"), "tsv", quoting)
    assert [list(record.fields.values()) for record in reader] == [["a\tb", "1"], ["c\nd", '"e"']]
    run_lengths(tmp_path / "in.tsv", tmp_path / "out.tsv", dialect=quoting)
    with (tmp_path / "out.tsv").open(newline="") as file:
        rows = list(csv.reader(file, delimiter="\t", strict=True))
    assert [row[:4] for row in rows[1:]] == [["a\tb", "1", "-3.0", "1"], ["c\nd", '"e"', "-3.0", "1"]]


def test_without_quoting_a_field_that_cannot_be_written_is_a_failed_row(tmp_path):
    (tmp_path / "in.csv").write_bytes(b'text,x\n"a\tb",1\nc,2\n')
    (tmp_path / "in.jsonl").write_bytes(b'{"text": "a\\tb"}\n{"text": "c\\\\"}\n')
    run_lengths(tmp_path / "in.jsonl", tmp_path / "out.tsv", dialect=DialectOptions(quoting="none"))
    rows = [line.split("\t") for line in (tmp_path / "out.tsv").read_text().splitlines()]
    assert [row[0] for row in rows] == ["text", "", "c\\"] and {len(row) for row in rows} == {8}
    assert rows[1][3] == "invalid_record" and "which needs --quoting escaped or rfc4180" in rows[1][4]


def test_the_writer_of_unquoted_fields_escapes_its_delimiter(tmp_path):
    (tmp_path / "in.csv").write_bytes(b"text|x\na|1\n")
    for quoting in ("none", "escaped"):
        run_lengths(tmp_path / "in.csv", tmp_path / "out.csv", dialect=DialectOptions(",", quoting), column="text|x")
        written = (tmp_path / "out.csv").read_text().splitlines()
        assert {line.count(",") for line in written} == {len(ADDED)} and r"\x2c" in written[1]
    options = DialectOptions(",", "escaped")
    record = next(iter(DelimitedReader(str(tmp_path / "out.csv"), "csv", options)))
    assert record.fields["interval"] == "[-3.0, 0.0]"


@pytest.mark.parametrize(
    ("content", "options"),
    [
        (b'text;x\n"a;b";1,5\n', DialectOptions(";")),
        (b'\xef\xbb\xbfsep=;\r\ntext;x\r\n"a;b";1,5\r\n', AUTO),
        (b'"SEP=;"\ntext;x\n"a;b";1,5\n', DialectOptions(";")),
        (b"sep=|\ntext|x\na;b|1,5\n", DialectOptions(quoting="none")),
        (b"text\tx\na;b\t1,5\n", DialectOptions("\\t")),
    ],
)
def test_other_delimiters_are_read_and_kept(tmp_path, content, options):
    (tmp_path / "in.csv").write_bytes(content)
    reader = DelimitedReader(str(tmp_path / "in.csv"), "csv", options)
    assert [record.fields for record in reader] == [{"text": "a;b", "x": "1,5"}]
    for name in ("out.csv", "out.jsonl", "out.tsv"):
        run_lengths(tmp_path / "in.csv", tmp_path / name, dialect=options)
    written, before = ((tmp_path / name).read_bytes().splitlines() for name in ("out.csv", "in.csv"))
    assert len(written) == len(before) and all(map(bytes.startswith, written, before))
    assert written[: len(before) - 2] == before[: len(before) - 2]  # the line with the delimiter, as it was
    assert json.loads((tmp_path / "out.jsonl").read_bytes())["x"] == "1,5"
    assert (tmp_path / "out.tsv").read_bytes().startswith(b"text\tx\tscore")


@pytest.mark.parametrize("delimiter", ["", ";;", "a", "1", " ", '"', "\\", "\n", "\r", "\0", "\xa6"])
def test_what_cannot_be_a_delimiter_is_refused(delimiter):
    with pytest.raises(InputError, match="--delimiter .* one ASCII character"):
        DialectOptions(delimiter)


def test_options_of_delimited_files_that_would_do_nothing_are_refused(tmp_path):
    (tmp_path / "in.jsonl").write_bytes(b'{"text": "a"}\n')
    with pytest.raises(InputError, match="--delimiter is for CSV and TSV, and no file of this run is one"):
        run_lengths(tmp_path / "in.jsonl", tmp_path / "out.jsonl", dialect=DialectOptions(";"))
    (tmp_path / "in.csv").write_bytes(b"sep=;\ntext;x\n")
    with pytest.raises(InputError, match="names ';' as the delimiter, --delimiter says ','"):
        run_lengths(tmp_path / "in.csv", tmp_path / "out.csv", dialect=DialectOptions(","))
    (tmp_path / "in.csv").write_bytes(b"sep=a\ntext;x\n")
    with pytest.raises(InputError, match="names 'a' as the delimiter, which cannot be one"):
        run_lengths(tmp_path / "in.csv", tmp_path / "out.csv")
    run_lengths(tmp_path / "in.jsonl", tmp_path / "out.csv", dialect=DialectOptions(";"))
    assert (tmp_path / "out.csv").read_bytes().startswith(b"text;score;")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"id;text\n1;a\n", "or give --delimiter ';', which its first line has between names"),
        (b"id\ttext\n1\ta\n", r"or give --delimiter '\\t'"),
    ],
)
def test_a_wrong_delimiter_is_named(tmp_path, content, problem):
    (tmp_path / "in.csv").write_bytes(content)
    with pytest.raises(InputError, match="has no field 'text'.*" + re.escape(problem.replace("\\\\", "\\"))):
        run_lengths(tmp_path / "in.csv", tmp_path / "out.csv")
    (tmp_path / "in.tsv").write_bytes(b'"id"\t"text"\n')
    with pytest.raises(InputError, match="has no field 'text'.*in quotes, give --quoting rfc4180"):
        run_lengths(tmp_path / "in.tsv", tmp_path / "out.csv")


@pytest.mark.parametrize(("name", "mark"), [("in.csv", b","), ("in.tsv", b"\t")])
def test_rows_with_fewer_fields_are_filled_and_counted(tmp_path, name, mark):
    """36 names and 34 fields on every row, as crowd-sourcing sites export them."""
    names = [b"text", *(b"c%d" % i for i in range(35))]
    rows = [mark.join([b"ab", *[b"x"] * 33])] * 200
    (tmp_path / name).write_bytes(b"\n".join([mark.join(names), *rows, b""]))
    run = run_lengths(tmp_path / name, tmp_path / f"out_{name}")
    assert run.statuses == {"ok": 200}
    assert isinstance(run._reader, DelimitedReader) and run._reader.short_rows == 200
    assert run._reader.remarks == {"rows with fewer fields": "200, the missing ones are empty"}
    written = (tmp_path / f"out_{name}").read_bytes().splitlines()
    assert all(line.startswith(before + mark * 3 + b"-2.0") for line, before in zip(written[1:], rows, strict=True))
    reader = open_reader(str(tmp_path / f"out_{name}"))
    assert all(record.fields["status"] == "ok" for record in reader)
    assert isinstance(reader, DelimitedReader) and reader.short_rows == 0


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"text,x,\na,1\nb,2,\n", [b"text,x,,score", b"a,1,,-1.0", b"b,2,,-1.0"]),
        (b"text,x,,,\na,1\nb,2,,,\n", [b"text,x,score", b"a,1,-1.0", b"b,2,-1.0"]),
        (b"text,x\na,1,\nb,2,,\n", [b"text,x,score", b"a,1,-1.0", b"b,2,-1.0"]),
        (b'text,x\na,"1,",""\nb,2,"",\n', [b"text,x,score", b'a,"1,",-1.0', b"b,2,-1.0"]),
    ],
)
def test_empty_columns_at_the_end_line_up(tmp_path, content, expected):
    (tmp_path / "in.csv").write_bytes(content)
    run = run_lengths(tmp_path / "in.csv", tmp_path / "out.csv")
    assert run.statuses == {"ok": 2}
    written = (tmp_path / "out.csv").read_bytes().splitlines()
    assert all(map(bytes.startswith, written, expected)) and len(written) == 3
    assert all(record.fields["status"] == "ok" for record in open_reader(str(tmp_path / "out.csv")))


def test_a_short_row_of_many_lines_is_a_row_or_a_stray_quote(tmp_path):
    stray = b'id,text,x\n1,a,b\n2,"open,c\n3,d,say ""hi"""\n4,e,"f"\n'
    records, _ = read(tmp_path, stray.replace(b'say ""hi"""', b'hi"'))
    assert [record.fields and record.fields["id"] for record in records] == ["1", None, "3", "4"]
    records, reader = read(tmp_path, b'id,text,x\n1,"two\nlines, two"\n2,"three\n\nlines"\n3,a\n')
    assert [record.fields["text"] for record in records] == ["two\nlines, two", "three\n\nlines", "a"]
    assert reader.short_rows == 3


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
