"""Which reader and which writer a file needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Protocol, get_args

from diffscore_fast.io.delimited import DelimitedReader, DelimitedWriter
from diffscore_fast.io.dialect import AUTO, DialectOptions
from diffscore_fast.io.jsonl import JsonlReader, JsonlWriter
from diffscore_fast.io.output import RowWriter
from diffscore_fast.io.record import FieldType, FileFormat, Record

FORMATS: tuple[FileFormat, ...] = get_args(FileFormat)
_ENDINGS: dict[str, FileFormat] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
}


class RowReader(Protocol):
    """A file of rows: iterating gives its records in order, in constant memory.

    Attributes
    ----------
    path : str
    format : FileFormat
    columns : list of str or None
        Names of its columns; None where every row has its own.
    size, position : int or None, int
        How much there is and how much has been read, in a unit of the format's choice; None where that is unknown.
    blank_lines : int
        Lines passed over so far.
    """

    path: str
    format: FileFormat
    size: int | None
    blank_lines: int

    @property
    def columns(self) -> list[str] | None: ...

    @property
    def position(self) -> int: ...

    def __iter__(self) -> Iterator[Record]: ...


def format_of(path: str) -> FileFormat | None:
    """The format a file's name stands for, .gz and .zst aside; None where it stands for none."""
    return _ENDINGS.get(PurePath(_without_packing(path)).suffix)


def _without_packing(path: str) -> str:
    return path.lower().removesuffix(".gz").removesuffix(".zst")


def open_reader(path: str, file_format: FileFormat | None = None, options: DialectOptions = AUTO) -> RowReader:
    """Open an input; its format follows from its name where none is given, and is else JSON Lines.

    A name in .json, or one that says nothing, may hold one array of objects too: in .jsonl a row is a line.
    """
    arrays = file_format is None and not _without_packing(path).endswith((".jsonl", ".ndjson"))
    file_format = file_format or format_of(path) or "jsonl"
    if file_format == "parquet":
        from diffscore_fast.io.parquet import ParquetReader  # pyarrow takes a third of a second to import

        return ParquetReader(path)
    return JsonlReader(path, arrays=arrays) if file_format == "jsonl" else DelimitedReader(path, file_format, options)


def open_writer(
    path: str,
    file_format: FileFormat | None,
    reader: RowReader,
    columns: list[str],
    added: Mapping[str, FieldType],
    options: DialectOptions = AUTO,
) -> RowWriter:
    """Open an output for the rows of `reader`.

    Parameters
    ----------
    path : str
    file_format : FileFormat or None
        If None, what the name says, else the format of the input.
    reader : RowReader
    columns : list of str
        Columns of the input; for JSON Lines, those at its head.
    added : mapping of str to FieldType
        Fields that will be added.
    options : DialectOptions
        Those of `reader`. An output of the input's format is written as the input is; they hold for a delimited
        output by themselves only where the input is not delimited.

    Raises
    ------
    InputError
        If the output cannot be written, or `options` say something and neither file is delimited.
    """
    file_format = file_format or format_of(path) or reader.format
    options.check_used(reader.format, file_format)
    if reader.format == "parquet" != file_format:
        from diffscore_fast.io.parquet import check_plain

        check_plain(reader.path, reader.schema)  # type: ignore[attr-defined]
    if file_format == "jsonl":
        return JsonlWriter(path)
    if file_format == "parquet":
        from diffscore_fast.io.parquet import ParquetWriter

        return ParquetWriter(path, columns, added, getattr(reader, "schema", None))
    if isinstance(reader, DelimitedReader):
        if reader.format == file_format:
            beginning = reader.preamble + reader.header
            return DelimitedWriter(path, columns, added, file_format, reader.dialect, beginning)
        options = AUTO
    return DelimitedWriter(path, columns, added, file_format, options.to_write(file_format), None)
