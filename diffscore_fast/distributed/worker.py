"""The process of a worker: it takes items from its pool, and sends back results."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, Protocol

from diffscore_fast.process import spare_garbage_collector


class Step(Protocol):
    """Work that has been started in a worker."""

    kind: Any  # compared among workers: a `WorkerKind`
    about: Any  # what the pool is told; equal in all workers

    def __call__(self, item: Any, /) -> Any: ...


class Work(Protocol):
    """What a worker does; pickled, as it is sent to the worker."""

    def start(self, slot: int) -> Step:
        """Begin in the worker of this number; called once per process."""


def main(descriptor: int) -> None:
    """Run until the pool closes the connection, or ends."""
    spare_garbage_collector()
    # The pool decides when a run ends; a Ctrl-C in the terminal must not end workers one by one.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    connection = Connection(descriptor)
    inbox: SimpleQueue[Any] = SimpleQueue()
    # Reading in a thread of its own: the pool never waits for a busy worker, and a worker whose pool is gone ends at
    # once, whatever it computes.
    threading.Thread(target=_read, args=(connection, inbox), daemon=True).start()
    try:
        work, slot = inbox.get()
        step = work.start(slot)
        _send(connection, ("ready", step.kind, step.about))
        while True:
            index, item = inbox.get()
            started = time.perf_counter()
            result = step(item)
            _send(connection, ("done", index, result, time.perf_counter() - started))
    except BaseException as error:
        _send(connection, ("failed", _portable(error)))
        os._exit(1)


def _read(connection: Connection, inbox: SimpleQueue[Any]) -> None:
    while True:
        try:
            message = connection.recv()
        except (EOFError, OSError):
            os._exit(0)
        except BaseException as error:  # such as a module that cannot be imported here
            _send(connection, ("failed", _portable(error)))
            os._exit(1)
        inbox.put(message)


def _send(connection: Connection, message: tuple[Any, ...]) -> None:
    try:
        connection.send(message)
    except OSError:
        os._exit(0)


def _portable(error: BaseException) -> BaseException:
    """The error, or its text where it cannot be sent."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
