"""A memory budget is kept, and neither it nor a device that runs out of memory changes a score."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from diffscore_fast.engine.memory import DEFAULT_TOKEN_BUDGET, MAX_TOKEN_BUDGET, MIN_MEMORY, divide_memory, parse_size
from diffscore_fast.engine.plan import AttentionPattern, MaskPlan, Observation, Sequences
from diffscore_fast.engine.runner import Runner
from diffscore_fast.errors import DeviceMemoryError, InputError
from tests.support.networks import RotaryDecoder


class SmallDevice(RotaryDecoder):
    """Runs out of memory beyond `room` tokens, and counts how often."""

    def __init__(self, room: int) -> None:
        super().__init__(logit_shift=0)
        self.room, self.failures, self.largest = room, 0, 0

    def embed(self, tokens, positions, types):
        if len(tokens) > self.room:
            self.failures += 1
            raise torch.OutOfMemoryError("no room")
        self.largest = max(self.largest, len(tokens))
        return super().embed(tokens, positions, types)


class RandomMasks:
    """One round of random masks over whole targets; its result is the log-prob of every masked token."""

    def __init__(self, sequences: Sequences, draws: int) -> None:
        self._lengths, self._draws = sequences.target_lengths, draws

    def plan(self, observed: list[Observation]) -> MaskPlan | None:
        if observed:
            return None
        sequence = np.repeat(np.arange(len(self._lengths)), self._draws)
        stop = self._lengths[sequence]
        return MaskPlan(sequence, np.zeros_like(stop), stop, np.random.default_rng(1).random(stop.sum()) < 0.5)

    def reduce(self, observed: list[Observation]) -> np.ndarray:
        return observed[0].log_probs


def log_probs(runner: Runner, attention: AttentionPattern, draws: int = 8, progress=None) -> np.ndarray:
    generator = np.random.default_rng(0)
    contexts = [generator.integers(4, 50, size).astype(np.int32) for size in (9, 5, 7, 6)]
    targets = [generator.integers(4, 50, size).astype(np.int32) for size in (6, 11, 4, 9, 8)]
    sequences = Sequences.build(contexts, np.array([0, 1, 2, 3, 0]), targets)
    return runner.evaluate(RandomMasks(sequences, draws), sequences, attention, progress)


@pytest.mark.parametrize(
    "attention", [AttentionPattern("prefix"), AttentionPattern("full")], ids=lambda item: item.name
)
def test_a_device_without_room_halves_its_packs_and_scores_the_same(attention):
    expected = log_probs(Runner(RotaryDecoder(logit_shift=0)), attention)
    device = SmallDevice(room=30)
    runner = Runner(device)
    np.testing.assert_allclose(log_probs(runner, attention), expected, atol=1e-5)
    assert 0 < device.failures < 10  # learnt once, not pack by pack
    assert device.largest > 10
    failures = device.failures
    np.testing.assert_allclose(log_probs(runner, attention), expected, atol=1e-5)
    assert device.failures == failures


def test_a_window_that_no_device_has_room_for_is_an_error():
    with pytest.raises(DeviceMemoryError, match="no room for one window of"):
        log_probs(Runner(SmallDevice(room=5)), AttentionPattern("full"))


def test_memory_that_runs_out_in_the_callback_halves_no_pack():
    """It ends the call; no pack is halved or reported twice."""
    runner, told = Runner(RotaryDecoder(logit_shift=0), token_budget=20), []

    def progress(tokens: int) -> None:
        told.append(tokens)
        if len(told) == 2:
            raise torch.OutOfMemoryError("the callback's own")

    with pytest.raises(torch.OutOfMemoryError, match="the callback's own"):
        log_probs(runner, AttentionPattern("full"), progress=progress)
    assert len(told) == 2 and runner.token_budget == 20


def test_a_prefix_that_no_device_has_room_for_is_an_error_and_leaves_no_rows_behind():
    """Its rows are reserved but not written; windows that fit must not read them, in this call or the next."""
    device = SmallDevice(room=8)
    runner = Runner(device)
    for _ in range(2):
        with pytest.raises(DeviceMemoryError, match="no room for the keys and values"):
            log_probs(runner, AttentionPattern("prefix"))
    device.room = 1000
    expected = log_probs(Runner(RotaryDecoder(logit_shift=0)), AttentionPattern("prefix"))
    np.testing.assert_allclose(log_probs(runner, AttentionPattern("prefix")), expected, atol=1e-5)


@pytest.mark.parametrize(
    "attention", [AttentionPattern("prefix"), AttentionPattern("full")], ids=lambda item: item.name
)
@pytest.mark.parametrize("plan_tokens", [1, 50])
def test_a_plan_evaluated_in_parts_scores_the_same(attention, plan_tokens):
    """One row with many draws, or one large chunk, is laid out piece by piece."""
    expected = log_probs(Runner(RotaryDecoder(logit_shift=0)), attention, draws=15)
    got = log_probs(Runner(RotaryDecoder(logit_shift=0), plan_tokens=plan_tokens), attention, draws=15)
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_a_budget_is_divided_and_too_little_is_refused():
    backbone = RotaryDecoder()
    small, large = divide_memory(MIN_MEMORY, backbone), divide_memory(MIN_MEMORY * 4, backbone)
    assert small.cache_bytes == MIN_MEMORY // 2 and large.cache_bytes == 4 * small.cache_bytes
    assert small.plan_tokens < large.plan_tokens
    assert divide_memory(None, backbone).token_budget == DEFAULT_TOKEN_BUDGET
    backbone.device = torch.device("cuda")
    assert divide_memory(None, backbone).token_budget > DEFAULT_TOKEN_BUDGET
    assert divide_memory(1 << 40, backbone).token_budget == MAX_TOKEN_BUDGET
    with pytest.raises(InputError, match="at least 64M"):
        divide_memory(MIN_MEMORY - 1, backbone)


def test_sizes_are_read_with_common_units():
    assert [parse_size(text) for text in ("800M", "1.5g", "2 GiB", "4096", "1TB")] == [
        800 << 20,
        3 << 29,
        2 << 30,
        4096,
        1 << 40,
    ]
    for text in ("", "M", "2X", "-1G", "1e9"):
        with pytest.raises(InputError, match="not understood"):
            parse_size(text)


GROWTH = """
import gc
import sys
from pathlib import Path

