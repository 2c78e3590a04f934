"""Scoring by several processes of one machine, each with a model of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from diffscore_fast.backbones.spec import BackboneSpec
from diffscore_fast.distributed.kind import WorkerKind
from diffscore_fast.distributed.pool import WorkerPool
from diffscore_fast.engine.session import CHUNK_SECONDS
from diffscore_fast.engine.streams import FIRST_SHARE, MAX_CHUNK_ROWS, MAX_GROWTH
from diffscore_fast.scoring.config import ScoreConfig
from diffscore_fast.scoring.scorer import DiffScorer, row_size
from diffscore_fast.scoring.table import ScoreTable
from diffscore_fast.signature import Signature


@dataclass(frozen=True)
class ScoreWork:
    """What a worker does: loads a model, and scores chunks of rows with it.

    Parameters
    ----------
    model : str
    arguments : dict
        Keyword arguments of `DiffScorer`. With the device "cuda", worker i takes GPU i, modulo their number.
    configure : callable
        From the model's spec to the configuration; pickled.
    """

    model: str
    arguments: dict[str, Any]
    configure: Callable[[BackboneSpec], ScoreConfig]

    def start(self, slot: int) -> _ScoreStep:
        arguments = dict(self.arguments)
        if str(arguments.get("device")) == "cuda":
            arguments["device"] = f"cuda:{slot % max(1, torch.cuda.device_count())}"
        return _ScoreStep(DiffScorer(self.model, **arguments), self.configure)


@dataclass(frozen=True)
class _About:
    """What all workers say about the model."""

    config: ScoreConfig
    signature: Signature
    chunk_tokens: int
    by_time: bool


class _ScoreStep:
    def __init__(self, scorer: DiffScorer, configure: Callable[[BackboneSpec], ScoreConfig]) -> None:
        self._scorer = scorer
        self._config = scorer.complete(configure(scorer.spec))
        signature = scorer.signature(self._config)
        device = scorer.backbone.device
        self.kind = WorkerKind.here(device, signature.implementation)
        self.about = _About(self._config, signature, scorer.chunk_tokens, device.type == "cpu")

    def __call__(self, chunk: _Chunk) -> tuple[ScoreTable, int]:
        """The table of a chunk, and the number of tokens that were evaluated for it."""
        evaluated: list[int] = []
        tables = list(self._scorer.score_batches(chunk.rows, self._config, evaluated.append))
        return ScoreTable.join(tables), sum(evaluated)


@dataclass(frozen=True)
class _Chunk:
    """Consecutive rows, and the place of the first in its file, from 0."""

    first: int
    rows: list[tuple[Any, Any]]
    size: int

    def __str__(self) -> str:
        last = self.first + len(self.rows)
        return f"row {last}" if len(self.rows) == 1 else f"rows {self.first + 1} to {last}"


class ScorerPool:
    """A pool of workers that scores streams of rows as one `DiffScorer` would, bit for bit on a CPU.

    Parameters
    ----------
    work : ScoreWork
    count : int
        Number of workers.
    allow_mixed : bool
        Take workers of different kinds, whose scores agree to 1e-5 nats per token.

    Attributes
    ----------
    config : ScoreConfig
    signature : Signature

    Raises
    ------
    DiffScoreError
        If a worker cannot load the model, or ends.
    """

    def __init__(self, work: ScoreWork, count: int, *, allow_mixed: bool = False) -> None:
        self.pool = WorkerPool(work, count, allow_mixed=allow_mixed)
        self.config: ScoreConfig = self.pool.about.config
        self.signature: Signature = self.pool.about.signature

    def __enter__(self) -> ScorerPool:
        return self

    def __exit__(self, *error: object) -> None:
        self.pool.close()

    def score_batches(
        self, rows: Iterator[tuple[Any, Any]], progress: Callable[[int], None], *, first: int = 0, name: str = ""
    ) -> Iterator[ScoreTable]:
        """Tables of consecutive rows, in order, as from `DiffScorer.score_batches`.

        Parameters
        ----------
        rows : iterator of (source, candidate)
        progress : callable
            Called with numbers of window tokens that were evaluated.
        first : int
            Number of rows of the file before these.
        name : str
            Of the file, for messages.
        """
        about: _About = self.pool.about
        size_of = row_size(self.config)
        # As in `engine.streams.chunks`: nothing is known about the time yet, so the first chunks are small.
        limit = max(1, about.chunk_tokens // FIRST_SHARE) if about.by_time else about.chunk_tokens

        def observe(chunk: _Chunk, seconds: float) -> None:
            nonlocal limit
            if about.by_time:
                wanted = chunk.size * CHUNK_SECONDS / max(seconds, 1e-9)
                limit = int(max(1, min(about.chunk_tokens, MAX_GROWTH * chunk.size, wanted)))

        def chunks() -> Iterator[_Chunk]:
            chunk: list[tuple[Any, Any]] = []
            size, start = 0, first
            for row in rows:
                chunk.append(row)
                size += size_of(row)
                if size >= limit or len(chunk) >= MAX_CHUNK_ROWS:
                    yield _Chunk(start, chunk, size)
                    start += len(chunk)
                    chunk, size = [], 0
            if chunk:
                yield _Chunk(start, chunk, size)

        def describe(chunk: _Chunk) -> str:
            return f"{chunk} of {name}" if name else str(chunk)

        for table, evaluated in self.pool.map(chunks(), describe, observe):
            progress(evaluated)
            yield table
