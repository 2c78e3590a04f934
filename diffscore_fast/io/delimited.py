"""CSV and TSV (RFC 4180, with a comma or a tab): read as a stream, written back with new columns behind each row.

Every value is text: nothing is taken for a number, a date or a null, and an empty field is the empty text.
"""

from __future__ import annotations

import csv
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from diffscore_fast.errors import InputError
from diffscore_fast.io.input import UNREADABLE, InputFile, without_mark
from diffscore_fast.io.output import ColumnWriter
from diffscore_fast.io.record import FieldType, FileFormat, Record, value_text

DELIMITERS: dict[FileFormat, str] = {"csv": ",", "tsv": "\t"}
# A row of many lines is one that has line ends inside quotes. Beyond this a quote that was never closed is likelier.
LONGEST_QUOTED = 16 << 20


@dataclass(frozen=True)
class DelimitedRecord(Record):
    """A row of a delimited file."""

    format: FileFormat = "csv"


class DelimitedReader:
    """Reads records in order, in constant memory. The first line names the columns.

    A line that cannot be parsed costs itself alone: reading resumes at the next line, even where the fault is a quote
    that is never closed. Blank lines are counted and passed over; in a file of one column they are empty texts.

    Parameters
    ----------
    path : str
        A file, gzip or zstd or neither (its first bytes tell), or "-" for standard input.
    file_format : FileFormat
        "csv" or "tsv".

    Raises
    ------
    InputError
        If the file cannot be opened, has no usable header, or is not UTF-8 there.
    """

    def __init__(self, path: str, file_format: FileFormat) -> None:
        self.path, self.format = path, file_format
        self.blank_lines = 0
        csv.field_size_limit(sys.maxsize)  # the module's own limit, 131,072 characters, is for all its readers
        self._input = InputFile(path)
        self.size = self._input.size
        self._lines = _Lines(self._input)
        self._rows = csv.reader(self._lines, delimiter=DELIMITERS[file_format], strict=True)
        self._next_line = 1
        self.columns, self.header = self._header()

    @property
    def position(self) -> int:
        """How much of `size` has been read."""
        return self._input.position

    def __iter__(self) -> Iterator[Record]:
        while True:
            record = self._next()
            if record is None:
                return
            if record.raw.strip(b" ") or record.problem or len(self.columns) == 1:
                yield record
            else:
                self.blank_lines += 1

    def _header(self) -> tuple[list[str], bytes]:
        try:
            first = self._input.stream.readline()
            self._lines.push(without_mark(self.path, first))
            names = next(self._rows, None)
        except (csv.Error, *UNREADABLE) as error:
            raise InputError(f"{self.path} has no usable header line: {_reason(error)}") from None
        if not names:
            raise InputError(f"{self.path} has no header line; the first line must name the columns")
        if self._lines.not_text:
            raise InputError(f"the header line of {self.path} is not UTF-8: {self._lines.not_text}; convert the file")
        if len(set(names)) < len(names):
            repeated = next(name for name in names if names.count(name) > 1)
            raise InputError(f"{self.path} has the column {repeated!r} twice; rename one")
        self._next_line += len(self._lines.taken)
        return names, first + b"".join(self._lines.taken[1:])

    def _next(self) -> Record | None:
        line = self._next_line
        self._lines.forget()
        try:
            values = next(self._rows)
        except StopIteration:
            if self._lines.failure is None:
                return None
            failure, self._lines.failure = self._lines.failure, None
            return self._unusable(line, b"", f"the file cannot be read beyond line {line - 1}: {failure}")
        except csv.Error as error:
            first, *rest = self._lines.taken
            self._lines.push(*rest)
            self._next_line += 1
            return self._unusable(line, first, f"line {line} is not {self.format.upper()}: {_reason(error)}")
        self._next_line += len(self._lines.taken)
        raw = b"".join(self._lines.taken)
        if self._lines.not_text:
            return self._unusable(line, raw, f"line {line} is not UTF-8: {self._lines.not_text}")
        values = values or [""]
        fields = dict(zip(self.columns, values, strict=False))
        record = DelimitedRecord(line, _without_end(raw), fields, "", self.format)
        if len(values) != len(self.columns) and record.raw.strip(b" "):
            counts = f"{len(values)} {'field' if len(values) == 1 else 'fields'}, the header {len(self.columns)}"
            return self._unusable(line, raw, f"line {line} has {counts}")
        return record

    def _unusable(self, line: int, raw: bytes, problem: str) -> Record:
        return DelimitedRecord(line, _without_end(raw), None, problem, self.format)


