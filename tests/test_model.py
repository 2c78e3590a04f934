"""What the scorers share: portions of a stream, tokenised while the model runs."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from diffscore_fast.engine.profile import profile_run
from diffscore_fast.model import one_ahead, portions


def test_the_next_item_is_worked_on_while_the_caller_has_the_last():
    started = [threading.Event() for _ in range(3)]

    def work(item: int) -> int:
        started[item].set()
        return 10 * item

    results = one_ahead(range(3), work)
    for item, result in enumerate(results):
        assert result == 10 * item
        assert all(event.wait(timeout=10) for event in started[: item + 2])  # without a further call
    assert not any(thread.name.startswith("ThreadPool") for thread in threading.enumerate())


def test_one_item_needs_no_thread_and_none_gives_nothing():
    assert list(one_ahead([], str)) == []
    assert list(one_ahead([7], lambda item: (item, threading.current_thread()))) == [(7, threading.main_thread())]


def test_what_the_work_raises_comes_in_its_turn_and_a_caller_may_stop():
    def work(item: int) -> int:
        return 1 // item

    results = one_ahead([1, 1, 0, 1], work)
    assert [next(results), next(results)] == [1, 1]
    with pytest.raises(ZeroDivisionError):
        next(results)
    stopped = one_ahead([1, 1, 1], work)
    assert next(stopped) == 1
    stopped.close()
    assert not any(thread.name.startswith("ThreadPool") for thread in threading.enumerate())


def test_what_the_items_raise_comes_after_the_results_before_it():
    def items():
        yield from (1, 2)
        raise OSError("the disk")

    results = one_ahead(items(), str)
    assert [next(results), next(results)] == ["1", "2"]
    with pytest.raises(OSError, match="the disk"):
        next(results)


def test_threads_that_outlive_the_main_one_still_get_their_results():
    code = (
        "import threading, time\n"
        "from diffscore_fast.model import one_ahead\n"
        "def late():\n"
        "    time.sleep(0.5)\n"
        "    print(list(one_ahead(range(4), str)))\n"
        "threading.Thread(target=late).start()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "['0', '1', '2', '3']\n", done.stderr


@pytest.mark.parametrize("ahead", [False, True])
def test_a_stream_in_portions_scores_as_its_rows_do(mini, monkeypatch, ahead):
    if ahead:  # as on a GPU
        monkeypatch.setattr("diffscore_fast.scorer.map", lambda work, items: one_ahead(items, work), raising=False)
    monkeypatch.setattr("diffscore_fast.scorer.TOKENS_AT_ONCE", 1)
    sources, candidates = ["It rained.", None, "The cat sat."], ["A", "B c", "A cat."]
    with profile_run() as profile:
        together = mini.score(sources, candidates, draws=4)
    assert profile.calls["tokenise"] == 3
    assert together.status == ["ok", "missing", "ok"]
    alone = mini.score(sources[2:], candidates[2:], draws=4)
    assert together.scores[2] == pytest.approx(alone.scores[0], abs=1e-5)


def test_portions_are_cut_by_size():
    assert list(portions([3, 1, 1, 5, 1], int, 4)) == [[3, 1], [1, 5], [1]]
