"""How far a run has come, beside its unfinished output: what `--resume` goes on from."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from diffscore_fast.errors import InputError
from diffscore_fast.io.record import Record

_TYPES = {"rows": int, "bytes": int, "statuses": dict, "input": str, "identity": str}


class Journal:
    """Rows that are whole in a partial file, the bytes they take, and a hash of the input's rows they were made of.

    Parameters
    ----------
    path : Path
        PARTIAL.state, rewritten after every batch.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.saved: dict[str, Any] | None = None
        self.identity = ""
        self._read = hashlib.blake2b(digest_size=16)

    def load(self) -> None:
        """Read what an earlier run has written.

        Raises
        ------
        InputError
            If it is gone or damaged.
        """
        rows = self.path.with_suffix("")
        try:
            saved = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            saved = None
        if not _is_journal(saved):
            raise InputError(
                f"{self.path}, which says how far {rows} is, is gone or damaged; move both away to start anew"
            )
        self.saved = saved

    @property
    def rows(self) -> int:
        return 0 if self.saved is None else self.saved["rows"]

    @property
    def statuses(self) -> dict[str, int]:
        return {} if self.saved is None else self.saved["statuses"]

    def pass_over(self, records: Iterator[Record], identity: str) -> int:
        """Take the rows that are done from the input; returns the bytes that their output takes.

        Raises
        ------
        InputError
            If the earlier run was another one, by `identity`, or read other rows.
        """
        self.identity = identity
        if not self.rows:
            return 0
        assert self.saved is not None
        if self.saved["identity"] != identity:
            raise InputError(
                "the rows that are there were made by other options, or of other columns: "
                f"{self.saved['identity']}; give those again, or move {self.path.with_suffix('')} "
                "away"
            )
        passed = 0
        for record in records:
            self._read.update(record.raw)
            passed += 1
            if passed == self.rows:
                break
        if passed < self.rows or self._read.hexdigest() != self.saved["input"]:
            raise InputError(
                f"the input is not the one that the {self.rows} rows that are there were made of; move "
                f"{self.path.with_suffix('')} away to start anew"
            )
        return self.saved["bytes"]

    def add(self, record: Record) -> None:
        """A row has been written."""
        self._read.update(record.raw)

    def save(self, statuses: Counter[str], num_bytes: int) -> None:
        """All rows added so far are whole in the partial file, which has that many bytes."""
        self.saved = {
            "rows": statuses.total(),
            "bytes": num_bytes,
            "statuses": dict(statuses),
            "input": self._read.hexdigest(),
            "identity": self.identity,
        }
        fresh = self.path.with_name(f"{self.path.name}.new")
        fresh.write_text(json.dumps(self.saved) + "\n", encoding="utf-8")
        os.replace(fresh, self.path)


def _is_journal(saved: Any) -> bool:
    if not isinstance(saved, dict) or not all(isinstance(saved.get(key), kind) for key, kind in _TYPES.items()):
        return False
    return saved["rows"] >= 0 and saved["bytes"] >= 0
