"""Inputs on object stores and clusters, through pyarrow's file systems, and what local and remote inputs share."""

from __future__ import annotations

import fnmatch
import io
import os
import re
from collections.abc import Sequence
from typing import Any

from diffscore_fast.errors import DiffScoreError, InputError, first_line

SCHEMES = ("s3", "gs", "hdfs", "abfs")
WILDCARDS = "*?["
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)(::|://)")


class RemoteReadError(DiffScoreError):
    """A remote input stopped answering: the run ends, where a damaged local file would end in unusable rows."""


def scheme_of(path: str) -> str | None:
    """The scheme of a URL, in lower case; None for a local path.

    Raises
    ------
    InputError
        For a scheme that is not one of SCHEMES, a chain of them (`a::b://`), or a password in the URL.
    """
    found = _SCHEME.match(path)
    if found is None or os.path.exists(path):
        return None
    scheme = found[1].lower()
    listed = ", ".join(f"{name}://" for name in SCHEMES)
    if found[2] == "::":
        raise InputError(f"{path}: chained URLs are not read; use a local path, or one of {listed}")
    if scheme not in SCHEMES:
        raise InputError(f"{path}: {scheme}:// is not read; use a local path, or one of {listed}")
    user = path[found.end() :].split("/")[0].rpartition("@")[0]
    if ":" in user:
        raise InputError(f"{scheme}:// with a password in the URL: give it by the environment, where nobody reads it")
    return scheme


class RemotePath:
    """A file or folder that a URL names.

    Parameters
    ----------
    url : str
        Without wildcards.

    Raises
    ------
    InputError
        If the file system cannot be reached.
    """

    def __init__(self, url: str) -> None:
        import pyarrow

        self.url = url
        try:
            self._system, self._path = file_system(url)
            self._info = self._system.get_file_info(self._path)
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise InputError(f"cannot reach {url}: {first_line(error)}") from None

    @property
    def is_folder(self) -> bool:
        return self._info.type.name == "Directory"

    @property
    def size(self) -> int:
        """Bytes of a file.

        Raises
        ------
        InputError
            If there is no such file.
        """
        if self._info.type.name != "File":
            raise InputError(f"cannot read {self.url}: there is no such file")
        return self._info.size

    def files(self, *, recursive: bool = False) -> list[str]:
        """URLs of the files below a folder, sorted."""
        import pyarrow
        from pyarrow import fs

        try:
            found = self._system.get_file_info(fs.FileSelector(self._path, recursive=recursive, allow_not_found=True))
        except (pyarrow.ArrowException, OSError) as error:
            raise InputError(f"cannot list {self.url}: {first_line(error)}") from None
        below = len(self._path.rstrip("/")) + 1
        return sorted(f"{self.url.rstrip('/')}/{item.path[below:]}" for item in found if item.type == fs.FileType.File)

    def fingerprint(self) -> list[int]:
        """Bytes of the file, and nanoseconds of its last change."""
        return [self.size, self._info.mtime_ns or 0]

    def open(self) -> io.BufferedReader:
        """The bytes of a file, which can be read anywhere in it."""
        import pyarrow

        size = self.size
        try:
            file = self._system.open_input_file(self._path)
        except (pyarrow.ArrowException, OSError) as error:
            raise InputError(f"cannot read {self.url}: {first_line(error)}") from None
        return io.BufferedReader(_RemoteFile(self.url, file, size), 1 << 20)


class _RemoteFile(io.RawIOBase):
    """A file of pyarrow's whose errors are `RemoteReadError`."""

    def __init__(self, url: str, file: Any, size: int) -> None:
        self._url, self._file, self._size = url, file, size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, target: Any) -> int:
        import pyarrow

        count = min(len(target), max(0, self._size - self._at))
        if not count:
            return 0
        try:
            piece = self._file.read_at(count, self._at)
        except (pyarrow.ArrowException, OSError) as error:
            raise RemoteReadError(f"{self._url} cannot be read: {first_line(error)}; --resume continues") from None
        if not piece:
            raise RemoteReadError(f"{self._url} ends before its {self._size:,} bytes; has it been replaced?")
        target[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def file_system(url: str) -> tuple[Any, str]:
    """pyarrow's file system of a URL, and the path in it."""
    from pyarrow import fs

    return fs.FileSystem.from_uri(url)


def fingerprint(path: str) -> list[int]:
    """Bytes of an input file, and nanoseconds of its last change: what tells that it is still the same."""
    if scheme_of(path) is not None:
        return RemotePath(path).fingerprint()
    try:
        found = os.stat(path)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    return [found.st_size, found.st_mtime_ns]


def expand_remote(url: str) -> list[str]:
    """URLs of the files that match a URL with wildcards (`**` stands for any number of folders), sorted."""
    parts = url.split("/")
    first = next(index for index, part in enumerate(parts) if any(mark in part for mark in WILDCARDS))
    if first < 3:
        raise InputError(f"{url}: wildcards in the name of the bucket or host are not read; name it")
    base, pattern = "/".join(parts[:first]), parts[first:]
    recursive = len(pattern) > 1
    return [
        found for found in RemotePath(base).files(recursive=recursive) if _matches(found.split("/")[first:], pattern)
    ]


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether the parts of a path match those of a pattern, as a shell would say."""
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_matches(parts[skip:], pattern[1:]) for skip in range(len(parts) + 1))
    return bool(parts) and fnmatch.fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])


def base_name(path: str) -> str:
    """The last part of a path or URL."""
    return path.rstrip("/").rpartition("/")[2]
