"""An input file as a stream of bytes: plain, gzip or zstd, by its first bytes."""

from __future__ import annotations

import gzip
import io
import os
import sys
import zlib
from contextlib import suppress
from typing import IO, Any

from diffscore_fast.errors import InputError
from diffscore_fast.io.remote import RemotePath, scheme_of

STANDARD_STREAM = "-"
UNREADABLE = (EOFError, OSError, zlib.error)  # what a damaged or cut file raises while it is read
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_UTF_16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_BUFFER = 1 << 16


class InputFile:
    """Opens a file and uncompresses it while it is read.

    Parameters
    ----------
    path : str
        A file, a URL of one of `remote.SCHEMES`, or "-" for standard input.

    Attributes
    ----------
    stream : binary file
        The uncompressed bytes.
    size : int or None
        Bytes of the file as it lies on disk, to measure progress against; None for a pipe.

    Raises
    ------
    InputError
        If the file cannot be opened.
    """

    def __init__(self, path: str) -> None:
        if path == STANDARD_STREAM and sys.stdin is None:
            raise InputError("standard input is closed")
        try:
            if scheme_of(path) is not None:
                remote = RemotePath(path)
                self._file: IO[bytes] = remote.open()
                self.size: int | None = remote.size
            else:
                self._file = sys.stdin.buffer if path == STANDARD_STREAM else open(path, "rb")  # noqa: SIM115
                # Only a regular file has a size to measure progress against.
                self.size = os.path.getsize(path) if os.path.isfile(path) else None
            head = self._file.peek(4)[:4] if isinstance(self._file, io.BufferedReader) else b""
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}") from None
        self.stream: IO[bytes] = self._file
        if head.startswith(_GZIP_MAGIC):
            self.stream = io.BufferedReader(_Unpacked("gzip", gzip.GzipFile(fileobj=self._file), self._file), _BUFFER)
        elif head == _ZSTD_MAGIC:
            import pyarrow

            unpacked = pyarrow.CompressedInputStream(pyarrow.PythonFile(self._file, "r"), "zstd")
            self.stream = io.BufferedReader(_Unpacked("zstd", unpacked, self._file), _BUFFER)

    @property
    def position(self) -> int:
        """Bytes of the file consumed so far, compressed ones where it is compressed."""
        return self._file.tell() if self.size is not None else 0


class _Unpacked(io.RawIOBase):
    """What a compressed file unpacks to; an error says after how many bytes."""

    def __init__(self, name: str, stream: Any, packed: IO[bytes]) -> None:
        self._name, self._stream, self._packed = name, stream, packed
        self._num_bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        try:
            piece = self._stream.read(len(target))
        except (*UNREADABLE, ValueError) as error:  # ValueError: of pyarrow
            raise OSError(f"its {self._name} data {self._fault(error)} after {self._place()}") from None
        target[: len(piece)] = piece
        self._num_bytes += len(piece)
        return len(piece)

    def _fault(self, error: Exception) -> str:
        cut = isinstance(error, EOFError) or "runcated" in str(error)
        return "are cut off (the file is not whole)" if cut else f"are damaged ({error})"

    def _place(self) -> str:
        unpacked = f"{self._num_bytes:,} bytes unpacked"
        with suppress(OSError):  # a pipe has no place
            return f"{self._packed.tell():,} bytes, {unpacked}"
        return unpacked


def without_mark(path: str, first_line: bytes) -> bytes:
    """The first line of a text without its byte order mark; raises `InputError` for UTF-16."""
    if first_line.startswith(_UTF_16_MARKS):
        raise InputError(f"{path} is UTF-16, by its byte order mark; convert it to UTF-8")
    return first_line.removeprefix(BYTE_ORDER_MARK)
