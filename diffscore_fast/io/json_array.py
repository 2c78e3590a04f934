"""One JSON array of objects, read as a stream: each element is a record, in constant memory.

Where an element ends follows from its brackets and quotes alone, so that one that is not valid JSON costs itself. Where
these do not match (a quote that is never closed, a bracket of the wrong kind) its end is known only if the next line is
an element of its own; otherwise reading ends there, and a last record says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import IO

from diffscore_fast.io.input import UNREADABLE
from diffscore_fast.io.json_object import parse_object
from diffscore_fast.io.record import Record

CHUNK = 1 << 16  # bytes read at once
MAX_ELEMENT = 64 << 20  # bytes; a larger element is more likely an unclosed bracket
_BLANK = b" \t\r\n"
# A whole string without a line end, a bracket or a comma, or a quote whose string is not whole.
_TOKEN = re.compile(rb'"(?:[^"\\\r\n]++|\\[^\r\n])*+"|[][{},"]')
_FAULTY_STRING = re.compile(rb'"(?:[^"\\\r\n]++|\\[^\r\n])*+\\?[\r\n]')
_LINE_END = re.compile(rb"[ \t]*[\r\n]\s*")
_OPENING = {b"{": b"}", b"[": b"]"}


def elements(stream: IO[bytes], line: int) -> Iterator[Record]:
    """The records of an array.

    Parameters
    ----------
    stream : binary file
        What follows the opening bracket.
    line : int
        Line of that bracket, from 1.
    """
    source = _Source(stream, line)
    number = 0
    while True:
        try:
            source.skip_blank()
            byte = source.peek()
            if byte == b"]":
                source.take(1)
                source.skip_blank()
                if source.peek():
                    yield _ended(source, f"text follows the end of the array, after element {number}")
                return
            number += 1
            if byte == b",":
                source.take(1)
                yield Record(
                    source.line, b"", None, f"element {number} is missing: there are two commas, or one at the start"
                )
                continue
            begin, place = source.line, f"element {number} (line {source.line})"
            if not byte:
                yield _ended(source, f"the array has no closing bracket: the file ends behind element {number - 1}")
                return
            raw, problem = source.element()
        except UNREADABLE as error:
            where = f"beyond element {number - 1}, line {source.line}"
            yield Record(source.line, b"", None, f"the file cannot be read {where}: {error}")
            return
        if problem and not source.resynchronised:
            problem = f"{place} {problem}, so that its end is unknown: the array is not read beyond line {begin}"
            yield Record(begin, raw, None, problem)
            return
        yield Record(begin, raw, None, f"{place} {problem}") if problem else _record(begin, raw, place)


def _record(line: int, raw: bytes, place: str) -> Record:
    """An element as a row of JSON Lines: line ends between its values become blanks."""
    record = parse_object(line, raw, place)
    if record.fields is None or not _LINE_END.search(raw):
        return record
    return replace(record, raw=_LINE_END.sub(b" ", raw))


def _ended(source: _Source, problem: str) -> Record:
    return Record(source.line, b"", None, f"{problem} (line {source.line}); nothing beyond is read")


class _Source:
    """A stream of bytes with a look ahead that counts lines."""

    def __init__(self, stream: IO[bytes], line: int) -> None:
        self._stream = stream
        self._buffer = b""
        self._at = 0  # what lies before has been taken
        self._indentation: bytes | None = b""  # before the element, where it begins its line
        self.line = line
        self.resynchronised = False

    def peek(self) -> bytes:
        """The next byte; b"" at the end."""
        if self._at == len(self._buffer):
            self._more()
        return self._buffer[self._at : self._at + 1]

    def take(self, size: int) -> bytes:
        taken = self._buffer[self._at : self._at + size]
        self._at += size
        self.line += taken.count(b"\n")
        return taken

    def skip_blank(self) -> None:
        # What stands before on the same line; None where it is not blank.
        before: bytes | None = b"" if self.resynchronised else None
        while (byte := self.peek()) and byte in _BLANK:
            before = b"" if byte == b"\n" else None if before is None else before + byte
            self.take(1)
        self._indentation = before

    def element(self) -> tuple[bytes, str]:
        """The bytes up to the comma or bracket behind the next element, and what is wrong with its brackets or quotes.

        The comma is taken, the bracket is not. Where something is wrong and the next line begins an element
        (`resynchronised`), the bytes are those up to that line.
        """
        self.resynchronised = False
        open_brackets: list[bytes] = []
        offset = 0  # of the next token, from the element's first byte
        while True:
            token = _TOKEN.search(self._buffer, self._at + offset)
            if token is None or token[0] == b'"':
                if token is not None and _FAULTY_STRING.match(self._buffer, token.start()):
                    return self._faulty("has a line end inside a string: a quote is not closed, or it lacks \\n")
                if len(self._buffer) - self._at > MAX_ELEMENT:
                    return self._faulty(f"has no end within {MAX_ELEMENT >> 20} MiB")
                offset = (len(self._buffer) if token is None else token.start()) - self._at
                if not self._more():
                    if token is None and not open_brackets:
                        return self.take(offset).rstrip(_BLANK), ""
                    what = "a bracket" if token is None else "a quote"
                    return self._faulty(f"ends with the file: {what} is not closed")
                continue
            byte, offset = token[0], token.end() - self._at
            if (
                byte == b"{"
                and not open_brackets
                and self._buffer[self._at : token.start()].rstrip(_BLANK)[-1:] == b"}"
            ):
                return self.take(offset - 1).rstrip(_BLANK), ""  # a comma is missing
            if byte in _OPENING:
                open_brackets.append(_OPENING[byte])
            elif byte in (b"]", b"}"):
                if not open_brackets and byte == b"]":
                    return self.take(offset - 1).rstrip(_BLANK), ""
                if not open_brackets or byte != open_brackets.pop():
                    return self._faulty(f"has a bracket {byte.decode()} that closes none")
            elif byte == b"," and not open_brackets:
                raw = self.take(offset - 1).rstrip(_BLANK)
                self.take(1)
                return raw, ""

    def _faulty(self, problem: str) -> tuple[bytes, str]:
        """An element whose brackets and quotes do not tell its end: perhaps that of its line does."""
        end = self._buffer.find(b"\n", self._at)
        if self._indentation is not None and end >= 0:
            following = self._line_at(end + 1)
            whole = following.strip(_BLANK)
            whole = whole[:-1].rstrip(_BLANK) if whole.endswith((b",", b"]")) else whole
            same = following[: len(following) - len(following.lstrip(b" \t"))] == self._indentation
            if same and (whole.startswith(b"{") and parse_object(0, whole, "").fields is not None):
                self.resynchronised = True
                return self.take(end + 1 - self._at).rstrip(_BLANK).removesuffix(b","), problem
        return self._rest(), problem

    def _line_at(self, place: int) -> bytes:
        """A whole line of the buffer, as far as a line may be long."""
        place -= self._at
        while (end := self._buffer.find(b"\n", self._at + place)) < 0:
            if len(self._buffer) - self._at > MAX_ELEMENT or not self._more():
                return self._buffer[self._at + place :]
        return self._buffer[self._at + place : end]

    def _rest(self) -> bytes:
        """The first line that is left: enough to know the element by."""
        return self._buffer[self._at :].split(b"\n", 1)[0][:CHUNK].rstrip(_BLANK)

    def _more(self) -> bool:
        """Read on: as much again as is there, so that a long element is searched few times."""
        left = self._buffer[self._at :]
        more = self._stream.read(max(CHUNK, len(left)))
        self._buffer, self._at = left + more, 0
        return bool(more)
