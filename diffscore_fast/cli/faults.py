"""What is wrong with the rows of a file, and what to do about it: said before a model is loaded."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from diffscore_fast.cli.console import Console
from diffscore_fast.errors import InputError
from diffscore_fast.io.files import RowReader
from diffscore_fast.io.output import RowWriter
from diffscore_fast.io.record import FileFormat, Record
from diffscore_fast.text.checks import kind_of

# How far `up_to_usable` searches for a record that can be read.
MAX_RECORDS_LOOKED_AT = 10_000
MAX_BYTES_LOOKED_AT = 64 << 20

_FAULT_ADVICE: dict[FileFormat, str] = {
    "jsonl": ". If the file has another format, name it with --format",
    "csv": ". If the file has another delimiter or quoting, name it with --delimiter or --quoting",
    "tsv": ". If the file has another delimiter or quoting, name it with --delimiter or --quoting",
    "parquet": "",
}


def common_fault(records: Sequence[Record], columns: Mapping[str, str], file_format: FileFormat) -> str:
    """If all records fail in the same way: how, and what to do about it. Otherwise "".

    Parameters
    ----------
    records : sequence of Record
    columns : mapping of str to str
        From the name of an option to the column that it names.
    file_format : FileFormat
    """
    if not records:
        return ""
    problems = {re.sub(r"\d+", "#", record.problem.split(": ")[0]) for record in records if record.fields is None}
    if problems:
        if len(problems) > 1 or any(record.fields is not None for record in records):
            return ""
        return records[0].problem + _FAULT_ADVICE[file_format]
    for option, column in columns.items():
        faults = {_fault(record.fields.get(column)) for record in records if record.fields is not None}
        if len(faults) == 1 and (fault := faults.pop()):
            return f"the field {column!r} {fault}. If the texts are in another field, name it with {option}"
    return ""


def _fault(value: Any) -> str:
    """What is wrong with a value in a column of texts or of lists of texts; "" if nothing."""
    if value is None:
        return "is missing"
    if isinstance(value, list):
        return ""
    if not isinstance(value, str):
        return f"is {kind_of(value)}, not text"
    return "" if value.strip() else "is empty"


def up_to_usable(head: list[Record], records: Iterator[Record]) -> list[Record]:
    """The records after `head` up to one that can be read, if `head` has none: a file may begin with broken rows."""
    more: list[Record] = []
    size = 0
    while size < MAX_BYTES_LOOKED_AT and len(more) < MAX_RECORDS_LOOKED_AT:
        if any(record.fields is not None for record in (more[-1:] or head)):
            break
        record = next(records, None)
        if record is None:
            break
        more.append(record)
        size += len(record.raw)
    return more


def say_remarks(reader: RowReader) -> None:
    """Print on standard error what the summary of a `FileRun` says about the rows of a delimited file."""
    for name, remark in remarks(reader).items():
        Console(stderr=True).print(f"{reader.path}: {name}: {remark}", soft_wrap=True, highlight=False, markup=False)


def remarks(*sides: RowReader | RowWriter) -> dict[str, str]:
    """Remarks about the rows of delimited files: the name of each, and how many rows and what became of them."""
    return {name: remark for side in sides for name, remark in getattr(side, "remarks", {}).items()}


def check_column(path: Path | str, present: Collection[str], column: str, option: str) -> None:
    """Raise `InputError` where a file lacks a field that an option names."""
    if column not in present:
        listed = f"{path} has no field {column!r}; it has: {', '.join(present)}. Name one with {option}"
        raise InputError(listed + _another_dialect(list(present), column))


def _another_dialect(present: list[str], column: str) -> str:
    """What to try if the column names look as if the file was read with the wrong delimiter or quoting; else ""."""
    if any(name.strip('"') == column for name in present):
        return "; or, as its fields stand in quotes, give --quoting rfc4180"
    if len(present) > 1:
        return ""
    marks = [mark for mark in ";\t|,:" if column in (name.strip(' "') for name in present[0].split(mark))]
    return f"; or give --delimiter {repr(marks[0])}, which its first line has between names" if marks else ""
