"""Processes that work on items of a stream, with results in order. A lost process is replaced, its items are redone."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from diffscore_fast.distributed.worker import Work
from diffscore_fast.errors import DiffScoreError, InputError

MAX_LOSSES = 3  # of workers, by one item
MAX_LOSSES_AT_START = 6  # of workers, one after the other while they start
ITEMS_QUEUED = 2  # with each worker: the one it works on, and the next
MAX_AHEAD = 4  # items per worker between the oldest that is not done and the newest
SECONDS_TO_END = 5.0
# A process of its own program: what the user's main module does when it is imported again does not matter.
_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[2])
from diffscore_fast.distributed.worker import main
main(int(sys.argv[1]))
"""


class WorkerLostError(DiffScoreError, RuntimeError):
    """Workers end again and again: by the same rows, or while they load the model."""


class WorkerPool:
    """Worker processes, each of which has started the same work. Use it in a `with` block.

    Parameters
    ----------
    work : Work
        Pickled and sent to every worker.
    count : int
        Number of workers.
    threads : int, optional
        Of each worker, where the environment does not say (`OMP_NUM_THREADS`). Default: an equal share of the cores.
    allow_mixed : bool
        Take workers of different kinds.

    Attributes
    ----------
    kinds : list
        The different kinds of the workers.
    about : Any
        What the work says about itself; equal in all workers.

    Raises
    ------
    InputError
        If the workers are not of one kind.
    WorkerLostError
        If workers end while they start.
    Exception
        That the work raises in a worker.
    """

    def __init__(self, work: Work, count: int, *, threads: int | None = None, allow_mixed: bool = False) -> None:
        self.kinds: list[Any] = []
        self.about: Any = None
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.threads = threads or max(1, cores // count)
        self._work, self._allow_mixed = work, allow_mixed
        self._items: dict[int, Any] = {}  # given out or waiting, by number
        self._again: list[int] = []  # to be given out again, before new ones
        self._done: dict[int, Any] = {}
        self._losses: Counter[int] = Counter()
        self._lost_at_start = 0
        self._next = 0
        self._workers: list[_Worker] = []
        self._observe: Callable[[Any, float], None] = _nothing
        self._describe: Callable[[Any], str] = str
        try:
            for slot in range(count):
                self._workers.append(_Worker(slot, self._work, self.threads))
            while not all(worker.ready for worker in self._workers):
                self._receive()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Of the worker processes."""
        return [worker.process.pid for worker in self._workers]

    def map(
        self,
        items: Iterable[Any],
        describe: Callable[[Any], str] = str,
        observe: Callable[[Any, float], None] | None = None,
    ) -> Iterator[Any]:
        """Results of the items, in order; items are taken as workers become free.

        Parameters
        ----------
        items : iterable
        describe : callable
            What messages call an item.
        observe : callable, optional
            Called with every finished item and the seconds that it took.

        Raises
        ------
        WorkerLostError
            If one item has ended `MAX_LOSSES` workers.
        """
        self._describe, self._observe = describe, observe or _nothing
        self._items, self._again, self._done = {}, [], {}  # an earlier stream may have been left half-way
        self._losses = Counter()
        source, ended, due = iter(items), False, self._next
        while True:
            while due in self._done:
                result = self._done.pop(due)
                due += 1
                yield result
            while (worker := self._free_worker()) is not None:
                if self._again:
                    index = self._again.pop(0)
                elif ended or self._next - due >= MAX_AHEAD * len(self._workers):
                    break
                else:
                    try:
                        item = next(source)
                    except StopIteration:
                        ended = True
                        break
                    index, self._next = self._next, self._next + 1
                    self._items[index] = item
                worker.give(index, self._items[index])
            if ended and due == self._next:
                return
            self._receive()

    def _free_worker(self) -> _Worker | None:
        """The worker with the fewest items, if it can take another."""
        able = [worker for worker in self._workers if worker.ready and len(worker.queue) < ITEMS_QUEUED]
        return min(able, key=lambda worker: len(worker.queue), default=None)

    def close(self) -> None:
        """End the workers. They hold nothing that must be kept."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.end()
        self._workers = []

    def _receive(self) -> None:
        """Wait for the next messages, and replace lost workers."""
        by_connection = {worker.connection: worker for worker in self._workers}
        for connection in wait(list(by_connection)):
            worker = by_connection[connection]  # type: ignore[index]
            try:
                message = worker.connection.recv()
            except (EOFError, OSError):
                self._replace(worker)
                continue
            if message[0] == "failed":
                raise message[1]
            if message[0] == "ready":
                worker.ready, self._lost_at_start = True, 0
                self._check_kind(worker.slot, *message[1:])
                continue
            _, index, result, seconds = message
            worker.queue.remove(index)
            self._lost_at_start = 0
            if index in self._items:  # not of a stream that was left
                self._done[index] = result
                self._observe(self._items.pop(index), seconds)

    def _check_kind(self, slot: int, kind: Any, about: Any) -> None:
        if not self.kinds:
            self.kinds, self.about = [kind], about
            return
        if about != self.about:
            raise InputError(f"worker {slot + 1} has another model than the others: {about}, not {self.about}")
        if kind in self.kinds:
            return
        if not self._allow_mixed:
            raise InputError(
                f"worker {slot + 1} is of another kind than the others: {kind.differences(self.kinds[0])}. "
                "Scores of both agree to 1e-5 nats per token, not bit for bit; take workers of one kind, or give "
                "--allow-mixed"
            )
        self.kinds.append(kind)

    def _replace(self, worker: _Worker) -> None:
        """Start another worker in the place of a lost one; its items are given out again, first of all."""
        reason = worker.end()
        if not worker.ready:
            self._lost_at_start += 1
            if self._lost_at_start >= MAX_LOSSES_AT_START:
                raise WorkerLostError(
                    f"{self._lost_at_start} workers ended one after the other while they started ({reason}). Often "
                    "memory has run out: take fewer workers, or give less with --memory"
                )
        current = next((index for index in worker.queue if index in self._items), None)
        if current is not None:
            self._losses[current] += 1
            if self._losses[current] >= MAX_LOSSES:
                raise WorkerLostError(
                    f"{self._describe(self._items[current])} ended their worker {self._losses[current]} times "
                    f"({reason}). Often memory has run out: take fewer workers, give less with --memory, or leave "
                    "these rows out"
                )
        self._again = sorted([*self._again, *(index for index in worker.queue if index in self._items)])
        self._workers[worker.slot] = _Worker(worker.slot, self._work, self.threads)


class _Worker:
    """A worker process, as its pool sees it."""

    def __init__(self, slot: int, work: Work, threads: int) -> None:
        self.slot, self.ready = slot, False
        self.queue: deque[int] = deque()  # numbers of items; it works on the first
        own, other = socket.socketpair()
        with other:
            command = [sys.executable, "-c", _PROGRAM, str(other.fileno()), json.dumps(sys.path)]
            usual = {"OMP_NUM_THREADS": str(threads), "RAYON_NUM_THREADS": str(threads)}
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # the rows may go to standard output
                pass_fds=[other.fileno()],
                env={**usual, **os.environ},
                process_group=0,
            )
        self.connection = Connection(own.detach())
        self._send((work, slot))

    def give(self, index: int, item: Any) -> None:
        """Send an item."""
        self.queue.append(index)
        self._send((index, item))

    def _send(self, message: Any) -> None:
        with suppress(OSError):  # a lost worker is found where its messages are awaited
            self.connection.send(message)

    def end(self) -> str:
        """Close the connection, end the process, and say how it ended."""
        self.connection.close()
        code = None
        with suppress(subprocess.TimeoutExpired):
            code = self.process.wait(SECONDS_TO_END)
        if code is None:
            self.process.kill()
            code = self.process.wait()
        if code >= 0:
            return f"exit code {code}"
        names = {item.value: item.name for item in signal.Signals}
        return f"killed by {names.get(-code, f'signal {-code}')}"


def _nothing(item: Any, seconds: float) -> None:
    pass
