"""An output file that takes its name when it is whole; every format's writer is one."""

from __future__ import annotations

import fcntl
import gzip
import os
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from diffscore_fast.errors import InputError
from diffscore_fast.io.input import STANDARD_STREAM
from diffscore_fast.io.record import FieldType, FileFormat, Record

PACKED_ROWS = 1024  # after which a compressed file is flushed


class RowWriter(ABC):
    """Writes rows to `path` by way of `path`.partial, which takes the final name when all is done.

    A run that stops half-way leaves the partial file with its finished rows. Nothing that is there already is touched
    before the first row. A pipe or device is written directly.

    Parameters
    ----------
    path : str
        A file (gzip where the name ends in .gz, zstd for .zst), or "-" for standard output.

    Raises
    ------
    InputError
        If the file cannot be written, or another run is writing it.
    """

    format: FileFormat
    appends = True  # the format has nothing behind its last row

    def __init__(self, path: str) -> None:
        self.path = path
        self.is_stream = path == STANDARD_STREAM
        # Through a link, to what it names; but not through the names that processes give their pipes.
        self._target = Path(path if _is_special(path) else os.path.realpath(path))
        self._partial: Path | None = None
        self._started = self._created = self._finished = False
        self._num_rows = 0
        self._leftover = 0  # bytes that the partial file held when it was opened
        try:
            if self.is_stream:
                if sys.stdout is None:
                    raise InputError("standard output is closed")
                self._raw: IO[bytes] = sys.stdout.buffer
            elif (descriptor := _descriptor(path)) is not None:
                self._raw = os.fdopen(os.dup(descriptor), "wb")
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

    @property
    def is_file(self) -> bool:
        """False for standard output, pipes and devices, which have nothing beside them."""
        return self._partial is not None

    @property
    def leftover(self) -> Path | None:
        """The partial file, where it held something before this run."""
        return self._partial if self._leftover else None

    @property
    def can_resume(self) -> bool:
        """Whether rows can be added behind those of a run that was stopped: to a file of text, not compressed."""
        return self.appends and self.is_file and not self.path.endswith((".gz", ".zst"))

    @property
    def num_bytes(self) -> int:
        """Bytes in the file after a flush."""
        return os.fstat(self._raw.fileno()).st_size

    def resume(self, num_bytes: int) -> None:
        """Go on after the first bytes of the partial file; the rest, an incomplete row, is dropped.

        Raises
        ------
        InputError
            If the file is shorter than that.
        """
        if self.num_bytes < num_bytes:
            raise InputError(f"{self._partial} has lost rows that a run had written there; move it away")
        self._raw.truncate(num_bytes)
        self._started = True

    def accept(self, record: Record) -> Record:
        """The record as the output can hold it; one that it cannot hold comes back unusable, with the reason."""
        return record

    def write(self, record: Record, fields: dict[str, Any]) -> None:
        """Write a row with the fields that are added to it."""
        try:  # not `_named`, which takes a microsecond
            if not self._started:
                self._start()
            self._write(record, fields)
            self._num_rows += 1
            if self._file is not self._raw and self._num_rows % PACKED_ROWS == 0:
                self._file.flush()
        except OSError as error:
            self._name(error)
            raise

    def flush(self) -> None:
        """Bring the rows written so far to the file, as far as the format allows.

        Not if they are compressed: a flush leaves a trace in the bytes, which must not tell when it happened.
        """
        if self._file is self._raw:
            with self._named():
                self._file.flush()

    def finish(self) -> None:
        """Close, and give the file its name."""
        with self._named():
            self._finish()

    @contextmanager
    def _named(self) -> Iterator[None]:
        """An error of the system while writing, such as a full disk, knows the file it came of."""
        try:
            yield
        except OSError as error:
            self._name(error)
            raise

    def _name(self, error: OSError) -> None:
        if error.filename is None:
            error.filename = "standard output" if self.is_stream else self.path

    def _finish(self) -> None:
        if not self._started:
            self._start()
        self._end()
        self._file.flush()
        if self.is_stream:
            return
        if self._file is not self._raw:
            self._file.close()
        if self._partial is not None:
            self._raw.flush()
            os.fsync(self._raw.fileno())
            os.replace(self._partial, self._target)
            sync_folder(self._target.parent)
            self._finished = True
            self._remove_state()
        self._raw.close()

    def abandon(self) -> Path | None:
        """Close what has been written so far, and say where it is; None where there is nothing to look at."""
        if self._started and not self._finished:
            with suppress(OSError, ValueError):  # a full disk, a row that cannot be written: reported already
                self._end()
        if self.is_stream:
            return None
        kept = self._partial if self._started and not self._finished else None
        if self._partial is not None and self._created and not self._started:
            self._partial.unlink(missing_ok=True)
            self._remove_state()
        for file in (self._file, self._raw):
            with suppress(OSError):
                file.close()
        return kept

    def _remove_state(self) -> None:
        """While the file is still open: with it goes the lock, and another run may begin a state of its own."""
        for path in (state_path(self.path), f"{state_path(self.path)}.new"):
            Path(path).unlink(missing_ok=True)

    def _begin(self) -> None:  # noqa: B027, most formats write nothing here
        """Write what stands before the first row."""

    @abstractmethod
    def _write(self, record: Record, fields: dict[str, Any]) -> None: ...

    def _end(self) -> None:  # noqa: B027
        """Write what is still held back, and what stands after the last row."""

    def _start(self) -> None:
        self._started = True
        if self._partial is not None:
            self._raw.seek(0)
            self._raw.truncate()  # what a killed run has left
        if self.path.endswith(".gz"):
            self._file = gzip.GzipFile(fileobj=self._raw, mode="wb", mtime=0)  # type: ignore[assignment]
        elif self.path.endswith(".zst"):
            import pyarrow

            # Closing the stream closes what is below it, and `_raw` holds the lock: give it a descriptor of its own.
            below = pyarrow.PythonFile(os.fdopen(os.dup(self._raw.fileno()), "wb"), "w")
            self._file = pyarrow.CompressedOutputStream(below, "zstd")
        self._begin()

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
                self._created, self._leftover = created, os.fstat(file.fileno()).st_size
                return file
            file.close()