from bench.timing import timed_with_peak
from bench.tiny_model import tiny_model
from diffscore_fast import DiffScorer
from diffscore_fast.engine.memory import MIN_MEMORY
from diffscore_fast.scoring.mask_design import MaskDesign
from diffscore_fast.scoring.reconstruction import ReconstructionConfig
from diffscore_fast.scoring.config import ScoreConfig

scorer = DiffScorer(tiny_model(Path(sys.argv[1])), memory=MIN_MEMORY, cache_bytes=1 << 20)
config = ScoreConfig(reconstruction=ReconstructionConfig(design=MaskDesign(1, "uniform")))

def score(count):
    rows = ((f"{row} " + "old river rain falls " * 6, f"the green house sings {row}") for row in range(count))
    assert sum(len(table) for table in scorer.score_batches(rows, config)) == count

score(1400)  # a whole chunk: threads, tables and the prefix cache exist from here on
for count in (2_800, 5_600):
    gc.collect()  # garbage that is freed meanwhile would hide a rise
    print(timed_with_peak(lambda: score(count))[1])
"""


def test_memory_stays_in_its_budget_and_does_not_grow_with_the_rows(tmp_path):
    """In a process of its own, so that no garbage of other tests is freed meanwhile, with one pool of memory."""
    settings = {"MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", GROWTH, str(tmp_path)],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **settings},
    )
    # A chunk has 1,395 rows.
    few, many = (int(line) for line in done.stdout.split())
    assert many < MIN_MEMORY
    assert many - few < 4e6  # 2,800 more rows at once take 20 MB
