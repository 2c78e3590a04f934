"""Every estimator against the enumeration of all masks."""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import pytest

from diffscore_fast.engine.random import target_key
from diffscore_fast.engine.runner import Observation, Runner
from diffscore_fast.engine.windows import Attention, Sequences
from diffscore_fast.errors import InputError
from diffscore_fast.estimators.masks import MaskDesign
from diffscore_fast.estimators.reconstruction import MaskedReconstruction, ReconstructionConfig
from tests.support.networks import BagOfTokens

LENGTH = 5
SUBSETS = [np.array(flags, bool) for flags in itertools.product([0, 1], repeat=LENGTH)]


@cache
def table_log_probs(bits: int) -> np.ndarray:
    return -np.random.default_rng(bits).gamma(1.0, 2.0, LENGTH)


def table_log_prob(mask: np.ndarray, place: int) -> float:
    """log p(y_place | the unmasked tokens): an arbitrary, strongly mask-dependent table."""
    return float(table_log_probs(int(mask @ (1 << np.arange(LENGTH))))[place])


def mask_probability(mask: np.ndarray, ratio: float, masking: str) -> float:
    size = int(mask.sum())
    if masking == "bernoulli":
        return ratio**size * (1 - ratio) ** (LENGTH - size)
    wanted = max(1, int(np.ceil(ratio * LENGTH - 1e-9)))
    return 1 / len(list(itertools.combinations(range(LENGTH), size))) if size == wanted else 0.0


def draw_expectation(config: ReconstructionConfig, ratio: float) -> float:
    """E[contribution of a draw | t] by enumeration, from the definitions in the design."""
    total = 0.0
    for mask in SUBSETS:
        chance = mask_probability(mask, ratio, config.design.masking)
        size = int(mask.sum())
        if config.estimator == "elbo":
            weight = 1 / ratio if config.design.masking == "bernoulli" else LENGTH / max(size, 1)
            total += chance * weight * sum(table_log_prob(mask, i) for i in np.flatnonzero(mask)) / LENGTH
        elif size:
            total += chance * np.mean([table_log_prob(mask, i) for i in np.flatnonzero(mask)])
        else:
            total += chance * np.mean([table_log_prob(np.eye(LENGTH, dtype=bool)[i], i) for i in range(LENGTH)])
    return total


def exact(config: ReconstructionConfig) -> float:
    """The mean of the levels' means, weighted where the estimator says so."""
    if config.design.ratios == "grid":
        levels = [draw_expectation(config, k / 10) for k in range(1, 10)]
    else:
        # Midpoints of 20 cells a level: the integrand is a polynomial between the edges of levels and sizes.
        cells = [draw_expectation(config, (cell + 0.5) / 200) for cell in range(200)]
        levels = np.reshape(cells, (10, 20)).mean(axis=1)
    return float(np.average(levels, weights=config.level_weights))


DRAWS = {(name, ratios): 20 if ratios == "grid" or name == "weighted" else 8
         for name in ("mean_logprob", "elbo", "weighted") for ratios in ("grid", "stratified", "uniform")}  # fmt: skip
CONFIGS = [
    ReconstructionConfig(estimator, MaskDesign(DRAWS[estimator, ratios], ratios, masking),
                         tuple(range(1, 10 if ratios == "grid" else 11)) if estimator == "weighted" else None)
    for estimator in ("mean_logprob", "elbo", "weighted")
    for ratios in ("grid", "stratified", "uniform")
    for masking in ("bernoulli", "count")
    if (estimator, ratios) != ("weighted", "uniform")
]  # fmt: skip


@pytest.mark.parametrize(
    "config", CONFIGS, ids=lambda item: f"{item.estimator}-{item.design.ratios}-{item.design.masking}"
)
def test_mean_over_seeds_is_the_enumerated_expectation_and_the_standard_error_covers(config):
    trials = 3000
    target = np.arange(LENGTH, dtype=np.int32)
    sequences = Sequences.build([np.zeros(0, np.int32)], np.zeros(trials, np.int64), [target] * trials)
    keys = np.array([target_key(seed, target) for seed in range(trials)], dtype=np.uint64)
    estimator = MaskedReconstruction(config, sequences, keys)
    plan = estimator.plan([])
    masks = plan.masked.reshape(-1, LENGTH)
    table = np.array([[table_log_prob(mask, i) for i in range(LENGTH)] for mask in SUBSETS])
    index = masks @ (1 << np.arange(LENGTH)[::-1])
    observed = [Observation(plan, table[index][masks].astype(np.float32))]
    assert estimator.plan(observed) is None
    replicates = estimator.reduce(observed).replicate_scores
    scores = replicates.mean(1)
    error = scores.std(ddof=1) / np.sqrt(trials)
    assert abs(scores.mean() - exact(config)) < 4 * error
    if config.design.num_replicates > 1:
        stderr = replicates.std(axis=1, ddof=1) / np.sqrt(replicates.shape[1])
        assert np.sqrt((stderr**2).mean()) == pytest.approx(scores.std(ddof=1), rel=0.1)


