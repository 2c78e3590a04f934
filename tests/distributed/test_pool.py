"""Worker processes: order, losses, errors, and that none is left behind. No model runs here."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from diffscore_fast.distributed.pool import WorkerLostError, WorkerPool
from diffscore_fast.errors import InputError
from tests.support.squares import Squares

ROOT = Path(__file__).parent.parent.parent


def is_gone(pid: int, seconds: float = 30.0) -> bool:
    """Whether a process ends within a time; one that nobody waits for (a zombie) has ended."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state in "ZX":
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("count", [1, 2, 4])
def test_results_come_in_order(tmp_path, count):
    with WorkerPool(Squares(tmp_path), count) as pool:
        assert list(pool.map(range(100))) == [item * item for item in range(100)]
        assert list(pool.map([])) == []
        assert list(pool.map(range(3))) == [0, 1, 4]
        pids = pool.pids
    assert len(pids) == count and all(is_gone(pid) for pid in pids)


def test_items_are_taken_as_workers_become_free(tmp_path):
    """A stream longer than memory is never taken in whole."""
    taken = []

    def items():
        for item in range(1000):
            taken.append(item)
            yield item

    with WorkerPool(Squares(tmp_path), 2) as pool:
        for done, _ in enumerate(pool.map(items())):
            assert len(taken) <= done + 20


def test_large_items_and_results_do_not_lock_the_pool(tmp_path):
    with WorkerPool(Squares(tmp_path), 2) as pool:
        sizes = [len(result) for result in pool.map([("large", 3_000_000)] * 12)]
    assert sizes == [3_000_000] * 12


def test_killed_workers_are_replaced_and_no_result_is_lost_or_repeated(tmp_path):
    dice = random.Random(1)
    with WorkerPool(Squares(tmp_path), 3) as pool:
        found = []
        for result in pool.map(range(150)):
            found.append(result)
            if len(found) % 30 == 0:
                os.kill(dice.choice(pool.pids), signal.SIGKILL)
        assert found == [item * item for item in range(150)]


def test_an_item_that_ends_its_worker_is_given_out_again_but_not_for_ever(tmp_path):
    items = [1, 2, ("die", 2), 4]
    with WorkerPool(Squares(tmp_path), 2) as pool:
        assert list(pool.map(items)) == [1, 4, "survived", 16]
        for trace in tmp_path.iterdir():
            trace.unlink()
        with pytest.raises(WorkerLostError, match=r"rows 7 to 9 ended their worker 3 times \(killed by SIGKILL\)"):
            list(pool.map([1, ("die", 99), 3], describe=lambda item: "rows 7 to 9"))
    assert len(list(tmp_path.iterdir())) == 3


def test_a_stream_may_be_left_half_way(tmp_path):
    with WorkerPool(Squares(tmp_path), 2) as pool:
        left: Any = pool.map(range(50))
        assert [next(left) for _ in range(3)] == [0, 1, 4]
        left.close()
        assert list(pool.map(range(100, 130))) == [item * item for item in range(100, 130)]


def test_errors_of_the_work_are_raised_in_the_pool(tmp_path):
    with pytest.raises(ValueError, match="no square of 7"), WorkerPool(Squares(tmp_path), 2) as pool:
        list(pool.map([1, ("fail", 7), 2]))
    with pytest.raises(WorkerLostError, match="while they started"):
        WorkerPool(Squares(tmp_path, dies_at_start=True), 2)


def test_workers_of_several_kinds_are_refused_unless_allowed(tmp_path):
    work = Squares(tmp_path, loops=("avx2", "portable"))
    with pytest.raises(InputError, match="not bit for bit.*--allow-mixed") as caught:
        WorkerPool(work, 2)
    assert "avx2" in str(caught.value) and "portable" in str(caught.value) and "1e-5" in str(caught.value)
    with WorkerPool(work, 2, allow_mixed=True) as pool:
        assert len(pool.kinds) == 2 and list(pool.map(range(4))) == [0, 1, 4, 9]


def test_threads_are_shared_out_unless_the_environment_says(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with WorkerPool(Squares(tmp_path), 1, threads=3) as pool:
        assert list(pool.map([("threads", 0)])) == ["3"]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    with WorkerPool(Squares(tmp_path), 1) as pool:
        assert list(pool.map([("threads", 0)])) == ["5"]


PARENT = """
import signal
import sys
from pathlib import Path
from typing import Any
from diffscore_fast.distributed.pool import WorkerPool
from tests.support.squares import Squares
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for jobs in the background
with WorkerPool(Squares(Path(sys.argv[1])), 2) as pool:
    list(pool.map([("sleep", 300)] * 2))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_workers_end_with_their_parent_even_while_they_work(tmp_path, number):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path)], cwd=ROOT, stderr=subprocess.DEVNULL, env={**os.environ}
    )
    end = time.monotonic() + 60
    while len(list(tmp_path.glob("sleeping-*"))) < 2:
        assert parent.poll() is None and time.monotonic() < end
        time.sleep(0.02)
    pids = [int(path.name.partition("-")[2]) for path in tmp_path.iterdir()]
    parent.send_signal(number)
    parent.wait(60)
    assert all(is_gone(pid) for pid in pids)
