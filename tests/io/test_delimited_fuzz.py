"""A few hundred hostile CSV and TSV files, always the same: rows in = rows out, through reader and writer."""

from __future__ import annotations

import random

import pytest

from diffscore_fast.io.delimited import DelimitedReader, DelimitedWriter
from diffscore_fast.io.dialect import DialectOptions
from diffscore_fast.io.files import open_reader, open_writer
from tests.support import rows as support
from tests.support.rows import run_lengths

FILES = 60  # of each dialect
PIECES = [
    b'"',
    b'""',
    b"\t",
    b",",
    b";",
    b"\r",
    b"\0",
    b"\xef\xbb\xbf",
    b"\xff",
    b"\xed\xa0\x80",
    b"\\",
    b"\\t",
    b"\\n",
    b" ",
    b"a",
    b"word",
    "\u2028".encode(),
    "\u0085".encode(),
    b"\x1a",
    "\U0001f600".encode(),
    b"\x0b",
]
DIALECTS = [
    ("tsv", "auto", b"\t"),
    ("tsv", "escaped", b"\t"),
    ("csv", "none", b";"),
    ("csv", "auto", b","),
    ("tsv", "rfc4180", b"\t"),
]


def hostile_file(generator: random.Random, mark: bytes) -> tuple[bytes, list[bytes]]:
    """A file, and its lines behind the header."""
    names = [b"text", b"x", b"y", b""][: generator.randint(1, 4)]
    line_end = generator.choice([b"\n", b"\r\n"])
    lines = []
    for _ in range(generator.randint(0, 12)):
        pieces = [mark] * generator.choice([0, 1, 4]) + PIECES
        fields = [
            b"".join(generator.choices(pieces, k=generator.randint(0, 5)))
            for _ in range(max(1, len(names) + generator.choice([0, 0, 0, -1, 1, 3])))
        ]
        lines.append(mark.join(fields).removesuffix(b"\r"))
    beginning = generator.choice([b"", b"", b"\xef\xbb\xbf"]) + generator.choice([b"", b"", b"sep=" + mark + line_end])
    content = beginning + line_end.join([mark.join(names), *lines])
    return content + line_end * bool(generator.randint(0, 1) or not lines or not lines[-1]), lines


@pytest.mark.parametrize(("form", "quoting", "mark"), DIALECTS)
def test_rows_in_are_rows_out(tmp_path, form, quoting, mark):
    options = DialectOptions(mark.decode(), quoting)
    for seed in range(FILES):
        generator = random.Random(f"{form} {quoting} {seed}")
        content, lines = hostile_file(generator, mark)
        source = tmp_path / f"in{seed}.{form}"
        source.write_bytes(content)
        reader = DelimitedReader(str(source), form, options)
        records = list(reader)
        if quoting != "rfc4180" and form == "tsv" or quoting == "none":
            assert [record.raw for record in records] == lines, seed
            assert [record.line for record in records] == [
                reader.preamble.count(b"\n") + 2 + i for i in range(len(lines))
            ]
        else:  # every byte but line ends and blank lines is in some row
            kept, given = (b"".join(part).translate(None, b" \r\n") for part in ([r.raw for r in records], lines))
            assert kept == given, seed
        for target_form in (form, "csv", "tsv", "jsonl"):
            target = tmp_path / f"out{seed}.{target_form}"
            reader = DelimitedReader(str(source), form, options)
            writer = open_writer(
                str(target), None, reader, reader.columns, {"score": "number", "message": "text"}, options
            )
            accepted = [writer.accept(record) for record in reader]
            for row, record in enumerate(accepted):
                writer.write(record, {"score": float(row), "message": record.problem})
            writer.finish()
            if target_form == "jsonl":
                assert target.read_bytes().count(b"\n") == len(records)
                continue
            assert isinstance(writer, DelimitedWriter)
            said = options if target_form == form else DialectOptions(writer.dialect.delimiter, writer.dialect.quoting)
            back = list(open_reader(str(target), target_form, said))
            assert [record.fields and record.fields["score"] for record in back] == [
                str(float(row)) for row in range(len(records))
            ], (seed, target_form)
            for record, again in zip(accepted, back, strict=True):
                if record.fields is not None:
                    assert {name: again.fields[name] for name in reader.columns} == dict(record.fields), seed
            target.unlink()


@pytest.mark.parametrize(("form", "quoting", "mark"), DIALECTS)
def test_a_run_stopped_anywhere_goes_on_to_the_same_bytes(tmp_path, monkeypatch, form, quoting, mark):
    options = DialectOptions(None if mark == b"," else mark.decode(), quoting)
    line_end, check = b"\r\n", support.check_text
    rows = [
        b"one" + mark + b"1",
        b"short",
        b"",
        b"",
        b"long" + mark * 3,
        b"wrong" + mark * 4 + b"x",
        b'a"b' + mark + b"2",
        b"\xff" + mark + b"3",
        b"last" + mark + b"4",
    ]
    beginning = b"\xef\xbb\xbfsep=" + mark
    source, target = tmp_path / f"in.{form}", tmp_path / f"out.{form}"
    source.write_bytes(line_end.join([beginning, b"text" + mark + b"x" + mark, *rows, b""]))
    run = run_lengths(source, target, dialect=options)
    whole, statuses = target.read_bytes(), run.statuses
    assert whole.startswith(beginning + line_end + b"text" + mark + b"x" + mark + mark + b"score")
    for stop in range(1, statuses.total()):
        target.unlink()
        seen = []

        def stopped(name, value, seen=seen, stop=stop):
            seen.append(value)
            if len(seen) > stop:
                raise KeyboardInterrupt
            return check(name, value)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(support, "check_text", stopped)
            run_lengths(source, target, dialect=options)
        run = run_lengths(source, target, dialect=options, resume=True)
        assert run._kept == stop and run.statuses == statuses
        assert target.read_bytes() == whole
