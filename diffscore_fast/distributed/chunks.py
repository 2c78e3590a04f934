"""Work on chunks of rows: how a stream is cut, and what a worker does with a chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from diffscore_fast.backbones.spec import BackboneSpec
from diffscore_fast.distributed.kind import WorkerKind
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

    def start(self, slot: int) -> ScoreStep:
        """Load the model in the worker of this number."""
        arguments = dict(self.arguments)
        if str(arguments.get("device")) == "cuda":
            arguments["device"] = f"cuda:{slot % max(1, torch.cuda.device_count())}"
        return ScoreStep(DiffScorer(self.model, **arguments), self.configure)


@dataclass(frozen=True)
class About:
    """What all workers say about the model: the configuration, its signature, and the size of chunks."""

    config: ScoreConfig
    signature: Signature
    chunk_tokens: int
    by_time: bool


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows, and the place of the first in its file, from 0."""

    first: int
    rows: list[tuple[Any, ...]]
    size: int

    def __str__(self) -> str:
        last = self.first + len(self.rows)
        return f"row {last}" if len(self.rows) == 1 else f"rows {self.first + 1} to {last}"


class ScoreStep:
    """A loaded model that scores chunks."""

    def __init__(self, scorer: DiffScorer, configure: Callable[[BackboneSpec], ScoreConfig]) -> None:
        self._scorer = scorer
        self._config = scorer.complete(configure(scorer.spec))
        signature = scorer.signature(self._config)
        device = scorer.backbone.device
        self.kind = WorkerKind.here(device, signature.implementation)
        self.about = About(self._config, signature, scorer.chunk_tokens, device.type == "cpu")

    def __call__(self, chunk: Chunk) -> tuple[ScoreTable, int]:
        """The table of a chunk, and the number of tokens that were evaluated for it."""
        evaluated: list[int] = []
        tables = list(self._scorer.score_batches(chunk.rows, self._config, evaluated.append))
        return ScoreTable.join(tables), sum(evaluated)


class ChunkCutter:
    """Cuts a stream into chunks. Where it is cut changes no score.

    Parameters
    ----------
    about : About
    first : int
        Number of rows of the file before the stream.
    """

    def __init__(self, about: About, first: int = 0) -> None:
        self._about, self._first = about, first
        # As in `engine.streams.chunks`: nothing is known about the time yet, so that the first chunks are small.
        self._limit = max(1, about.chunk_tokens // FIRST_SHARE) if about.by_time else about.chunk_tokens

    def observe(self, chunk: Chunk, seconds: float) -> None:
        """A chunk took this long; on a CPU, later ones get the size that would have taken a few seconds."""
        if self._about.by_time and chunk.size:  # rows that cannot be scored say nothing about the speed
            wanted = chunk.size * CHUNK_SECONDS / max(seconds, 1e-9)
            self._limit = int(max(1, min(self._about.chunk_tokens, MAX_GROWTH * chunk.size, wanted)))

    def cut(self, rows: Iterator[tuple[Any, ...]]) -> Iterator[Chunk]:
        """The chunks of a stream of (source, candidate) rows."""
        size_of = row_size(self._about.config)
        chunk: list[tuple[Any, Any]] = []
        size, first = 0, self._first
        for row in rows:
            chunk.append(row)
            size += size_of(row)
            if size >= self._limit or len(chunk) >= MAX_CHUNK_ROWS:
                yield Chunk(first, chunk, size)
                first += len(chunk)
                chunk, size = [], 0
        if chunk:
            yield Chunk(first, chunk, size)
