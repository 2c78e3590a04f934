"""What the scorers share: chunks of a stream, tokenised while the model runs; tokens and cache of a model."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable

import numpy as np
import pytest

from diffscore_fast import DiffScorer, LikelihoodBounds
from diffscore_fast.bounds.config import BoundsConfig
from diffscore_fast.engine.profile import profile_run
from diffscore_fast.engine.streams import chunks, one_ahead
from diffscore_fast.errors import InputError
from diffscore_fast.scoring.config import ScoreConfig
from diffscore_fast.scoring.mask_design import MaskDesign
from diffscore_fast.scoring.reconstruction import ReconstructionConfig


def test_the_next_item_is_computed_while_the_caller_has_the_last():
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


def test_errors_of_the_work_come_in_order_and_a_caller_may_stop():
    def work(item: int) -> int:
        return 1 // item

    results = one_ahead([1, 1, 0, 1], work)
    assert [next(results), next(results)] == [1, 1]
    with pytest.raises(ZeroDivisionError):
        next(results)
    stopped = one_ahead([1, 1, 1], work)
    assert next(stopped) == 1
    stopped.close()  # type: ignore[attr-defined]
    assert not any(thread.name.startswith("ThreadPool") for thread in threading.enumerate())


def test_an_error_of_the_items_comes_after_the_results_before_it():
    def items():
        yield from (1, 2)
        raise OSError("the disk")

    results = one_ahead(items(), str)
    assert [next(results), next(results)] == ["1", "2"]
    with pytest.raises(OSError, match="the disk"):
        next(results)


def test_threads_that_outlive_the_main_thread_still_get_their_results():
    code = (
        "import threading, time\n"
        "from diffscore_fast.engine.streams import one_ahead\n"
        "def late():\n"
        "    time.sleep(0.5)\n"
        "    print(list(one_ahead(range(4), str)))\n"
        "threading.Thread(target=late).start()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "['0', '1', '2', '3']\n", done.stderr


@pytest.mark.parametrize("ahead", [False, True])
def test_a_stream_in_chunks_scores_as_its_rows_do(mini, monkeypatch, ahead):
    if ahead:  # as on a GPU
        monkeypatch.setattr(
            "diffscore_fast.scoring.scorer.map", lambda work, items: one_ahead(items, work), raising=False
        )
    monkeypatch.setattr("diffscore_fast.scoring.scorer.TOKENS_CHUNK", 1)
    sources, candidates = ["It rained.", None, "The cat sat."], ["A", "B c", "A cat."]
    with profile_run() as profile:
        together = mini.score(sources, candidates, draws=4)
    assert profile.calls["tokenise"] == 3
    assert together.status == ["ok", "missing", "ok"]
    alone = mini.score(sources[2:], candidates[2:], draws=4)
    assert together.scores[2] == pytest.approx(alone.scores[0], abs=1e-5)


def test_chunks_are_cut_by_size():
    assert list(chunks([3, 1, 1, 5, 1], int, 4)) == [[3, 1], [1, 5], [1]]


def timed_chunks(seconds_of: Callable[[int, int], float], rows: int) -> list[int]:
    """Sizes of chunks of rows of size 1; the caller spends `seconds_of(number, size)` on each."""
    now, sizes = 0.0, []

    def clock() -> float:
        return now

    for chunk in chunks([1] * rows, int, 1600, 3.0, clock=clock):
        sizes.append(len(chunk))
        now += seconds_of(len(sizes), len(chunk))
    return sizes


@pytest.mark.parametrize("speed", [0.01, 5.0, 300.0, 1e9])
def test_chunks_are_cut_by_time_too(speed):
    """At any speed: the first chunk is small, those that follow take at most three seconds, and none grows fast."""
    sizes = timed_chunks(lambda number, size: size / speed, 9000)
    assert sum(sizes) == 9000 and sizes[0] == 100 and max(sizes) == min(1600, max(100, int(3 * speed)))
    assert all(size / speed <= max(3.0, 1 / speed) for size in sizes[1:])
    assert all(later <= 8 * earlier for earlier, later in zip(sizes, sizes[1:], strict=False))


def test_a_slow_moment_makes_chunks_small_for_a_moment_only():
    sizes = timed_chunks(lambda number, size: 100.0 if number == 3 else size / 1000.0, 20_000)
    assert sizes[:8] == [100, 800, 1600, 48, 384, 1600, 1600, 1600]


def test_rows_without_texts_leave_the_size_of_later_chunks_alone():
    rows = iter([1] * 100 + [0] * 9000 + [1] * 3200)
    sizes = [sum(chunk) for chunk in chunks(rows, int, 1600, 3.0)]
    assert sizes[0] == 100 and 1 not in sizes and sizes.count(0) >= 2, sizes


@pytest.mark.parametrize("command", ["score", "bound"])
def test_a_run_over_a_file_stores_its_rows_every_few_seconds(mini, monkeypatch, command):
    """And the scores are the same as in one chunk, bit for bit."""
    monkeypatch.setattr("diffscore_fast.engine.session.CHUNK_SECONDS", 1e-9)  # every row takes longer
    monkeypatch.setattr("diffscore_fast.engine.streams.FIRST_SHARE", 1 << 20)
    texts = ["A", "It rained on the mat.", "A cat.", "The dog looked at the cat."]
    if command == "score":
        config = ScoreConfig(direction="marginal", reconstruction=ReconstructionConfig(design=MaskDesign(4)))
        cut = list(mini.score_batches([(None, text) for text in texts], config, by_time=True))
        (whole,) = mini.score_batches([(None, text) for text in texts], config)
        got, expected = [table.scores[0] for table in cut], whole.scores
    else:
        bounds, settings = LikelihoodBounds("mini", block_size=4), BoundsConfig(exact=True)
        cut = list(bounds.bound_batches(texts, settings, by_time=True))
        (whole,) = bounds.bound_batches(texts, settings)
        got, expected = [table.exact[0] for table in cut], whole.exact
    assert [len(table.status) for table in cut] == [1, 1, 1, 1] and got == list(expected)


def test_tokens_of_a_text_are_those_that_are_scored(mini):
    texts = ["The cat sat on the mat.", None, "", "[MASK]", 5]
    ids = mini.tokenize(texts)
    assert [item.dtype for item in ids] == [np.int32] * 5
    assert [len(item) for item in ids] == mini.count_tokens(texts).tolist()
    assert len(ids[1]) == len(ids[2]) == len(ids[4]) == 0 and mini.spec.mask_id not in ids[3]
    table = mini.score(None, [texts[0], texts[3]], direction="marginal", draws=1)
    assert table.num_tokens.tolist() == [len(ids[0]), len(ids[3])]
    with pytest.raises(InputError):
        mini.tokenize("The cat sat on the mat.")


def test_a_cleared_cache_computes_its_prefixes_again_and_changes_no_score(mini):
    rows = ["The cat sat on the mat."], ["A cat sat."]

    def prefix_packs() -> tuple[int, np.ndarray]:
        """Layers of a pack run attention once each; only the windows' layers do once the prefix is cached."""
        with profile_run() as profile:
            table = mini.score(*rows, attention="prefix", draws=1)
        return profile.calls["attention"], table.scores

    mini.clear_cache()
    (first, scores), (cached, same) = prefix_packs(), prefix_packs()
    mini.clear_cache()
    again, last = prefix_packs()
    assert first == again == cached + mini.spec.num_layers - 1
    assert np.array_equal(scores, same) and np.array_equal(scores, last)


def test_a_cache_that_is_cleared_while_scoring_is_filled_again(mini):
    """By the callback, between two packs that read the same prefixes."""
    rows = ["The cat sat on the mat."] * 2, ["A cat sat.", "The mat was red, and the cat was not."]
    expected = mini.score(*rows, attention="prefix", draws=9).scores
    small = DiffScorer("mini", token_budget=1)
    told = []

    def progress(tokens: int) -> None:
        told.append(tokens)
        small.clear_cache()

    np.testing.assert_array_equal(small.score(*rows, attention="prefix", draws=9, progress=progress).scores, expected)
    assert len(told) > 2