class ColumnWriter(RowWriter):
    """A writer of a format whose columns are fixed before the first row.

    Parameters
    ----------
    path : str
    columns : list of str
        Those of the input.
    added : mapping of str to FieldType
        Fields that are added.
    """

    def __init__(self, path: str, columns: list[str], added: Mapping[str, FieldType]) -> None:
        self._columns, self._added = columns, added
        self._known = set(columns)
        super().__init__(path)

    def accept(self, record: Record) -> Record:
        """As for every writer. There is no column for an unusable row's text, so its message carries it."""
        if record.fields is not None:
            unknown = next((name for name in record.fields if name not in self._known), None)
            if unknown is None:
                return record
            problem = f"line {record.line} has a field {unknown!r} that no row at the head of the file has"
            record = replace(record, fields=None, problem=problem)
        text = record.raw.decode("utf-8", "backslashreplace")
        return replace(record, problem=f"{record.problem}; it reads: {text}") if text else record


def sync_folder(folder: Path) -> None:
    """Make a new name in a folder outlast a failure of power, where the system can."""
    with suppress(OSError):  # some network file systems cannot
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def partial_path(path: str) -> Path:
    """Where the rows of an unfinished output are."""
    return Path(os.path.realpath(path) + ".partial")


def state_path(path: str) -> str:
    """Where an unfinished output's journal is."""
    return f"{partial_path(path)}.state"


def _descriptor(path: str) -> int | None:
    """N of /dev/fd/N and its other names: opened by its path, a file would be written from its beginning."""
    found = re.fullmatch(r"/(?:dev|proc/self)/fd/(\d+)|/dev/(stderr)", path)
    return None if found is None else int(found[1] or 2)


def _is_special(path: str) -> bool:
    """Whether there is something at the path that is neither a file nor a folder."""
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)
