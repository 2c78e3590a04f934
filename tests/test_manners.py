"""How a scorer behaves in threads, forks, pickles, callbacks and interruptions, and what it prints (nothing)."""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from diffscore_fast import DiffScorer, LikelihoodBounds
from diffscore_fast.errors import CheckpointError
from diffscore_fast.scoring.config import ScoreConfig
from tests.support.checkpoints import save_checkpoint, save_prefix_model

TEXT = "the cat sat on the mat and two people died on a cruise ship in puerto rico on monday"
WORDS = TEXT.split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_checkpoint("bert", tmp_path_factory.mktemp("manners") / "bert")


@pytest.fixture(scope="module")
def scorer(folder):
    return DiffScorer(folder)


@pytest.fixture(scope="module")
def prefix_folder(tmp_path_factory):
    return save_prefix_model(tmp_path_factory.mktemp("manners") / "prefix")


def test_thirty_two_threads_get_the_scores_of_one(scorer):
    """Rows of 1 to 16 words, four rows per call, while the contents of the cache change."""
    rows = [(" ".join(WORDS[: 1 + i % 11]), " ".join(WORDS[i % 7 : i % 7 + 1 + i % 16])) for i in range(64)]
    calls = [rows[i : i + 4] for i in range(0, 64, 4)] * 4

    def score(call):
        return scorer.score(*map(list, zip(*call, strict=True)), draws=2).scores

    expected = [score(call) for call in calls[:16]] * 4
    with ThreadPoolExecutor(32) as pool:
        got = list(pool.map(score, calls))
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_threads_share_the_prefix_cache(prefix_folder):
    scorer = DiffScorer(prefix_folder, cache_bytes=1)  # every sequence empties the cache
    sources = [" ".join(WORDS[i : i + 6]) for i in range(8)]
    expected = [scorer.score([source], ["a cat"], draws=1).scores[0] for source in sources]
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda source: scorer.score([source], ["a cat"], draws=1).scores[0], sources))
    np.testing.assert_allclose(got, expected, atol=1e-5)


FORKED = """
import multiprocessing, pickle, sys, threading, time
import numpy as np
import torch
from diffscore_fast import DiffScorer
torch.set_num_threads(2)
scorer = DiffScorer(sys.argv[1])
texts = ["the cat sat on the mat " * 4] * 2, ["a cat sat on a mat"] * 2
expected = scorer.score(*texts, draws=9).scores
# A thread that holds the lock while the fork happens does not exist in the child.
holding, done = threading.Event(), threading.Event()
def hold(tokens):
    holding.set()
    done.wait(60)
thread = threading.Thread(target=lambda: scorer.score(*texts, draws=1, progress=hold))
thread.start()
holding.wait(60)
context = multiprocessing.get_context("fork")
stored = pickle.dumps(scorer)
def answer():
    scores = [one.score(*texts, draws=9).scores for one in (scorer, pickle.loads(stored))]
    send.send((scores, torch.get_num_threads()))
receive, send = context.Pipe()
child = context.Process(target=answer)
child.start()
answered = receive.poll(60)
done.set()
thread.join()
if not answered:
    child.kill()
    sys.exit("the child hangs")
scores, threads = receive.recv()
child.join()
np.testing.assert_allclose(scores, [expected] * 2, atol=1e-5)
assert threads == 1 and torch.get_num_threads() == 2
assert scorer.score(*texts, draws=9).scores.tolist() == expected.tolist()
"""


def test_a_forked_child_scores_though_the_parent_has_used_openmp_and_holds_the_lock(folder):
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "PYTHONWARNINGS": "ignore::DeprecationWarning"}
    done = subprocess.run(
        [sys.executable, "-c", FORKED, str(folder)], capture_output=True, text=True, timeout=200, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "" and done.stderr == ""


LOADED_IN_FORK = """
import multiprocessing, sys
import torch
from diffscore_fast.backbones.loader import load_model
from diffscore_fast.engine.check import check_packing
from diffscore_fast.engine.plan import AttentionPattern
from diffscore_fast.engine.runner import Runner
torch.set_num_threads(2)
loaded = load_model("mini")  # OpenMP's threads convert its 8-bit weights
def work():
    if sys.argv[1] == "load":
        load_model("mini")
    else:
        check_packing(Runner(loaded.backbone), AttentionPattern("prefix"))
    sys.exit(0 if torch.get_num_threads() == 1 else "more than one thread")
child = multiprocessing.get_context("fork").Process(target=work)
child.start()
child.join(60)
if child.exitcode is None:
    child.kill()
    sys.exit("the child hangs")
sys.exit(child.exitcode)
"""


@pytest.mark.parametrize("work", ["load", "run"])
def test_a_forked_child_loads_a_model_and_runs_one_that_its_parent_has_loaded(work):
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "PYTHONWARNINGS": "ignore::DeprecationWarning"}
    done = subprocess.run(
        [sys.executable, "-c", LOADED_IN_FORK, work], capture_output=True, text=True, timeout=200, env=environment
    )
    assert done.returncode == 0, done.stderr


