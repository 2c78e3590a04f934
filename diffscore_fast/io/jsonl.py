"""JSON Lines: read as a stream, written back with new fields and every other byte of a row kept.

`NaN`, `Infinity` and `-Infinity`, which Python and pandas write though JSON has no such numbers, are read and kept.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from diffscore_fast.io.input import BYTE_ORDER_MARK, UNREADABLE, InputFile, without_mark
from diffscore_fast.io.json_array import elements
from diffscore_fast.io.json_object import JsonlRecord, parse_object
from diffscore_fast.io.output import RowWriter
from diffscore_fast.io.record import FileFormat, Record


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


_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)  # `json.dumps` makes one for every row


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
            body = _ENCODER.encode(record.json_fields()).encode()
        comma = b"" if record.fields is not None and not record.fields else b", "
        addition = _ENCODER.encode(fields)[1:].encode()
        self._file.write(body[:-1].rstrip() + comma + addition + b"\n")
