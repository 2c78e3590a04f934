"""JSON Lines: read as a stream, written back with new fields and every other byte of a row kept.

`NaN`, `Infinity` and `-Infinity`, which Python and pandas write though JSON has no such numbers, are read and kept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from json.decoder import WHITESPACE, scanstring  # type: ignore[attr-defined]
from numbers import Number
from typing import Any

from diffscore_fast.io.input import BYTE_ORDER_MARK, UNREADABLE, InputFile, without_mark
from diffscore_fast.io.output import RowWriter
from diffscore_fast.io.record import FileFormat, Record
from diffscore_fast.text.checks import kind_of

# A string, a bracket, or any other run of characters up to what ends it.
_PIECE = re.compile(r'"(?:[^"\\]++|\\.)*+"|[][{},]|[^][{},"]+', re.DOTALL)


class JsonlReader:
    """Reads records in order, in constant memory. Blank lines are counted and passed over.

    Parameters
    ----------
    path : str
        A file, gzip or zstd or neither (its first bytes tell), or "-" for standard input.
    arrays : bool
        Also take one array of objects: a file whose first byte that is not blank is "[". Each element is a record.

    Raises
    ------
    InputError
        If the file cannot be opened, or is UTF-16.
    """

    format: FileFormat = "jsonl"
    columns: list[str] | None = None  # every row has its own

    def __init__(self, path: str, *, arrays: bool = False) -> None:
        self.path = path
        self.blank_lines = 0
        self._arrays = arrays
        self._input = InputFile(path)
        self.size = self._input.size

    @property
    def position(self) -> int:
        """How much of `size` has been read."""
        return self._input.position

    def __iter__(self) -> Iterator[Record]:
        line, head = 1, b""
        try:
            if self._arrays:
                line, head = self._first_byte()
        except UNREADABLE as error:
            yield Record(1, b"", None, f"the file cannot be read: {error}")
            return
        if head == b"[":
            from diffscore_fast.io.json_array import elements

            yield from elements(self._input.stream, line)
            return
        first = line
        while True:
            try:
                raw = b"" if head.endswith(b"\n") else self._input.stream.readline()
            except UNREADABLE as error:
                yield Record(line, head, None, f"the file cannot be read beyond line {line - 1}: {error}")
                return
            if head:
                raw, head = head + raw, b""
            if not raw:
                return
            if line == first:
                raw = without_mark(self.path, raw)
            raw = raw.rstrip(b"\r\n")
            if raw.strip():
                yield parse_object(line, raw, f"line {line}")
            else:
                self.blank_lines += 1
            line += 1

    def _first_byte(self) -> tuple[int, bytes]:
        """The first byte that is neither blank nor of a byte order mark, and its line."""
        stream = self._input.stream
        head = byte = stream.read(1)
        while byte and len(head) < len(BYTE_ORDER_MARK) and BYTE_ORDER_MARK.startswith(head):
            byte = stream.read(1)
            head += byte
        if len(head) > 1 and head != BYTE_ORDER_MARK:
            return 1, head
        head = stream.read(1) if head == BYTE_ORDER_MARK else head
        while head and not head.strip():
            self.blank_lines += head == b"\n"
            head = stream.read(1)
        return self.blank_lines + 1, head


@dataclass(frozen=True)
class JsonNumber(Number):
    """A number by its spelling: one that JSON lacks (NaN, Infinity), or of more digits than Python reads."""

    text: str

    def __str__(self) -> str:
        return self.text

    def __hash__(self) -> int:
        return hash(self.text)


class JsonlRecord(Record):
    """A line of JSON Lines."""

    def text_fields(self) -> dict[str, str | None]:
        """As for every record; what is not a string is the line's own JSON, digit by digit."""
        text = self.raw.decode("utf-8")
        fields: dict[str, str | None] = {}

        def skip(at: int) -> int:
            return WHITESPACE.match(text, at).end()

        at = skip(text.index("{") + 1)
        while text[at] == '"':
            name, at = scanstring(text, at + 1, True)
            begin = skip(text.index(":", at) + 1)
            end = _value_end(text, begin)
            value = text[begin:end].rstrip()
            fields[name] = scanstring(value, 1, True)[0] if value[0] == '"' else None if value == "null" else value
            at = skip(end)
            at = skip(at + 1) if text[at] == "," else at
        return fields


class JsonlWriter(RowWriter):
    """Writes rows as JSON Lines. Parameters and errors as for `RowWriter`."""

    format: FileFormat = "jsonl"

    def _write(self, record: Record, fields: dict[str, Any]) -> None:
        """The record's own bytes with `fields` appended, or the text of an unusable line as `raw`."""
        if record.fields is None:
            unusable = {"line": record.line, "raw": record.raw.decode("utf-8", "backslashreplace")}
            body = json.dumps(unusable).encode()
        elif isinstance(record, JsonlRecord):
            body = record.raw.rstrip()
        else:
            body = json.dumps(record.json_fields(), ensure_ascii=False, allow_nan=False).encode()
        comma = b"" if record.fields is not None and not record.fields else b", "
        addition = json.dumps(fields, ensure_ascii=False, allow_nan=False)[1:].encode()
        self._file.write(body[:-1].rstrip() + comma + addition + b"\n")


class _TopLevel(dict):
    """A JSON object that remembers a repeated key. The hook runs innermost first; only the outermost is asked."""

    repeated: str | None = None


def _object(pairs: list[tuple[str, Any]]) -> _TopLevel:
    fields = _TopLevel(pairs)
    if len(fields) < len(pairs):
        seen: set[str] = set()
        fields.repeated = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
    return fields


def _integer(digits: str) -> int | JsonNumber:
    try:
        return int(digits)
    except ValueError:  # longer than Python reads
        return JsonNumber(digits)


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=JsonNumber, parse_int=_integer)


def parse_object(line: int, raw: bytes, place: str) -> Record:
    """The record of a JSON object that begins in a line; `place` is what messages call it."""
    try:
        value = _DECODER.decode(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Record(line, raw, None, f"{place} is not UTF-8: byte {error.start} is 0x{raw[error.start]:02x}")
    except RecursionError:
        return Record(line, raw, None, f"{place} is nested too deeply")
    except json.JSONDecodeError as error:
        return Record(line, raw, None, f"{place} is not JSON: {error.msg} at column {error.pos + 1}")
    if not isinstance(value, _TopLevel):
        return Record(line, raw, None, f"{place} is {kind_of(value)}, not an object")
    if value.repeated is not None:
        return Record(line, raw, None, f"{place} has the key {value.repeated!r} twice")
    return JsonlRecord(line, raw, value)


def _value_end(text: str, begin: int) -> int:
    """Where a value of valid JSON ends. Without recursion: what could be parsed once can be copied at any depth."""
    depth = 0
    for piece in _PIECE.finditer(text, begin):
        first = piece[0][0]
        if depth == 0 and first in ",}]":
            return piece.start()
        depth += (first in "[{") - (first in "]}")
        if depth == 0 and first in '"]}':
            return piece.end()
    return len(text)
