"""CSV and TSV: read as a stream, written back with new columns behind each row.

CSV is read as RFC 4180 defines it, TSV without quotes: there a line is a row. Every value is text: nothing is taken for
a number, a date or a null, and an empty field is the empty text.
"""

from __future__ import annotations

import csv
import re
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from diffscore_fast.errors import InputError
from diffscore_fast.io.dialect import AUTO, Dialect, DialectOptions, may_delimit
from diffscore_fast.io.input import UNREADABLE, InputFile, without_mark
from diffscore_fast.io.output import ColumnWriter
from diffscore_fast.io.record import FieldType, FileFormat, Record, value_text

# A row of many lines is one that has line ends inside quotes. Beyond this a quote that was never closed is likelier.
MAX_QUOTED = 16 << 20
# Excel's first line, which names the delimiter.
_SEPARATOR_LINE = re.compile(rb'"?sep=(.)"?\r?\n?', re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True)
class DelimitedRecord(Record):
    """A row of a delimited file.

    Parameters
    ----------
    dialect : Dialect
    missing : int
        Fields that the header has and the row's text has not; negative where the text has empty fields beyond it.
    """

    dialect: Dialect | None = None
    missing: int = 0


class DelimitedReader:
    """Reads records in order, in constant memory. The first line names the columns.

    Without quoting every line is a row, a blank one too. With it, a line that cannot be parsed costs itself alone:
    reading resumes at the next line, even where the fault is a quote that is never closed; blank lines are counted
    and passed over; in a file of one column they are empty texts.

    Fields that a row lacks at its end are empty, and empty fields beyond the header are passed over; such rows are
    counted.

    Parameters
    ----------
    path : str
        A file, gzip or zstd or neither (its first bytes tell), or "-" for standard input.
    file_format : FileFormat
        "csv" or "tsv".
    options : DialectOptions
        Where it names no delimiter, a first line such as `sep=;` does.

    Attributes
    ----------
    preamble, header : bytes
        What stands before the names of the columns (a byte order mark, a `sep=;` line), and their line.

    Raises
    ------
    InputError
        If the file cannot be opened, has no usable header, or is not UTF-8 there.
    """

    def __init__(self, path: str, file_format: FileFormat, options: DialectOptions = AUTO) -> None:
        self.path, self.format = path, file_format
        self.blank_lines = self.short_rows = self.long_rows = self.quoted_rows = 0
        csv.field_size_limit(sys.maxsize)  # the module's own limit, 131,072 characters, is for all its readers
        self._input = InputFile(path)
        self.size = self._input.size
        self._lines = _Lines(self._input)
        self._next_line = 1
        self._widths: set[int] = set()  # of the rows so far
        self.preamble, self.dialect = self._first_line(options.to_read(file_format), options.delimiter)
        self._rows = csv.reader(self._lines, delimiter=self.dialect.delimiter, strict=True)
        self.columns, self.header = self._header()

    @property
    def position(self) -> int:
        """How much of `size` has been read."""
        return self._input.position

    @property
    def remarks(self) -> dict[str, str]:
        """What is to be said about the rows read so far: a name, and how many and what became of them."""
        return _remarks(
            ("rows with fewer fields", self.short_rows, "the missing ones are empty"),
            ("rows with empty fields more", self.long_rows, "left out"),
            ("rows with fields in quotes", self.quoted_rows, "kept (else: --quoting rfc4180)"),
        )

    def __iter__(self) -> Iterator[Record]:
        while True:
            record = self._next()
            if record is None:
                return
            if record.raw.strip(b" ") or record.problem or len(self.columns) == 1 or not self.dialect.quoted:
                yield record
            else:
                self.blank_lines += 1

    def _first_line(self, dialect: Dialect, given: str | None) -> tuple[bytes, Dialect]:
        """What stands before the header, and the dialect that it tells."""
        try:
            first = self._input.stream.readline()
        except UNREADABLE as error:
            raise InputError(f"{self.path} has no usable header line: {error}") from None
        line = without_mark(self.path, first)
        named = _SEPARATOR_LINE.fullmatch(line)
        if named is None:
            self._lines.push(line)
            return first[: len(first) - len(line)], dialect
        delimiter = named[1].decode("latin-1")
        if not may_delimit(delimiter):
            raise InputError(f"the first line of {self.path} names {delimiter!r} as the delimiter, which cannot be one")
        if given not in (None, delimiter):
            raise InputError(
                f"the first line of {self.path} names {delimiter!r} as the delimiter, --delimiter says "
                f"{given!r}; leave out the option, or that line"
            )
        self._next_line += 1
        return first, replace(dialect, delimiter=delimiter)

    def _header(self) -> tuple[list[str], bytes]:
        try:
            names = self._values()
        except StopIteration:
            names = []
        except (csv.Error, *UNREADABLE) as error:
            raise InputError(f"{self.path} has no usable header line: {_reason(error)}") from None
        if self._lines.failure is not None:
            raise InputError(f"{self.path} has no usable header line: {self._lines.failure}")
        if not names or (names == [""] and not self.dialect.quoted):
            raise InputError(f"{self.path} has no header line; the first line must name the columns")
        if self._lines.not_text:
            raise InputError(f"the header line of {self.path} is not UTF-8: {self._lines.not_text}; convert the file")
        if not self.dialect.quoted and b"\r" in self._without_end(self._lines.taken[0]):
            raise InputError(
                f"{self.path} has no usable header line: a carriage return stands in it; convert its line ends"
            )
        self._next_line += len(self._lines.taken)
        raw = b"".join(self._lines.taken)
        columns = list(names)
        if columns[-2:] == ["", ""]:  # one column may have no name; several at the end are none
            while len(columns) > 1 and columns[-1] == "":
                columns.pop()
        if len(set(columns)) < len(columns):
            repeated = next(name for name in columns if columns.count(name) > 1)
            raise InputError(f"{self.path} has the column {repeated!r} twice; rename one")
        bare = raw.rstrip(b"\r\n")
        return columns, _lined_up(bare, self.dialect, len(columns) - len(names), columns) + raw[len(bare) :]

    def _values(self) -> list[str]:
        """The fields of the next row; raises StopIteration at the end."""
        if self.dialect.quoted:
            return next(self._rows)
        line = next(self._lines)
        return self.dialect.split(line.removesuffix("\n").removesuffix("\r"))

    def _next(self) -> Record | None:
        line = self._next_line
        self._lines.forget()
        try:
            values = self._values() or [""]
            if self._swallows(values):
                raise csv.Error("unexpected end of data")
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
        missing = len(self.columns) - len(values)
        if any(values[len(self.columns) :]):
            counts = f"{len(values)} {'field' if len(values) == 1 else 'fields'}, the header {len(self.columns)}"
            return self._unusable(line, raw, f"line {line} has {counts}")
        fields = dict(zip(self.columns, values + [""] * missing, strict=False))
        record = DelimitedRecord(line, self._without_end(raw), fields, "", self.dialect, missing)
        if record.raw.strip(b" ") or not self.dialect.quoted:
            self._count(values, missing, raw)
        return record

    def _swallows(self, values: list[str]) -> bool:
        """Whether a row of several lines looks like a stray quote that took whole rows up to the next quote."""
        if len(self._lines.taken) < 2 or len(values) >= len(self.columns) or len(values) in self._widths:
            return False
        last = self._lines.taken[-1].decode("utf-8", "surrogateescape")
        alone = next(csv.reader([last], delimiter=self.dialect.delimiter), [])
        return len(alone) in (self._widths or {len(self.columns)})

    def _count(self, values: list[str], missing: int, raw: bytes) -> None:
        self._widths.add(len(values))
        self.short_rows += missing > 0
        self.long_rows += missing < 0
        if not self.dialect.quoted and b'"' in raw:
            self.quoted_rows += any(len(value) > 1 and value[0] == value[-1] == '"' for value in values)

    def _without_end(self, raw: bytes) -> bytes:
        """A row's bytes without its line end; without quoting, a carriage return before it belongs to the text."""
        return raw.rstrip(b"\r\n") if self.dialect.quoted else raw.removesuffix(b"\n").removesuffix(b"\r")

    def _unusable(self, line: int, raw: bytes, problem: str) -> Record:
        return DelimitedRecord(line, self._without_end(raw), None, problem, self.dialect)


