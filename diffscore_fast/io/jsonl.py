"""JSON Lines: read as a stream, written back with new fields and every other byte of a row kept."""

from __future__ import annotations

import json
from collections.abc import Iterator
from json.decoder import WHITESPACE, scanstring  # type: ignore[attr-defined]
from typing import Any

from diffscore_fast.io.input import UNREADABLE, InputFile, without_mark
from diffscore_fast.io.output import RowWriter
from diffscore_fast.io.record import FileFormat, Record
from diffscore_fast.text.checks import kind_of


class JsonlReader:
    """Reads records in order, in constant memory. Blank lines are counted and passed over.

    Parameters
    ----------
    path : str
        A file, gzip or zstd or neither (its first bytes tell), or "-" for standard input.

    Raises
    ------
    InputError
        If the file cannot be opened, or is UTF-16.
    """

    format: FileFormat = "jsonl"
    columns: list[str] | None = None  # every row has its own

    def __init__(self, path: str) -> None:
        self.path = path
        self.blank_lines = 0
        self._input = InputFile(path)
        self.size = self._input.size

    @property
    def position(self) -> int:
        """How much of `size` has been read."""
        return self._input.position

    def __iter__(self) -> Iterator[Record]:
        line = 0
        while True:
            try:
                raw = self._input.stream.readline()
            except UNREADABLE as error:
                yield Record(line + 1, b"", None, f"the file cannot be read beyond line {line}: {error}")
                return
            if not raw:
                return
            line += 1
            if line == 1:
                raw = without_mark(self.path, raw)
            raw = raw.rstrip(b"\r\n")
            if raw.strip():
                yield _parse(line, raw)
            else:
                self.blank_lines += 1


class JsonlRecord(Record):
    """A line of JSON Lines."""

    def text_fields(self) -> dict[str, str | None]:
        """As for every record; what is not a string is the line's own JSON, digit by digit."""
        text = self.raw.decode("utf-8")
        decoder, fields = json.JSONDecoder(), {}

        def skip(at: int) -> int:
            return WHITESPACE.match(text, at).end()

        at = skip(text.index("{") + 1)
        while text[at] == '"':
            name, at = scanstring(text, at + 1, True)
            begin = skip(text.index(":", at) + 1)
            value, end = decoder.raw_decode(text, begin)
            fields[name] = value if value is None or isinstance(value, str) else text[begin:end]
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


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _parse(line: int, raw: bytes) -> Record:
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_object, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        return Record(line, raw, None, f"line {line} is not UTF-8: byte {error.start} is 0x{raw[error.start]:02x}")
    except RecursionError:
        return Record(line, raw, None, f"line {line} is nested too deeply")
    except json.JSONDecodeError as error:
        return Record(line, raw, None, f"line {line} is not JSON: {error.msg} at column {error.colno}")
    except ValueError as error:  # NaN, Infinity, or a number with more digits than Python reads
        return Record(line, raw, None, f"line {line} is not JSON: {error}")
    if not isinstance(value, _TopLevel):
        return Record(line, raw, None, f"line {line} is {kind_of(value)}, not an object")
    if value.repeated is not None:
        return Record(line, raw, None, f"line {line} has the key {value.repeated!r} twice")
    return JsonlRecord(line, raw, value)
