from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import kendalltau, spearmanr

from bench.judgement_sets import JudgedSet, agreement


def judged(statistic: str, within: bool, groups: np.ndarray, judgements: dict[str, np.ndarray]) -> JudgedSet:
    nothing = [""] * len(groups)
    return JudgedSet("set", statistic, within, nothing, nothing, [[]] * len(groups), groups, judgements)


def test_correlation_within_documents_ignores_what_differs_between_them():
    groups = np.repeat([0, 1, 2], 4)
    human = np.tile([1.0, 2.0, 3.0, 4.0], 3)
    scores = np.tile([1.0, 2.0, 4.0, 3.0], 3) - 100 * groups
    found = agreement(judged("spearman", True, groups, {"a": human, "b": -human, "c": human}), scores)
    expected = spearmanr([1, 2, 4, 3], [1, 2, 3, 4])[0] / 3
    assert (found.value, found.low, found.high) == pytest.approx((expected,) * 3)


def test_documents_without_differing_judgements_and_missing_scores_are_left_out():
    groups = np.repeat([0, 1], 4)
    human = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 5.0, 5.0, 5.0])
    scores = np.array([1.0, np.nan, 2.0, 3.0, 4.0, 3.0, 2.0, 1.0])
    assert agreement(judged("spearman", True, groups, {"a": human}), scores).value == pytest.approx(1.0)


def test_ties_and_missing_scores_of_a_pair_count_against_the_metric():
    scores = np.array([2.0, 1.0, 1.0, 1.0, np.nan, 1.0, 1.0, np.nan])
    found = agreement(judged("pairs", False, np.repeat(range(4), 2), {}), scores)
    assert found.value == 0.25
    assert found.low <= found.value <= found.high


def test_share_of_pairs_is_kendalls_tau_rescaled():
    """For pairs drawn from one ranking without ties, 2 * share - 1 is tau."""
    rng = np.random.default_rng(0)
    human, scores = rng.permutation(12), rng.random(12)
    pairs = [(i, j) for i in range(12) for j in range(12) if human[i] > human[j]]
    flat = scores[np.array(pairs).ravel()]
    share = agreement(judged("pairs", False, np.repeat(range(len(pairs)), 2), {}), flat).value
    assert 2 * share - 1 == pytest.approx(kendalltau(human, scores)[0])
