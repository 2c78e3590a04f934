"""The queue: results in order, fair turns, cancelled work, errors, and the end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import dataclass, field
from typing import Any

import pytest

from diffscore_fast.serving.batching import Batch, QueueClosedError, ScoringQueue


@dataclass(eq=False)
class Doubling:
    """Doubles numbers; a batch waits until `open` is set. A row "bad" fails its batch."""

    open: threading.Event = field(default_factory=threading.Event)
    began: threading.Event = field(default_factory=threading.Event)
    batches: list[list[Any]] = field(default_factory=list)

    def size(self, row: Any) -> int:
        return 1

    def run(self, rows: list[Any], progress: Callable[[int], None]) -> list[Any]:
        self.batches.append(rows)
        self.began.set()
        assert self.open.wait(30)
        if "bad" in rows:
            raise ValueError("bad row")
        results = []
        for row in rows:
            progress(1)
            results.append(2 * row)
        return results


@pytest.fixture
def batches() -> list[Batch]:
    return []


@pytest.fixture
def queue(batches):
    queue = ScoringQueue(batch_tokens=4, max_wait=0.0, observe=batches.append)
    yield queue
    queue.close()


def busy(queue: ScoringQueue) -> Doubling:
    """Occupies the thread until its `open` is set, so that later work waits together."""
    work = Doubling()
    queue.submit(work, [0])
    assert work.began.wait(30)
    return work


def test_results_keep_the_order_of_their_rows_over_many_batches(queue):
    work = Doubling()
    work.open.set()
    futures = [queue.submit(work, list(range(start, start + 11))) for start in range(0, 100, 20)]
    for start, future in zip(range(0, 100, 20), futures, strict=True):
        assert future.result(30) == [2 * number for number in range(start, start + 11)]
    assert max(map(len, work.batches)) <= 4


def test_a_small_request_does_not_wait_for_the_end_of_a_large_one(queue):
    first, work = busy(queue), Doubling()
    work.open.set()
    large, small = queue.submit(work, [1] * 40), queue.submit(work, [7])
    first.open.set()
    assert small.result(30) == [14]
    assert large.result(30) == [2] * 40
    assert sorted(work.batches[0]) == [1, 1, 1, 7]


def test_different_works_take_turns(queue):
    first, one, other = busy(queue), Doubling(), Doubling()
    order: list[str] = []
    for work, name in ((one, "one"), (other, "other")):
        work.open.set()
        work.run = lambda rows, progress, name=name: [order.append(name) for _ in rows]  # type: ignore
    futures = [queue.submit(one, [1] * 8), queue.submit(other, [1] * 8)]
    first.open.set()
    wait(futures, 30)
    assert order[::4] == ["one", "other", "one", "other"]


def test_cancelled_work_leaves_the_queue_and_is_not_computed(queue):
    first, work = busy(queue), Doubling()
    work.open.set()
    gone, kept = queue.submit(work, [1, 2, 3]), queue.submit(work, [5])
    assert queue.waiting_tokens == 4
    gone.cancel()
    assert (queue.waiting_tokens, queue.waiting_requests) == (1, 1)
    first.open.set()
    assert kept.result(30) == [10]
    assert work.batches == [[5]]


def test_a_batch_that_nobody_waits_for_is_ended(queue, batches):
    work = Doubling()
    future = queue.submit(work, [1, 2, 3, 4])
    assert work.began.wait(30)
    future.cancel()
    work.open.set()
    queue.close()
    assert [batch.tokens for batch in batches] == [1]  # of four


def test_a_row_that_fails_fails_its_own_request_alone(queue):
    first, work = busy(queue), Doubling()
    work.open.set()
    bad, good = queue.submit(work, ["bad", 1, 1, 1, 1]), queue.submit(work, [3])
    first.open.set()
    assert good.result(30) == [6]
    with pytest.raises(ValueError, match="bad row"):
        bad.result(30)
    assert queue.is_alive and queue.waiting_tokens == 0


def test_requests_meet_within_the_maximum_wait():
    queue = ScoringQueue(batch_tokens=3, max_wait=10.0)  # the full batch ends the wait
    work = Doubling()
    work.open.set()
    futures = [queue.submit(work, [number]) for number in range(3)]
    assert [future.result(5) for future in futures] == [[0], [2], [4]]
    assert len(work.batches) == 1
    queue.close()


def test_closing_computes_what_waits_and_refuses_more():
    queue = ScoringQueue(batch_tokens=2, max_wait=10.0)
    work = Doubling()
    work.open.set()
    future = queue.submit(work, [1])
    queue.close()
    assert future.result(0) == [2]
    assert not queue.is_alive
    with pytest.raises(QueueClosedError):
        queue.submit(work, [1])
