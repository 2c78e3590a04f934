"""Scores that are kept across runs: the key of a row, its bytes, and a stream that computes only what is new."""

from __future__ import annotations

import hashlib
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from diffscore_fast.engine.ragged import offsets_of
from diffscore_fast.io.score_cache import ScoreCache
from diffscore_fast.scoring.table import ScoreTable, TokenScores
from diffscore_fast.status import SCORED, InvalidRecord

ROWS_AHEAD = 256  # rows whose keys are looked up together
_NO_TOKENS = -1
# Score, standard error; tokens, draws, full draws, truncated tokens, reference; levels, bytes of status and message,
# number of token scores.
_HEAD = struct.Struct("<2d5q4q")


class CachedStream:
    """Takes the scores of known rows from a cache, and stores those of new rows.

    Parameters
    ----------
    cache : ScoreCache
    identity : str
        Everything that the bytes of a row's score depend on besides the row.
    """

    def __init__(self, cache: ScoreCache, identity: str) -> None:
        self.hits = self.rows = 0
        self._cache = cache
        self._identity = hashlib.sha256(identity.encode()).digest()

    def score_batches(
        self,
        rows: Iterable[tuple[Any, ...]],
        score: Callable[[Iterator[tuple[Any, ...]]], Iterator[ScoreTable]],
    ) -> Iterator[ScoreTable]:
        """Tables of consecutive rows, in order, as `score` gives them for all rows.

        Parameters
        ----------
        rows : iterable of tuples
        score : callable
            From rows to tables of consecutive rows. In place of a known row it gets an `InvalidRecord`, which costs it
            nothing.
        """
        waiting: deque[tuple[bytes | None, bytes | None]] = deque()  # key and known value of each row

        def new_rows() -> Iterator[tuple[Any, ...]]:
            iterator = iter(rows)
            while some := list(islice(iterator, ROWS_AHEAD)):
                keys = [self._key(row) for row in some]
                known = self._cache.find([key for key in keys if key is not None])
                for row, key in zip(some, keys, strict=True):
                    value = None if key is None else known.get(key)
                    waiting.append((key, value))
                    yield row if value is None else (InvalidRecord(""),) * len(row)

        for table in score(new_rows()):
            own = [waiting.popleft() for _ in range(len(table))]
            fresh = [
                (key, row_bytes(table, row))
                for row, (key, value) in enumerate(own)
                if key is not None and value is None and table.status[row] in SCORED
            ]
            if fresh:
                self._cache.add(fresh)
            stored = [value for _, value in own if value is not None]
            self.rows += len(own)
            self.hits += len(stored)
            yield _with_stored(table, [value is not None for _, value in own], stored) if stored else table

    def _key(self, row: tuple[Any, ...]) -> bytes | None:
        """The key of a row; None for a row with a value that is no text, which has no score worth keeping."""
        digest = hashlib.sha256(self._identity)
        for value in row:
            texts = value if isinstance(value, list) else [value]
            if not all(text is None or isinstance(text, (str, int)) for text in texts):
                return None
            digest.update(b"list" if isinstance(value, list) else b"text")
            digest.update(len(texts).to_bytes(8, "little"))
            for text in texts:
                # A lone surrogate has no UTF-8: such a row gets a status, no score.
                part = str(text).encode("utf-8", errors="surrogatepass")
                digest.update(type(text).__name__.encode() + len(part).to_bytes(8, "little") + part)
        return digest.digest()


def _with_stored(table: ScoreTable, is_stored: list[bool], values: list[bytes]) -> ScoreTable:
    """The table with stored rows in the places where `is_stored`."""
    both = ScoreTable.join([table, rows_from_bytes(values, table)])
    places = np.arange(len(table))
    places[is_stored] = len(table) + np.arange(len(values))
    return both.take(places)


def row_bytes(table: ScoreTable, row: int) -> bytes:
    """A scored row of a table as bytes, which `rows_from_bytes` reads."""
    status, message = table.status[row].encode(), table.messages[row].encode()
    profile = np.ascontiguousarray(table.profile[row], "<f8")
    parts = [status, message, profile.tobytes()]
    count = _NO_TOKENS
    if table.tokens is not None:
        own = slice(int(table.tokens.offsets[row]), int(table.tokens.offsets[row + 1]))
        count = own.stop - own.start
        parts += [
            np.ascontiguousarray(table.tokens.spans[own], "<i4").tobytes(),
            np.ascontiguousarray(table.tokens.log_probs[own], "<f8").tobytes(),
            np.ascontiguousarray(table.tokens.counts[own], "<i8").tobytes(),
        ]
    head = _HEAD.pack(
        table.scores[row],
        table.stderr[row],
        table.num_tokens[row],
        table.num_draws[row],
        table.full_draws[row],
        table.truncated_tokens[row],
        -1 if table.reference is None else table.reference[row],
        len(profile),
        len(status),
        len(message),
        count,
    )
    return b"".join([head, *parts])


def rows_from_bytes(values: list[bytes], like: ScoreTable) -> ScoreTable:
    """The table of rows that `row_bytes` wrote, for the same request as the table `like`."""
    heads = np.array([_HEAD.unpack_from(value) for value in values], dtype=object)
    status, messages, profiles = [], [], []
    spans, log_probs, counts, lengths = [], [], [], []
    for value, head in zip(values, heads, strict=True):
        levels, status_bytes, message_bytes, count = head[7:]
        reader = _Reader(value)
        status.append(reader.take("S1", status_bytes).tobytes().decode())
        messages.append(reader.take("S1", message_bytes).tobytes().decode())
        profiles.append(reader.take("<f8", levels))
        if count != _NO_TOKENS:
            lengths.append(count)
            spans.append(reader.take("<i4", 2 * count).reshape(count, 2))
            log_probs.append(reader.take("<f8", count))
            counts.append(reader.take("<i8", count))
    numbers: dict[str, Any] = {
        name: heads[:, place].astype(np.float64) for place, name in enumerate(("scores", "stderr"))
    }
    names = ("num_tokens", "num_draws", "full_draws", "truncated_tokens")
    numbers |= {name: heads[:, place].astype(np.int64) for place, name in enumerate(names, 2)}
    tokens = None
    if like.tokens is not None:
        tokens = TokenScores(
            offsets_of(np.array(lengths)), np.concatenate(spans), np.concatenate(log_probs), np.concatenate(counts)
        )
    return replace(
        like,
        **numbers,
        status=status,
        messages=messages,
        profile=np.stack(profiles),
        tokens=tokens,
        reference=None if like.reference is None else heads[:, 6].astype(np.int64),
    )


class _Reader:
    """Arrays one after the other from bytes."""

    def __init__(self, value: bytes) -> None:
        self._value, self._place = value, _HEAD.size

    def take(self, kind: str, count: int) -> np.ndarray:
        found = np.frombuffer(self._value, kind, count, self._place)
        self._place += found.nbytes
        return found
