"""JSON Lines, plain or gzip: read as a stream, written back with new fields and every other byte of a row kept."""

from __future__ import annotations

import fcntl
import gzip
import io
import json
import os
import sys
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from diffscore_fast.errors import InputError

STANDARD_STREAM = "-"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_GZIP_MAGIC = b"\x1f\x8b"


@dataclass(frozen=True)
class Record:
    """One row of a file.

    Parameters
    ----------
    line : int
        Line number in the file, from 1.
    raw : bytes
        The line without its end.
    fields : dict or None
        Its values; None where the line is not a JSON object that can be used.
    problem : str
        Why not.
    """

    line: int
    raw: bytes
    fields: dict[str, Any] | None
    problem: str = ""


class JsonlReader:
    """Reads records in order, in constant memory. Blank lines are counted and passed over.

    Parameters
    ----------
    path : str
        A file, gzip or not (its first bytes tell), or "-" for standard input.

    Raises
    ------
    InputError
        If the file cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.blank_lines = 0
        try:
            self._file: IO[bytes] = sys.stdin.buffer if path == STANDARD_STREAM else open(path, "rb")  # noqa: SIM115
            # Only a regular file has a size to measure progress against.
            self.size = os.path.getsize(path) if os.path.isfile(path) else None
            head = self._file.peek(2)[:2] if isinstance(self._file, io.BufferedReader) else b""
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}") from None
        self._lines: IO[bytes] = gzip.GzipFile(fileobj=self._file) if head == _GZIP_MAGIC else self._file  # type: ignore[assignment]

    @property
    def bytes_read(self) -> int:
        """Bytes of the file consumed so far (compressed ones for gzip)."""
        return self._file.tell() if self.size is not None else 0

    def __iter__(self) -> Iterator[Record]:
        line = 0
        while True:
            try:
                raw = self._lines.readline()
            except (EOFError, OSError, zlib.error) as error:
                yield Record(line + 1, b"", None, f"the file cannot be read beyond line {line}: {error}")
                return
            if not raw:
                return
            line += 1
            if line == 1:
                raw = raw.removeprefix(_BYTE_ORDER_MARK)
            raw = raw.rstrip(b"\r\n")
            if raw.strip():
                yield _parse(line, raw)
            else:
                self.blank_lines += 1


class JsonlWriter:
    """Writes rows to `path` by way of `path`.partial, which takes the final name when all is done.

    A run that stops half-way leaves the partial file, whole lines of finished rows. Nothing that is there already is
    touched before the first row. A pipe or device is written directly.

    Parameters
    ----------
    path : str
        A file (gzip where the name ends in .gz), or "-" for standard output.

    Raises
    ------
    InputError
        If the file cannot be written, or another run is writing it.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.is_stream = path == STANDARD_STREAM
        self._target = Path(os.path.realpath(path))  # through a link, to what it names
        self._partial: Path | None = None
        self._started = self._created = False
        try:
            if self.is_stream:
                self._raw: IO[bytes] = sys.stdout.buffer
            elif self._target.is_dir():
                raise InputError(f"cannot write {path}: it is a folder; name a file")
            elif self._target.exists() and not self._target.is_file():
                self._raw = self._target.open("wb")
            elif self._target.exists() and not os.access(self._target, os.W_OK):
                raise InputError(f"cannot write {path}: permission denied")
            else:
                self._partial = partial_path(path)
                self._raw = self._open_partial(self._partial)
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror}") from None
        self._file = self._raw

    def write(self, record: Record, fields: dict[str, Any]) -> None:
        """Write a row: the record's own bytes with `fields` appended, or the text of an unusable line as `raw`."""
        if not self._started:
            self._start()
        if record.fields is None:
            unusable = {"line": record.line, "raw": record.raw.decode("utf-8", "backslashreplace")}
            body, comma = json.dumps(unusable).encode(), b", "
        else:
            body, comma = record.raw.rstrip(), b", " if record.fields else b""
        addition = json.dumps(fields, ensure_ascii=False, allow_nan=False)[1:].encode()
        self._file.write(body[:-1].rstrip() + comma + addition + b"\n")

    def flush(self) -> None:
        self._file.flush()

    def finish(self) -> None:
        """Close, and give the file its name."""
        if not self._started:
            self._start()
        self._file.flush()
        if self.is_stream:
            return
        if self._file is not self._raw:
            self._file.close()
        if self._partial is not None:
            self._raw.flush()
            os.fsync(self._raw.fileno())
            os.replace(self._partial, self._target)
        self._raw.close()

    def abandon(self) -> Path | None:
        """Close what has been written so far, and say where it is; None where there is nothing to look at."""
        if self.is_stream:
            return None
        kept = self._partial if self._started else None
        if self._partial is not None and self._created and not self._started:
            self._partial.unlink(missing_ok=True)
        for file in (self._file, self._raw):
            with suppress(OSError):  # a full disk has been reported already
                file.close()
        return kept

    def _start(self) -> None:
        self._started = True
        if self._partial is not None:
            self._raw.truncate(0)  # what a killed run has left
        if self.path.endswith(".gz"):
            self._file = gzip.GzipFile(fileobj=self._raw, mode="wb", mtime=0)  # type: ignore[assignment]

    def _open_partial(self, partial: Path) -> IO[bytes]:
        while True:
            created = not partial.exists()
            file = partial.open("ab")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
                raise InputError(f"another run is writing {self.path}; wait for it or choose another output") from None
            # Between opening and locking, another run may have finished and taken this very file for its output.
            if partial.exists() and os.path.samestat(os.fstat(file.fileno()), partial.stat()):
                self._created = created
                return file
            file.close()


def partial_path(path: str) -> Path:
    """Where the rows of an unfinished output are."""
    return Path(os.path.realpath(path) + ".partial")


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
        return Record(line, raw, None, f"line {line} is a JSON {type(value).__name__}, not an object")
    if value.repeated is not None:
        return Record(line, raw, None, f"line {line} has the key {value.repeated!r} twice")
    return Record(line, raw, value)