class DelimitedWriter(ColumnWriter):
    """Writes rows as CSV or TSV: rows of the same dialect byte for byte, with the added fields behind them.

    A null is an empty field, a list or object its JSON. What UTF-8 cannot hold (a lone surrogate) is written as
    its escape.

    Parameters
    ----------
    path, columns, added
        As for `ColumnWriter`.
    file_format : FileFormat
    dialect : Dialect
    beginning : bytes or None
        Preamble and header line of an input of the same format, which is of the same dialect then.
    """

    def __init__(
        self,
        path: str,
        columns: list[str],
        added: Mapping[str, FieldType],
        file_format: FileFormat,
        dialect: Dialect,
        beginning: bytes | None,
    ) -> None:
        super().__init__(path, columns, added)
        self.format, self.dialect = file_format, dialect
        self.escaped_rows = 0
        self._beginning = beginning
        self._line_end = b"\r\n" if beginning is not None and beginning.endswith(b"\r\n") else b"\n"

    @property
    def remarks(self) -> dict[str, str]:
        """What is to be said about the rows written so far, as for `DelimitedReader`."""
        return _remarks((r"rows with \t \n \r \\", self.escaped_rows, "to be read with --quoting escaped"))

    def accept(self, record: Record) -> Record:
        """As for every writer; without quoting, a field of another format may hold what the output cannot."""
        if record.fields is not None and not self._keeps(record) and self.dialect.quoting == "none":
            unfit = [name for name, value in record.text_fields().items() if not self.dialect.holds(value)]
            if unfit:
                problem = (
                    f"line {record.line} has a delimiter or line end in the field {unfit[0]!r}, which needs "
                    "--quoting escaped or rfc4180"
                )
                record = replace(record, fields=None, problem=problem)
        return super().accept(record)

    def _begin(self) -> None:
        kept = self.dialect.joined(self._columns) if self._beginning is None else self._beginning.rstrip(b"\r\n")
        self._write_parts(kept, self.dialect.joined(self._added))

    def _write(self, record: Record, fields: dict[str, Any]) -> None:
        values: list[str | None] = []
        if record.fields is None:
            kept = self.dialect.joined([None] * len(self._columns))
        elif self._keeps(record):
            assert isinstance(record, DelimitedRecord)
            kept = _lined_up(record.raw, self.dialect, record.missing, list(record.fields.values()))
        else:
            texts = record.text_fields()
            values = [texts.get(name) for name in self._columns]
            kept = self.dialect.joined(values)
        added = [value_text(fields.get(name)) for name in self._added]
        if self.dialect.quoting == "escaped":
            self.escaped_rows += any(value and self.dialect.written(value) != value for value in (*values, *added))
        self._write_parts(kept, self.dialect.joined(added))

    def _keeps(self, record: Record) -> bool:
        """Whether the row is written with its own bytes."""
        return self._beginning is not None and isinstance(record, DelimitedRecord)

    def _write_parts(self, kept: bytes, added: bytes) -> None:
        delimiter = self.dialect.delimiter.encode() if self._columns else b""
        self._file.write(kept + delimiter + added + self._line_end)


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
        if len(self.taken) > 1 and self._size > MAX_QUOTED:
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


def _remarks(*counted: tuple[str, int, str]) -> dict[str, str]:
    return {name: f"{count:,}, {remark}" for name, count, remark in counted if count}


def _lined_up(raw: bytes, dialect: Dialect, missing: int, values: list[str]) -> bytes:
    """A row's bytes with as many fields as the header: empty ones added at its end, or empty ones left out."""
    delimiters = dialect.delimiter.encode() * abs(missing)
    if missing >= 0:
        return raw + delimiters
    return raw.removesuffix(delimiters) if raw.endswith(delimiters) else dialect.joined(values)


def _reason(error: Exception) -> str:
    """The csv module's messages, for people who do not program with it."""
    message = str(error)
    if message.startswith("unexpected end of data"):
        return "a quote is opened and never closed"
    if message.startswith("new-line character"):
        return "a carriage return stands outside quotes"
    return "text follows a closing quote" if "expected after" in message else message