def test_elbo_is_a_lower_bound_and_counts_empty_draws_as_zero():
    assert ReconstructionConfig("elbo", MaskDesign(8, "uniform")).kind == "lower bound"
    assert ReconstructionConfig("elbo", MaskDesign(20, "grid")).kind == "mean log-prob"
    assert ReconstructionConfig("elbo", MaskDesign(8, "uniform"), length_normalised=True).kind == "mean log-prob"
    design = MaskDesign(5)
    sequences = Sequences.build([np.zeros(0, np.int32)], np.zeros(1, np.int64), [np.arange(2, dtype=np.int32)])
    estimator = MaskedReconstruction(ReconstructionConfig("elbo", design), sequences, np.array([3], np.uint64))
    plan = estimator.plan([])
    sizes = plan.masked.reshape(9, 2).sum(1)
    assert (sizes == 0).any()
    result = estimator.reduce([Observation(plan, np.full(int(sizes.sum()), -1.0, np.float32))])
    ratios = np.arange(1, 10) / 10
    assert result.replicate_scores[0, 0] == pytest.approx(-(sizes / ratios).mean() / 2)
    assert np.isnan(result.profile[0][sizes == 0]).all()


def test_profile_and_token_scores_are_means_over_their_draws():
    backbone = BagOfTokens(restart_positions=True)
    target = np.array([5, 6, 7], np.int32)
    sequences = Sequences.build([np.array([9], np.int32)], np.array([0, 0]), [target, target])
    config = ReconstructionConfig("mean_logprob", MaskDesign(20))
    keys = np.array([target_key(seed, target) for seed in (0, 1)], dtype=np.uint64)
    estimator = MaskedReconstruction(config, sequences, keys)
    result = Runner(backbone).evaluate(estimator, sequences, Attention("prefix"))
    masks = estimator.plan([]).masked.reshape(2, 18, 3)
    for item in range(2):
        means, per_token = [], [[], [], []]
        for mask in masks[item]:
            seen = [2, 9, *np.where(mask, 1, target)]
            values = {i: backbone.log_prob(int(target[i]), i, seen) for i in np.flatnonzero(mask)}
            means.append(np.mean(list(values.values())))
            for i, value in values.items():
                per_token[i].append(value)
        np.testing.assert_allclose(result.profile[item], np.reshape(means, (2, 9)).mean(0), atol=1e-5)
        np.testing.assert_allclose(result.replicate_scores[item], np.reshape(means, (2, 9)).mean(1), atol=1e-5)
        expected = [np.mean(values) for values in per_token]
        np.testing.assert_allclose(result.token_log_probs[3 * item : 3 * item + 3], expected, atol=1e-5)
        assert result.token_counts[3 * item : 3 * item + 3].tolist() == [len(values) for values in per_token]


def test_the_printed_formula_divides_once_more_by_length():
    sequences = Sequences.build([np.zeros(0, np.int32)], np.zeros(1, np.int64), [np.arange(4, dtype=np.int32)])
    scores = []
    for normalised in (False, True):
        config = ReconstructionConfig("mean_logprob", MaskDesign(5), length_normalised=normalised)
        estimator = MaskedReconstruction(config, sequences, np.array([3], np.uint64))
        plan = estimator.plan([])
        values = np.linspace(-3, -1, int(plan.masked.sum()), dtype=np.float32)
        scores.append(estimator.reduce([Observation(plan, values)]).replicate_scores[0, 0])
    assert scores[1] == pytest.approx(scores[0] / 4)


@pytest.mark.parametrize(
    "options", [dict(estimator="other"), dict(estimator="weighted"), dict(level_weights=(1.0,) * 9),
                dict(estimator="weighted", level_weights=(1.0,) * 8),
                dict(estimator="weighted", level_weights=(1.0,) * 10, design=MaskDesign(5, "uniform")),
                dict(estimator="weighted", level_weights=(1.0,) * 10, design=MaskDesign(8, "stratified")),
                dict(estimator="weighted", level_weights=(0.0,) * 9),
                dict(estimator="weighted", level_weights=(-1.0,) + (1.0,) * 8)],
)  # fmt: skip
def test_impossible_configurations_are_refused(options):
    with pytest.raises(InputError):
        ReconstructionConfig(**options)
