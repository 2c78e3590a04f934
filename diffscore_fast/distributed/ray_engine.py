"""Scoring by the actors of a Ray cluster, through Ray Data; a local one is started where there is none."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow

from diffscore_fast.distributed.chunks import Chunk, ChunkCutter, ScoreWork
from diffscore_fast.errors import DependencyError, InputError, first_line
from diffscore_fast.scoring.config import ScoreConfig
from diffscore_fast.scoring.table import ScoreTable
from diffscore_fast.signature import Signature

# Rows of one execution of Ray Data, which starts its actors anew: few enough for memory, many beside a model's loading.
ROWS_CHUNK = 100_000


class RayScorer:
    """Actors that score streams of rows as one `DiffScorer` would, bit for bit on CPUs of one kind.

    Ray restarts lost actors and gives their chunks out again. Every chunk has a number of its own, by which the order
    is restored. Use it in a `with` block, which ends a cluster that it has started.

    Parameters
    ----------
    work : ScoreWork
    count : int
        Number of actors; with a GPU device, each has one GPU.
    address : str, optional
        Of a cluster; by default the one that the environment or this machine has, or else a new local one.
    allow_mixed : bool
        Take actors of different kinds, whose scores agree to 1e-5 nats per token.

    Attributes
    ----------
    config : ScoreConfig
    signature : Signature
    kinds : list of WorkerKind

    Raises
    ------
    DependencyError
        If Ray is not installed.
    InputError
        If the cluster cannot be reached.
    """

    def __init__(self, work: ScoreWork, count: int, *, address: str | None = None, allow_mixed: bool = False) -> None:
        try:
            import ray
            import ray.data  # noqa: F401
        except ImportError:
            raise DependencyError("--engine ray needs Ray: pip install 'diffscore_fast[ray]'") from None
        self._ray, self._work, self._count, self._allow_mixed = ray, work, count, allow_mixed
        self._owns = not ray.is_initialized()
        if self._owns:
            try:
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise InputError(f"cannot reach a Ray cluster: {first_line(error)}") from None
        self._gpus = 1 if str(work.arguments.get("device", "cpu")).startswith("cuda") else 0
        try:
            context = ray.data.DataContext.get_current()
            context.enable_progress_bars = False
            logging.getLogger("ray.data").setLevel(logging.ERROR)
            kind, self._about = self._called(ray.remote(num_gpus=self._gpus)(_probe).remote(work))
        except BaseException:
            self.close()
            raise
        self.kinds = [kind]
        self.config: ScoreConfig = self._about.config
        self.signature: Signature = self._about.signature

    def __enter__(self) -> RayScorer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End a cluster that was started here, or leave the one that was joined."""
        if self._owns:
            self._ray.shutdown()

    def score_batches(
        self, rows: Iterator[tuple[Any, Any]], progress: Callable[[int], None], *, first: int = 0, name: str = ""
    ) -> Iterator[ScoreTable]:
        """Tables of consecutive rows, in order; parameters as for `ScorerPool.score_batches`."""
        chunks = iter(ChunkCutter(self._about, first).cut(rows))
        while window := _rows_at_once(chunks):
            yield from self._run(window, progress)

    def _run(self, window: list[Chunk], progress: Callable[[int], None]) -> Iterator[ScoreTable]:
        """One execution of Ray Data."""
        ray = self._ray
        blocks = [ray.put(_packed(number, pickle.dumps(chunk))) for number, chunk in enumerate(window)]
        scored = ray.data.from_arrow_refs(blocks).map_batches(
            _RayStep,
            fn_constructor_args=(self._work,),
            batch_format="pyarrow",
            batch_size=None,
            zero_copy_batch=True,
            compute=ray.data.ActorPoolStrategy(size=min(self._count, len(window))),
            num_gpus=self._gpus or None,
        )
        done: dict[int, Any] = {}
        due = 0
        batches = iter(scored.iter_batches(batch_size=None, batch_format="pyarrow"))
        while (batch := self._called(batches)) is not None:
            for number, packed in zip(batch["chunk"].to_pylist(), batch["result"].to_pylist(), strict=True):
                done[number] = pickle.loads(packed)
            while due in done:
                kind, table, evaluated = done.pop(due)
                due += 1
                self._check_kind(kind)
                progress(evaluated)
                yield table
        assert due == len(window), "Ray Data returns every chunk"

    def _called(self, source: Any) -> Any:
        """The result of a remote call, or the next of an iterator (None at its end); errors are the work's own."""
        try:
            return next(source, None) if isinstance(source, Iterator) else self._ray.get(source)
        except self._ray.exceptions.RayTaskError as error:
            raise getattr(error, "cause", None) or error from None

    def _check_kind(self, kind: Any) -> None:
        if kind in self.kinds:
            return
        if not self._allow_mixed:
            raise InputError(
                f"an actor is of another kind than the others: {kind.differences(self.kinds[0])}. Scores of both agree "
                "to 1e-5 nats per token, not bit for bit; take machines of one kind, or give --allow-mixed"
            )
        self.kinds.append(kind)


class _RayStep:
    """The callable class of Ray Data: loads the model once, and scores chunks."""

    def __init__(self, work: ScoreWork) -> None:
        self._step = work.start(0)

    def __call__(self, batch: pyarrow.Table) -> pyarrow.Table:
        found = []
        for packed in batch["rows"].to_pylist():
            table, evaluated = self._step(pickle.loads(packed))
            found.append(pickle.dumps((self._step.kind, table, evaluated)))
        return pyarrow.table({"chunk": batch["chunk"], "result": pyarrow.array(found, pyarrow.large_binary())})


def _packed(number: int, rows: bytes) -> pyarrow.Table:
    return pyarrow.table({"chunk": [number], "rows": pyarrow.array([rows], pyarrow.large_binary())})


def _probe(work: ScoreWork) -> tuple[Any, Any]:
    """What a worker says about itself and the model."""
    step = work.start(0)
    return step.kind, step.about


def _rows_at_once(chunks: Iterator[Chunk]) -> list[Chunk]:
    """The next chunks, up to `ROWS_CHUNK` rows."""
    window: list[Chunk] = []
    count = 0
    for chunk in chunks:
        window.append(chunk)
        count += len(chunk.rows)
        if count >= ROWS_CHUNK:
            break
    return window