def test_a_scorer_is_pickled_as_its_arguments(scorer, folder, prefix_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder.parent)
    relative = DiffScorer("bert", token_budget=77)
    monkeypatch.chdir(tmp_path)
    stored = pickle.dumps(relative)
    assert len(stored) < 1000
    back = pickle.loads(stored)
    assert back._runner.token_budget == 77
    texts = ["a cat"], ["the cat sat"]
    assert back.score(*texts, draws=3).scores.tolist() == scorer.score(*texts, draws=3).scores.tolist()
    bounds = pickle.loads(pickle.dumps(LikelihoodBounds(prefix_folder, block_size=4)))
    assert bounds.block_size == 4
    config = ScoreConfig(direction="pmi", seed=3)
    assert pickle.loads(pickle.dumps(config)) == config


def test_a_pickled_scorer_refuses_a_model_that_has_changed(folder, tmp_path):
    moved = shutil.copytree(folder, tmp_path / "model")
    stored = pickle.dumps(DiffScorer(moved))
    config = (moved / "config.json").read_text()
    (moved / "config.json").write_text(config.replace('"num_attention_heads": 4', '"num_attention_heads": 2'))
    with pytest.raises(CheckpointError, match="than when the scorer was pickled"):
        pickle.loads(stored)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_interrupted_call_leaves_the_scorer_as_it_was(prefix_folder, error):
    scorer = DiffScorer(prefix_folder)
    texts = ["The cat sat on the mat."] * 2, ["A cat sat.", "It rained on the mat."]
    expected = scorer.score(*texts, draws=5).scores

    def interrupt(tokens):
        raise error

    fresh = ["A source that is not in the cache yet."] * 2, texts[1]
    with pytest.raises(error):
        scorer.score(*fresh, draws=5, progress=interrupt)
    assert (
        scorer.score(*fresh, draws=5).scores.tolist()
        == DiffScorer(prefix_folder).score(*fresh, draws=5).scores.tolist()
    )
    assert scorer.score(*texts, draws=5).scores.tolist() == expected.tolist()


def test_the_progress_callback_may_score(prefix_folder):
    """The inner call empties the prefix cache; the outer call must notice."""
    scorer = DiffScorer(prefix_folder, token_budget=12, cache_bytes=1)
    texts = ["The cat sat on the mat."] * 2, ["A cat sat.", "It rained on the mat."]
    expected = scorer.score(*texts, draws=3).scores
    inner = []

    def progress(tokens):
        inner.append(scorer.score(["Another source altogether, of other words."], ["It rained."], draws=1).scores[0])

    np.testing.assert_allclose(scorer.score(*texts, draws=3, progress=progress).scores, expected, atol=1e-5)
    assert len(inner) >= 2 and len(set(inner)) == 1


def test_the_progress_callback_of_bounds_may_bound():
    bounds = LikelihoodBounds("mini", block_size=4, token_budget=64)
    expected, inner = bounds.exact(["The cat sat on the mat."]).exact, []

    def progress(tokens):
        inner.append(bounds.exact(["It rained."]).exact[0])

    np.testing.assert_allclose(bounds.exact(["The cat sat on the mat."], progress=progress).exact, expected, atol=1e-5)
    assert len(inner) >= 2 and len(set(inner)) == 1


def test_scoring_prints_and_logs_nothing(folder, capfd, caplog):
    with caplog.at_level(logging.DEBUG, logger="diffscore_fast"):
        DiffScorer(folder).score(["secret words", None], ["other secret words", "x"], draws=2)
    assert capfd.readouterr() == ("", "")
    assert not caplog.records
