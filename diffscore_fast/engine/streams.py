"""Streams of rows: cut into chunks, the next of which is prepared while the caller has the last."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from diffscore_fast.engine.profile import stage

MAX_CHUNK_ROWS = 4096
FIRST_SHARE = 16  # the first chunk is this many times smaller than the maximum: nothing is known about the time yet
MAX_GROWTH = 8  # a chunk's size over that of the one before
Row = TypeVar("Row")
Item = TypeVar("Item")
Result = TypeVar("Result")


def chunks(
    rows: Iterable[Row],
    size_of: Callable[[Row], int],
    max_size: int,
    seconds: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[list[Row]]:
    """Cut a stream into lists of about `max_size`; it bounds memory, and what a killed run loses.

    Parameters
    ----------
    rows : iterable
    size_of : callable
        Size of a row.
    max_size : int
        A list ends with the row that reaches it.
    seconds : float, optional
        Bounds the time that the caller spends on a list, too: the first list is small, and later ones get the size
        that would have taken this long at the speed of the list before.
    clock : callable
        Seconds since some fixed moment.
    """
    limit = max_size if seconds is None else min(max_size, max(1, max_size // FIRST_SHARE))
    chunk: list[Row] = []
    size = 0
    for row in rows:
        chunk.append(row)
        size += size_of(row)
        if size >= limit or len(chunk) >= MAX_CHUNK_ROWS:
            started = clock()
            yield chunk
            if seconds is not None and size:  # rows that cannot be scored say nothing about the speed
                spent = max(clock() - started, 1e-9)
                limit = int(max(1, min(max_size, MAX_GROWTH * size, size * seconds / spent)))
            chunk, size = [], 0
    if chunk:
        yield chunk


def one_ahead(items: Iterable[Item], work: Callable[[Item], Result]) -> Iterator[Result]:
    """`work(item)` of each item, in order; the next result is computed in a thread while the caller has the last.

    An error of `items` is raised after the results of the items before it. The time that the caller waits for a result
    counts as the stage `tokenise`: that is the work done ahead.
    """
    iterator = iter(items)
    for item in iterator:
        ready = work(item)
        break
    else:
        return
    with ThreadPoolExecutor(1) as pool:
        while True:
            try:
                item = next(iterator)
            except StopIteration:
                yield ready
                return
            except Exception:
                yield ready
                raise
            try:
                following = pool.submit(work, item)
            except RuntimeError:  # the interpreter is shutting down; threads that are not daemons go on
                yield ready
                ready = work(item)
                continue
            yield ready
            with stage("tokenise"):
                ready = following.result()


def token_estimate(text: Any) -> int:
    """About how many tokens a value has, before it is tokenised: four characters per token; 0 for what is not text."""
    return len(text) // 4 + 1 if isinstance(text, str) else 0
