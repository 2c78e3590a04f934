"""DiffScore in torchmetrics, with the real package."""

from __future__ import annotations

import subprocess
import sys

import pytest

from diffscore_fast import DiffScorer

pytest.importorskip("torchmetrics")
pytestmark = pytest.mark.extras

SOURCES = ["The cat sat on the mat.", "It rained all day.", "A dog ran.", "Nothing."]
CANDIDATES = ["A cat sat.", "It rained.", "A dog was running.", ""]


def test_the_mean_is_over_scored_rows_of_all_updates():
    from diffscore_fast.integrations.torchmetrics import DiffScore

    expected = DiffScorer("mini").score(SOURCES, CANDIDATES, draws=2).scores
    metric, rows = DiffScore(draws=2), DiffScore(draws=2, per_row=True)
    assert metric.compute().isnan()
    for part in (slice(0, 1), slice(1, 4)):
        metric.update(CANDIDATES[part], SOURCES[part])
        rows.update(CANDIDATES[part], SOURCES[part])
    assert metric.compute() == pytest.approx(expected[:3].mean(), abs=1e-12)
    assert rows.compute()[:3].tolist() == expected[:3].tolist() and rows.compute()[3].isnan()
    metric.reset()
    metric.update(["A cat sat."], [["A dog ran.", "The cat sat."]])
    best = DiffScorer("mini").score(None, ["A cat sat."], references=[["A dog ran.", "The cat sat."]], draws=2)
    assert metric.compute() == best.scores[0]


def test_the_example_of_the_class_runs():
    import doctest

    from diffscore_fast.integrations import torchmetrics

    outcome = doctest.testmod(torchmetrics)
    assert outcome.attempted and not outcome.failed


PROGRAM = """
import sys
import torch.distributed as dist
from diffscore_fast.integrations.torchmetrics import DiffScore
rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
metric = DiffScore(draws=2, per_row=True)
sources, candidates = eval(sys.argv[3]), eval(sys.argv[4])
if rank == 0:
    metric.update(candidates[:3], sources[:3])
else:
    metric.update(candidates[3:], sources[3:])
print(metric.compute().tolist() if rank == 0 else metric.compute().shape)
dist.destroy_process_group()
"""


def test_processes_gather_their_rows(tmp_path):
    command = [sys.executable, "-c", PROGRAM]
    texts = [repr(SOURCES[:3] + SOURCES[:1]), repr(CANDIDATES[:3] + CANDIDATES[1:2])]
    both = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store"), *texts], stdout=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    printed = [process.communicate(timeout=300)[0].strip().splitlines()[-1] for process in both]
    expected = DiffScorer("mini").score(SOURCES[:3] + SOURCES[:1], CANDIDATES[:3] + CANDIDATES[1:2], draws=2)
    assert eval(printed[0]) == expected.scores.tolist() and printed[1] == "torch.Size([4])"