class DelimitedWriter(ColumnWriter):
    """Writes rows as CSV or TSV: rows of the same format byte for byte, with the added fields behind them.

    A null is an empty field, a list or object its JSON. What UTF-8 cannot hold (a lone surrogate) is written as
    its escape.

    Parameters
    ----------
    path, columns, added
        As for `ColumnWriter`.
    file_format : FileFormat
    header : bytes or None
        Header line of an input of the same format.
    """

    def __init__(self, path: str, columns: list[str], added: Mapping[str, FieldType],
                 file_format: FileFormat, header: bytes | None) -> None:  # fmt: skip
        super().__init__(path, columns, added)
        self.format, self._delimiter = file_format, DELIMITERS[file_format]
        self._header = header
        self._line_end = b"\r\n" if header is not None and header.endswith(b"\r\n") else b"\n"

    def _begin(self) -> None:
        kept = self._joined(list(self._columns)) if self._header is None else _without_end(self._header)
        self._write_parts(kept, self._joined(list(self._added)))

    def _write(self, record: Record, fields: dict[str, Any]) -> None:
        if record.fields is None:
            kept = self._joined([None] * len(self._columns))
        elif isinstance(record, DelimitedRecord) and record.format == self.format:
            kept = record.raw
        else:
            texts = record.text_fields()
            kept = self._joined([texts.get(name) for name in self._columns])
        self._write_parts(kept, self._joined([value_text(fields.get(name)) for name in self._added]))

    def _write_parts(self, kept: bytes, added: bytes) -> None:
        delimiter = self._delimiter.encode() if self._columns else b""
        self._file.write(kept + delimiter + added + self._line_end)

    def _joined(self, values: list[str | None]) -> bytes:
        return self._delimiter.join(map(self._quoted, values)).encode("utf-8", "backslashreplace")

    def _quoted(self, value: str | None) -> str:
        if not value:
            return ""
        special = self._delimiter in value or '"' in value or "\n" in value or "\r" in value
        return '"' + value.replace('"', '""') + '"' if special else value


class _Lines:
    """Feeds a csv reader line by line and remembers what it took, so that a row's bytes can be kept as they are."""

    def __init__(self, source: InputFile) -> None:
        self._stream = source.stream
        self._waiting: deque[bytes] = deque()
        self._ended = False
        self.failure: Exception | None = None  # what ended the file before its end
        self.forget()

    def push(self, *lines: bytes) -> None:
        """Put lines back, before all others."""
        self._waiting.extendleft(reversed(lines))

    def forget(self) -> None:
        """Begin a row."""
        self.taken: list[bytes] = []
        self.not_text = ""
        self._size = 0

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        if len(self.taken) > 1 and self._size > LONGEST_QUOTED:
            raise StopIteration  # to the csv reader, the end of the data inside quotes
        line = self._waiting.popleft() if self._waiting else self._read()
        if not line:
            raise StopIteration
        self.taken.append(line)
        self._size += len(line)
        try:
            return line.decode("utf-8")
        except UnicodeDecodeError as error:
            self.not_text = f"byte {error.start} is 0x{line[error.start]:02x}"
            return line.decode("utf-8", "surrogateescape")

    def _read(self) -> bytes:
        if self._ended:
            return b""
        try:
            line = self._stream.readline()
        except UNREADABLE as error:
            line, self.failure = b"", error
        self._ended = not line
        return line


def _without_end(raw: bytes) -> bytes:
    return raw.rstrip(b"\r\n")


def _reason(error: Exception) -> str:
    """The csv module's messages, for people who do not program with it."""
    message = str(error)
    if message.startswith("unexpected end of data"):
        return "a quote is opened and never closed"
    if message.startswith("new-line character"):
        return "a carriage return stands outside quotes"
    return "text follows a closing quote" if "expected after" in message else message
