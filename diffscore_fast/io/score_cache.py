"""A file of finished scores (SQLite), which several processes may use at once.

It maps a key of 32 bytes to the bytes of a row. Every value carries its checksum: a file that is damaged in the middle
is refused when the row is read, and never gives a wrong score.
"""

from __future__ import annotations

import os
import sqlite3
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from diffscore_fast.errors import InputError

APPLICATION_ID = 0x44534653  # stands in the file's header: what kind of SQLite file it is
LAYOUT = 1  # of the table and of the rows in it
SECONDS_TO_WAIT = 60.0  # for another process that is writing
KEYS_PER_QUERY = 500  # SQLite takes at least 999 values in one statement
_HEADER = b"SQLite format 3\0"
# File systems of other machines, on which SQLite's locks and its shared memory do not work.
_NETWORK_FILE_SYSTEMS = {
    *("9p", "afs", "beegfs", "ceph", "cifs", "coda", "davfs", "glusterfs"),
    *("gpfs", "lustre", "ncpfs", "nfs", "nfs4", "pvfs2", "smb3", "smbfs"),
}
_NETWORK_MOUNTS = ("ceph", "gcsfuse", "glusterfs", "goofys", "hdfs", "rclone", "s3fs", "sshfs")  # fuse.NAME


class ScoreCache:
    """Finished rows by key.

    Parameters
    ----------
    path : str or Path
        The file; made if it does not exist.

    Raises
    ------
    InputError
        If the file cannot be used: another kind of file, another layout, damaged, or on a network file system.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if self.path.is_dir() or not self.path.absolute().parent.is_dir():
            raise InputError(f"--cache {path}: it is a folder, or there is no such folder")
        system = file_system(self.path.absolute().parent)
        if system in _NETWORK_FILE_SYSTEMS or system.removeprefix("fuse.") in _NETWORK_MOUNTS:
            raise InputError(f"--cache {path} is on a network file system ({system}); name a file on a local disk")
        _check_header(self.path)
        try:
            self._file = sqlite3.connect(self.path, timeout=SECONDS_TO_WAIT, isolation_level=None)
        except sqlite3.Error as error:
            raise InputError(f"--cache {path} cannot be opened: {error}") from None
        try:
            self._prepare()
        except BaseException:
            self._file.close()
            raise

    def _prepare(self) -> None:
        """Check the layout; make it in a new file. Two processes may do so at once."""
        with _Explained(self.path):
            self._file.execute("PRAGMA journal_mode=WAL")  # readers and one writer at once; whole after a kill
            self._file.execute("PRAGMA synchronous=NORMAL")  # a power cut may lose the last rows, and damages none
            self._file.execute("BEGIN IMMEDIATE")
            try:
                tables = self._file.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
                if not tables:
                    self._file.execute(f"PRAGMA application_id={APPLICATION_ID}")
                    self._file.execute(f"PRAGMA user_version={LAYOUT}")
                    self._file.execute("CREATE TABLE rows (key BLOB PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID")
            finally:
                self._file.execute("COMMIT")
            kind = self._file.execute("PRAGMA application_id").fetchone()[0]
            layout = self._file.execute("PRAGMA user_version").fetchone()[0]
        if kind != APPLICATION_ID:
            raise InputError(f"--cache {self.path} is an SQLite file of another program; name another file")
        if layout != LAYOUT:
            raise InputError(
                f"--cache {self.path} has layout {layout}, this version reads and writes {LAYOUT}; name another file"
            )

    def find(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """The values of those keys that are there.

        Raises
        ------
        InputError
            If the file is damaged.
        """
        found: dict[bytes, bytes] = {}
        with _Explained(self.path):
            for first in range(0, len(keys), KEYS_PER_QUERY):
                some = keys[first : first + KEYS_PER_QUERY]
                marks = ",".join("?" * len(some))
                found.update(self._file.execute(f"SELECT key, value FROM rows WHERE key IN ({marks})", some))
        values = {key: _unsealed(value) for key, value in found.items()}
        if None in values.values():
            raise _damaged(self.path, "a row fails its checksum")
        return values  # type: ignore[return-value]

    def add(self, rows: Iterable[tuple[bytes, bytes]]) -> None:
        """Store rows as one transaction; a key that is there keeps its value.

        Raises
        ------
        InputError
            If the file is damaged, its disk is full, or another process keeps it locked for a minute.
        """
        with _Explained(self.path):
            self._file.execute("BEGIN IMMEDIATE")
            try:
                sealed = ((key, _sealed(value)) for key, value in rows)
                self._file.executemany("INSERT OR IGNORE INTO rows VALUES (?, ?)", sealed)
                self._file.execute("COMMIT")
            except BaseException:
                if self._file.in_transaction:
                    self._file.execute("ROLLBACK")
                raise

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class _Explained:
    """Turns SQLite's errors into errors for people."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, sqlite3.OperationalError):
            raise InputError(f"--cache {self._path} cannot be used: {error}") from None
        if isinstance(error, sqlite3.Error):
            raise _damaged(self._path, str(error)) from None


def _damaged(path: Path, how: str) -> InputError:
    return InputError(f"--cache {path} is damaged ({how}); move it away, and a new one is made")


def _sealed(value: bytes) -> bytes:
    return zlib.crc32(value).to_bytes(4, "little") + value


def _unsealed(value: object) -> bytes | None:
    """The value without its checksum; None if they do not fit."""
    if not isinstance(value, bytes) or len(value) < 4:
        return None
    return value[4:] if zlib.crc32(value[4:]) == int.from_bytes(value[:4], "little") else None


def _check_header(path: Path) -> None:
    try:
        with path.open("rb") as file:
            header = file.read(len(_HEADER))
    except FileNotFoundError:
        return
    except OSError as error:
        raise InputError(f"--cache {path} cannot be read: {error.strerror}") from None
    if header and header != _HEADER:
        raise InputError(f"--cache {path} is not a file of scores; name another file")


def file_system(folder: Path) -> str:
    """Type of the file system that holds a folder, such as "ext4" or "nfs4"; "" where the system does not say."""
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    own, found, kind = os.path.realpath(folder), "", ""
    for line in lines:
        before, _, after = line.partition(" - ")
        mounted = before.split()[4].encode().decode("unicode_escape")  # a space stands there as \040
        inside = own == mounted or own.startswith(mounted.rstrip("/") + "/")
        if inside and len(mounted) >= len(found):  # the last of equals hides the others
            found, kind = mounted, after.split()[0]
    return kind
