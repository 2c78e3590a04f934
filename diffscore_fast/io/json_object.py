"""One JSON object as a record: a line of JSON Lines, or an element of an array."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from json.decoder import WHITESPACE, scanstring  # type: ignore[attr-defined]
from numbers import Number
from typing import Any

from diffscore_fast.io.record import Record
from diffscore_fast.text.checks import kind_of

# A string, a bracket, or any other run of characters up to what ends it.
_PIECE = re.compile(r'"(?:[^"\\]++|\\.)*+"|[][{},]|[^][{},"]+', re.DOTALL)


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
