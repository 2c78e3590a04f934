"""Scoring by several processes of one machine, each with a model of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from diffscore_fast.distributed.chunks import Chunk, ChunkCutter, ScoreWork
from diffscore_fast.distributed.kind import WorkerKind
from diffscore_fast.distributed.pool import WorkerPool
from diffscore_fast.scoring.config import ScoreConfig
from diffscore_fast.scoring.table import ScoreTable
from diffscore_fast.signature import Signature


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
    kinds : list of WorkerKind

    Raises
    ------
    DiffScoreError
        If a worker cannot load the model, or ends.
    """

    def __init__(self, work: ScoreWork, count: int, *, allow_mixed: bool = False) -> None:
        self.pool = WorkerPool(work, count, allow_mixed=allow_mixed)
        self.config: ScoreConfig = self.pool.about.config
        self.signature: Signature = self.pool.about.signature
        self.kinds: list[WorkerKind] = self.pool.kinds

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
        cutter = ChunkCutter(self.pool.about, first)

        def describe(chunk: Chunk) -> str:
            return f"{chunk} of {name}" if name else str(chunk)

        for table, evaluated in self.pool.map(cutter.cut(rows), describe, cutter.observe):
            progress(evaluated)
            yield table
