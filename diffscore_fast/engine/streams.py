"""Streams of rows: cut into portions, and worked on one ahead."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from diffscore_fast.engine.profile import stage

ROWS_CHUNK = 4096
FIRST_SHARE = 16  # the first portion has this share of the largest: nothing is known about the time yet
MAX_GROWTH = 8  # a portion's size over that of the one before
Row = TypeVar("Row")
Item = TypeVar("Item")
Result = TypeVar("Result")


def portions(
    rows: Iterable[Row],
    size_of: Callable[[Row], int],
    most: int,
    seconds: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[list[Row]]:
    """Cut a stream into lists of about `most` in size; it bounds memory, and what a killed run loses.

    Parameters
    ----------
    rows : iterable
    size_of : callable
        Size of a row.
    most : int
        A list ends with the row that reaches it.
    seconds : float, optional
        Also bounds the time that the caller spends on a list: the first is small, and later ones have the size that
        the lists before took about so long for.
    clock : callable
        Seconds from some moment on.
    """
    limit = most if seconds is None else min(most, max(1, most // FIRST_SHARE))
    portion: list[Row] = []
    size = 0
    for row in rows:
        portion.append(row)
        size += size_of(row)
        if size >= limit or len(portion) >= ROWS_CHUNK:
            started = clock()
            yield portion
            if seconds is not None:
                spent = max(clock() - started, 1e-9)
                limit = int(max(1, min(most, MAX_GROWTH * size, size * seconds / spent)))
            portion, size = [], 0
    if portion:
        yield portion


def one_ahead(items: Iterable[Item], work: Callable[[Item], Result]) -> Iterator[Result]:
    """`work(item)` of each item, in order; the next one is worked on in a thread while the caller has the last.

    What `items` raises is raised after the results of those before it. The time that the caller waits for a result
    counts as the stage `tokenise`, which is the work that this is for.
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
    """Tokens of a value that may be text, before it is tokenised: four characters each, near enough for memory."""
    return len(text) // 4 + 1 if isinstance(text, str) else 0
