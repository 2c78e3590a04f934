"""Reading from left to right: the chain rule, by enumeration and by the exact likelihood."""

from __future__ import annotations

import numpy as np
import pytest

from diffscore_fast import DiffScorer, LikelihoodBounds
from diffscore_fast.bounds.autoregressive import left_to_right
from diffscore_fast.engine.runner import Runner
from tests.support.networks import BagOfTokens


@pytest.mark.parametrize("logit_shift", [0, 1])
def test_probabilities_of_all_texts_of_a_length_add_to_1_and_the_best_token_is_the_best(logit_shift):
    runner = Runner(BagOfTokens(restart_positions=False, vocab_size=5, logit_shift=logit_shift))
    every = np.stack(np.meshgrid(*[np.arange(5)] * 2, indexing="ij"), -1).reshape(-1, 2).astype(np.int32)
    found = left_to_right(runner, list(every))
    assert np.exp([reading.log_probs.sum() for reading in found]).sum() == pytest.approx(1, abs=1e-5)
    log_p = np.array([reading.log_probs for reading in found]).reshape(5, 5, 2)
    for first in range(5):
        for second in range(5):
            reading = found[5 * first + second]
            assert reading.best[0] == log_p[:, 0, 0].argmax() and reading.best_log_probs[0] == log_p[:, 0, 0].max()
            assert reading.best[1] == log_p[first, :, 1].argmax()
            assert reading.best_log_probs[1] == log_p[first, :, 1].max()


def test_the_token_after_a_text_is_the_best_of_a_longer_text():
    runner = Runner(BagOfTokens(restart_positions=False, vocab_size=5))
    short, empty = left_to_right(runner, [np.array([3, 1], np.int32), np.zeros(0, np.int32)])
    longer = left_to_right(runner, [np.array([3, 1, 2], np.int32)])[0]
    assert short.best.tolist() == longer.best[:3].tolist()
    assert short.best_log_probs.tolist() == longer.best_log_probs[:3].tolist()
    assert len(empty.log_probs) == 0 and empty.best[0] == longer.best[0]


def test_the_sum_is_the_autoregressive_likelihood(mini: DiffScorer):
    texts = ["The cat sat on the mat.", "It rained all day in Puerto Rico."]
    expected = LikelihoodBounds("mini", block_size=1).exact(texts).exact
    found = left_to_right(mini.runner, mini.tokenize(texts))
    assert [reading.log_probs.sum() for reading in found] == pytest.approx(expected.tolist(), abs=1e-4)
    for reading in found:
        assert (reading.best_log_probs[:-1] >= reading.log_probs).all()
