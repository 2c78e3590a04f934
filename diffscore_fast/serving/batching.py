"""The queue in which the rows of all requests meet, and the one thread that scores them in batches."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any, Protocol

from diffscore_fast.engine.streams import MAX_CHUNK_ROWS


class Work(Protocol):
    """What is computed for rows. Rows of equal works are computed together."""

    def __hash__(self) -> int: ...

    def size(self, row: Any) -> int:
        """About how many tokens the model reads for a row."""

    def run(self, rows: list[Any], progress: Callable[[int], None]) -> list[Any]:
        """One result per row, which depends on the row alone. `progress` is given numbers of evaluated tokens."""


@dataclass(frozen=True)
class Batch:
    """What was computed at once, for those who count."""

    rows: int
    requests: int
    tokens: int  # that the model evaluated
    seconds: float


@dataclass(eq=False)
class _Job:
    """The rows of one request."""

    work: Work
    rows: Sequence[Any]
    sizes: list[int]
    arrived: float
    future: Future[list[Any]] = field(default_factory=Future)
    taken: int = 0  # rows that were given to a batch
    results: list[Any] = field(default_factory=list)


class QueueClosedError(RuntimeError):
    """The queue takes no further work: the service is ending."""


class _AbandonedError(Exception):
    """Nobody waits for the batch that is being computed."""


class ScoringQueue:
    """Packs rows of many requests into batches, which one thread computes.

    A batch takes rows of all waiting requests with equal works in turn, one row each, so that a request of a few rows
    does not wait for the end of a large one. Different works take turns, too. Where a batch is cut changes no result.

    Parameters
    ----------
    batch_tokens : int
        A batch ends with the row that reaches this size.
    max_wait : float
        Seconds that a request waits for others, if the batch is not full.
    observe : callable, optional
        Called with every `Batch`, in the scoring thread.
    """

    def __init__(self, batch_tokens: int, max_wait: float, observe: Callable[[Batch], None] | None = None) -> None:
        self._batch_tokens, self._max_wait, self._observe = batch_tokens, max_wait, observe
        self._changed = threading.Condition()
        self._groups: OrderedDict[Work, deque[_Job]] = OrderedDict()  # the next batch is of the first
        self._closing = False
        self._rate: float | None = None  # sizes per second, of the recent batches
        self._waiting_tokens = 0  # sizes of rows that no batch has taken
        self._thread = threading.Thread(target=self._run, name="scoring", daemon=True)
        self._thread.start()

    def submit(self, work: Work, rows: Sequence[Any]) -> Future[list[Any]]:
        """The future results of rows, in their order. Cancelling it takes the rows out of the queue.

        Raises
        ------
        QueueClosedError
            After `close`.
        """
        job = _Job(work, rows, [work.size(row) for row in rows], time.monotonic())
        if not rows:
            job.future.set_result([])
            return job.future
        with self._changed:
            if self._closing:
                raise QueueClosedError("the service is ending")
            self._groups.setdefault(work, deque()).append(job)
            self._waiting_tokens += sum(job.sizes)
            self._changed.notify()
        job.future.add_done_callback(lambda _: self._forget(job))
        return job.future

    def close(self, timeout: float | None = None) -> None:
        """Take no further work, compute what waits, and end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout)

    @property
    def is_alive(self) -> bool:
        """Whether work is taken."""
        return self._thread.is_alive() and not self._closing

    @property
    def waiting_tokens(self) -> int:
        """About how many tokens the model has to read for the rows that wait."""
        return self._waiting_tokens

    @property
    def waiting_requests(self) -> int:
        """Requests with rows that wait."""
        with self._changed:
            return sum(map(len, self._groups.values()))

    def expected_seconds(self) -> float:
        """About how long the rows that wait will take, by the speed of the recent batches; 0 if it is not known."""
        return 0.0 if self._rate is None else self._waiting_tokens / self._rate

    def _forget(self, job: _Job) -> None:
        """Take the rest of a job out of the queue."""
        with self._changed:
            group = self._groups.get(job.work)
            if group is None or job not in group:
                return
            group.remove(job)
            self._waiting_tokens -= sum(job.sizes[job.taken :])
            job.taken = len(job.rows)
            if not group:
                del self._groups[job.work]

    def _run(self) -> None:
        while (taken := self._take()) is not None:
            work, parts, size = taken
            started = time.monotonic()
            evaluated = self._compute(work, parts)
            seconds = max(time.monotonic() - started, 1e-9)
            self._rate = size / seconds if self._rate is None else 0.8 * self._rate + 0.2 * size / seconds
            if self._observe is not None:
                self._observe(Batch(sum(len(rows) for _, rows in parts), len(parts), evaluated, seconds))

    def _take(self) -> tuple[Work, list[tuple[_Job, list[Any]]], int] | None:
        """The next batch, as rows of jobs, and its size; None when the queue is closed and empty."""
        with self._changed:
            while True:
                if not self._groups:
                    if self._closing:
                        return None
                    self._changed.wait()
                    continue
                work, group = next(iter(self._groups.items()))
                left = group[0].arrived + self._max_wait - time.monotonic()
                waiting = sum(sum(job.sizes[job.taken :]) for job in group) if left > 0 else 0
                if self._closing or left <= 0 or waiting >= self._batch_tokens:
                    return self._cut(work, group)
                self._changed.wait(left)

    def _cut(self, work: Work, group: deque[_Job]) -> tuple[Work, list[tuple[_Job, list[Any]]], int]:
        """A batch of rows of a group's jobs in turn."""
        parts: dict[_Job, list[Any]] = {}
        size = count = 0
        while group and size < self._batch_tokens and count < MAX_CHUNK_ROWS:
            job = group.popleft()
            parts.setdefault(job, []).append(job.rows[job.taken])
            size += job.sizes[job.taken]
            count += 1
            job.taken += 1
            if job.taken < len(job.rows):
                group.append(job)
        self._waiting_tokens -= size
        if group:
            self._groups.move_to_end(work)  # other works have their turn
        else:
            del self._groups[work]
        return work, list(parts.items()), size

    def _compute(self, work: Work, parts: list[tuple[_Job, list[Any]]]) -> int:
        """Compute a batch and hand out its results. Returns the number of tokens that were evaluated."""
        evaluated = 0

        def progress(tokens: int) -> None:
            nonlocal evaluated
            evaluated += tokens
            if all(job.future.cancelled() for job, _ in parts):
                raise _AbandonedError

        try:
            results = work.run([row for _, rows in parts for row in rows], progress)
        except _AbandonedError:
            return evaluated
        except BaseException as error:
            if len(parts) > 1:  # the rows of one request must not fail the others
                return evaluated + sum(self._compute(work, [part]) for part in parts)
            _end(parts[0][0].future, error=error)
            return evaluated
        first = 0
        for job, rows in parts:
            job.results += results[first : first + len(rows)]
            first += len(rows)
            if len(job.results) == len(job.rows):
                _end(job.future, job.results)
        return evaluated


def _end(future: Future[list[Any]], results: list[Any] | None = None, error: BaseException | None = None) -> None:
    try:
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(results or [])
    except InvalidStateError:
        pass  # cancelled meanwhile
