"""Files of rows for tests, written and read by other code than what is tested, and a run over them without a model."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
from hypothesis import strategies as st
from pyarrow import parquet

from diffscore_fast.cli.rows import FileRun
from diffscore_fast.io.dialect import AUTO, DialectOptions
from diffscore_fast.io.files import format_of
from diffscore_fast.status import EMPTY_TEXT, OK
from diffscore_fast.text.checks import check_text

NAMES = (
    "rows.jsonl",
    "rows.jsonl.gz",
    "rows.jsonl.zst",
    "rows.csv",
    "rows.csv.gz",
    "rows.csv.zst",
    "rows.tsv",
    "rows.parquet",
)
ADDED = {
    "score": "number",
    "tokens": "count",
    "status": "text",
    "message": "text",
    "profile": "named_numbers",
    "token_scores": "spans",
    "interval": "numbers",
}

# Any value that JSON can hold.
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@dataclass(frozen=True)
class LengthTable:
    texts: list[Any]
    status: list[str]
    messages: list[str]


def run_lengths(source, target, column: str = "text", quiet: bool = True, **options: Any) -> FileRun:
    """Read `source`, write `target`: a text's score is minus its length, its status that of its value."""
    run = FileRun(str(source), str(target), {"--text-column": column}, ADDED, prefix="", quiet=quiet, **options)

    def batches(rows, progress):
        for (text,) in rows:
            status, message = check_text("text", text)
            if status == OK and not text:
                status, message = EMPTY_TEXT, "no tokens"
            progress(100)
            yield LengthTable([text], [status], [message])

    def fields(record, table, row):
        if table.status[row] != OK:
            return {"score": None, "tokens": 0, "profile": None, "token_scores": None, "interval": [None, None]}
        score = -float(len(table.texts[row]))
        return {
            "score": score,
            "tokens": 1,
            "profile": {"0.1": score, "0.2": None},
            "token_scores": [(0, 1, score), (1, 2, None)],
            "interval": [score, 0.0],
        }

    try:
        run.process(batches, fields, "test")
    except BaseException:
        run.abandon()
        raise
    return run


def write_rows(path: Path, rows: list[dict[str, str | None]], names: list[str]) -> None:
    """A file in the format and compression of its name."""
    form = format_of(str(path))
    if form == "parquet":
        columns = {name: pyarrow.array([row[name] for row in rows], pyarrow.string()) for name in names}
        parquet.write_table(pyarrow.table(columns), path)
        return
    if form == "jsonl":
        content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    else:
        content = delimited_bytes([names, *([row[name] for name in names] for row in rows)], form)
    pack(path, content)


def delimited_bytes(rows: list, form: str) -> bytes:
    """CSV with quotes, TSV with escapes."""
    if form == "tsv":
        return "".join("\t".join(escaped(value or "") for value in row) + "\r\n" for row in rows).encode()
    out = io.StringIO(newline="")
    csv.writer(out).writerows(rows)
    return out.getvalue().encode()


def escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\t", "\\t").replace("\n", "\\n").replace("\r", "\\r")


def unescaped(text: str) -> str:
    meanings = {"t": "\t", "n": "\n", "r": "\r", "\\": "\\"}
    return re.sub(r"\\([tnr\\])", lambda found: meanings[found[1]], text)


def dialect_of(name: str) -> DialectOptions:
    """What must be said to read what `write_rows` has written."""
    return DialectOptions(quoting="escaped") if format_of(name) == "tsv" else AUTO


def pack(path: Path, content: bytes) -> None:
    if path.suffix == ".gz":
        content = gzip.compress(content)
    if path.suffix == ".zst":
        with pyarrow.CompressedOutputStream(str(path), "zstd") as file:
            file.write(content)
    else:
        path.write_bytes(content)


def read_rows(path: Path) -> list[dict]:
    form = format_of(str(path))
    if form == "parquet":
        return parquet.read_table(path).to_pylist()
    content = path.read_bytes()
    if path.suffix == ".gz":
        content = gzip.decompress(content)
    if path.suffix == ".zst":
        content = pyarrow.input_stream(str(path)).read()
    if form == "jsonl":
        return [json.loads(line) for line in content.split(b"\n") if line]
    if form == "tsv":
        names, *rows = [line.removesuffix("\r").split("\t") for line in content.decode().split("\n")[:-1]]
        assert {len(row) for row in rows} <= {len(names)}
        return [dict(zip(map(unescaped, names), map(unescaped, row), strict=True)) for row in rows]
    csv.field_size_limit(sys.maxsize)
    return list(csv.DictReader(io.StringIO(content.decode(), newline=""), strict=True))
