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

    A run that stops half-way leaves the partial file, whole lines of finished rows.

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
        self._partial = Path(path + ".partial")
        if path == STANDARD_STREAM:
            self._file: IO[bytes] = sys.stdout.buffer
            self._raw = self._file
            return
        if os.path.isdir(path):
            raise InputError(f"cannot write {path}: it is a folder; name a file")
        if os.path.exists(path) and not os.access(path, os.W_OK):
            raise InputError(f"cannot write {path}: permission denied")
        try:
            self._raw = open(self._partial, "ab")  # noqa: SIM115
            fcntl.flock(self._raw, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._raw.truncate(0)
        except BlockingIOError:
            raise InputError(f"another run is writing {path}; wait for it or choose another output") from None
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror}") from None
        self._file = gzip.GzipFile(fileobj=self._raw, mode="wb", mtime=0) if path.endswith(".gz") else self._raw  # type: ignore[assignment]

    def write(self, record: Record, fields: dict[str, Any]) -> None:
        """Write a row: the record's own bytes with `fields` appended, or the text of an unusable line as `raw`."""
        if record.fields is None:
            own = json.dumps({"line": record.line, "raw": record.raw.decode("utf-8", "backslashreplace")})
            comma = b", "
        else:
            own, comma = "", b", " if record.fields else b""
        body = own.encode() if own else record.raw.rstrip()
        addition = json.dumps(fields, ensure_ascii=False, allow_nan=False)[1:].encode()
        self._file.write(body[:-1].rstrip() + comma + addition + b"\n")

    def flush(self) -> None:
        self._file.flush()

    def finish(self) -> None:
        """Close, and give the file its name."""
        if self.path == STANDARD_STREAM:
            self._file.flush()
            return
        self._file.close()
        if not self._raw.closed:
            self._raw.flush()
            os.fsync(self._raw.fileno())
        os.replace(self._partial, self.path)
        self._raw.close()

    def abandon(self) -> Path | None:
        """Close what has been written so far, and say where it is."""
        if self.path == STANDARD_STREAM:
            return None
        self._file.close()
        self._raw.close()
        return self._partial


class _TopLevel(dict):
    """A JSON object that remembers a repeated key. The hook runs innermost first; only the outermost is asked."""

    repeated: str | None = None


def _object(pairs: list[tuple[str, Any]]) -> _TopLevel:
    fields = _TopLevel(pairs)
    if len(fields) < len(pairs):
        seen: set[str] = set()
        fields.repeated = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
    return fields


def _parse(line: int, raw: bytes) -> Record:
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        return Record(line, raw, None, f"line {line} is not UTF-8: byte {error.start} is 0x{raw[error.start]:02x}")
    except RecursionError:
        return Record(line, raw, None, f"line {line} is nested too deeply")
    except json.JSONDecodeError as error:
        return Record(line, raw, None, f"line {line} is not JSON: {error.msg} at column {error.colno}")
    except ValueError as error:  # a number with more digits than Python reads
        return Record(line, raw, None, f"line {line} is not JSON: {error}")
    if not isinstance(value, _TopLevel):
        return Record(line, raw, None, f"line {line} is a JSON {type(value).__name__}, not an object")
    if value.repeated is not None:
        return Record(line, raw, None, f"line {line} has the key {value.repeated!r} twice")
    return Record(line, raw, value)
