"""Cross-fitted controls against a dense ridge regression; they keep the expectation and reduce the variance."""

from __future__ import annotations

import numpy as np
import pytest

from diffscore_fast.engine.plan import Observation, Sequences
from diffscore_fast.scoring.config import ReconstructionConfig
from diffscore_fast.scoring.control_variates import PRIOR, RIDGES, TOKEN_RIDGE, cross_fitted_controls
from diffscore_fast.scoring.draws import MaskDraws, draw_masks
from diffscore_fast.scoring.mask_design import MaskDesign
from diffscore_fast.scoring.reconstruction import MaskedReconstruction


def draws_of(lengths: list[int], replicates: int, first_key: int = 0, **options) -> MaskDraws:
    keys = np.arange(first_key, first_key + len(lengths), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    design = MaskDesign(draws=4 * replicates, replicates=replicates, **options)
    return draw_masks(design, keys, np.array(lengths), np.full(len(lengths), replicates))


def dense_features(mask: np.ndarray) -> np.ndarray:
    """Rows (one per masked token) of |M| / L and the centred numbers of masked neighbours at distance 1 and 2."""
    length, size = len(mask), mask.sum()
    rows = []
    for place in np.flatnonzero(mask):
        row = [size / length]
        for distance in (1, 2):
            neighbours = [mask[at] for at in (place - distance, place + distance) if 0 <= at < length]
            # All pairs of places so far apart, each masked with the chance of two given tokens of a mask of this size.
            expected = 2 * max(length - distance, 0) / length * (size - 1) / max(length - 1, 1)
            row.append(sum(neighbours) - expected)
        rows.append(row)
    return np.array(rows)


@pytest.mark.parametrize("length", [1, 2, 3, 11])
def test_controls_are_a_ridge_regression_on_the_other_replicates(length):
    draws = draws_of([4, length, 7], 3)
    values = -np.random.default_rng(0).gamma(1.0, 2.0, draws.counts.sum())
    control, expectation = cross_fitted_controls(draws, values)
    entry, bit = 0, 0
    replicate, rows, tokens, observed, at = [], [], [], [], []
    for draw in range(len(draws.counts)):
        mask = draws.masked[bit : bit + draws.lengths[draw]]
        if draws.target[draw] == 1:
            places = np.flatnonzero(mask)
            replicate += [draws.replicate[draw]] * len(places)
            rows.append(dense_features(mask))
            tokens += list(places)
            at += range(entry, entry + len(places))
        entry += draws.counts[draw]
        bit += draws.lengths[draw]
    replicate, tokens, observed = np.array(replicate), np.array(tokens), values[at]  # type: ignore[assignment]
    features = np.hstack([np.ones((len(tokens), 1)), np.concatenate(rows), np.eye(length)[tokens]])
    ridge = np.diag([*RIDGES, *[TOKEN_RIDGE] * length])
    prior = ridge @ [*PRIOR, *[0.0] * length]
    for own in range(3):
        others = features[replicate != own]
        fitted = np.linalg.solve(others.T @ others + ridge, others.T @ observed[replicate != own] + prior)
        wanted = features[:, 1:] @ fitted[1:]  # the intercept is the same for all masks and is left out of h
        np.testing.assert_allclose(control[at][replicate == own], wanted[replicate == own], rtol=1e-9, atol=1e-9)
        of_own = (draws.target == 1) & (draws.replicate == own)
        mean = fitted[4:].mean() + fitted[1] * draws.mean_ratio[of_own]
        np.testing.assert_allclose(expectation[of_own], mean, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("masking", ["bernoulli", "count"])
@pytest.mark.parametrize("ratios", ["grid", "stratified"])
def test_a_control_has_the_stated_expectation(ratios, masking):
    """The mean of a fixed prediction over new masks is its stated expectation, so scores stay unbiased."""
    seeds, length = 4000, 9
    draws = draws_of([length] * seeds, 1, ratios=ratios, masking=masking)
    rng = np.random.default_rng(1)
    level, effects = rng.normal(size=length), rng.normal(size=3)
    starts = np.arange(len(draws.counts)) * length
    means = []
    for start in starts:
        mask = draws.masked[start : start + length]
        means.append((level[np.flatnonzero(mask)] + dense_features(mask) @ effects).mean())
    replicates = (draws.share * np.array(means)).reshape(seeds, -1).sum(axis=1)
    wanted = level.mean() + effects[0] * draws.mean_ratio[0]
    error = replicates.std() / np.sqrt(seeds)
    assert error < 0.02
    assert abs(replicates.mean() - wanted) < 4 * error


def scores_over_seeds(model, length: int, seeds: int, **design) -> tuple[np.ndarray, np.ndarray]:
    """Scores and standard errors of one target under many seeds; `model(mask)` gives all tokens' log-probs."""
    sequences = Sequences.build([np.zeros(0, np.int32)], np.zeros(seeds, np.int64), [np.arange(length)] * seeds)
    keys = np.random.default_rng(7).integers(0, 2**63, seeds, dtype=np.uint64)
    estimator = MaskedReconstruction(ReconstructionConfig(design=MaskDesign(**design)), sequences, keys)
    plan = estimator.plan([])
    masks = plan.masked.reshape(-1, length)
    log_probs = np.concatenate([model(mask)[mask] for mask in masks]).astype(np.float32)
    result = estimator.reduce([Observation(plan, log_probs)])
    return result.scores, result.stderr


def test_variance_falls_if_tokens_differ_and_the_standard_error_with_it():
    rng = np.random.default_rng(2)
    level = rng.normal(-4.0, 2.5, 24)

    def model(mask: np.ndarray) -> np.ndarray:
        padded = np.pad(mask, 1).astype(float)
        neighbours = padded[:-2] + padded[2:]
        return level - 2.0 * mask.mean() - 0.9 * neighbours + rng.normal(0.0, 0.8, len(mask))

    controlled, error = scores_over_seeds(model, 24, 600, draws=8)
    published, _ = scores_over_seeds(model, 24, 600, draws=20, coupling="independent")
    assert controlled.std() < published.std()  # 8 evaluations against 18
    assert abs(controlled.mean() - published.mean()) < 4 * np.hypot(controlled.std(), published.std()) / np.sqrt(600)
    assert 0.9 < np.sqrt((error**2).mean()) / controlled.std() < 1.1


def test_tokens_of_probability_zero_switch_the_controls_off():
    draws = draws_of([6, 8], 2)
    values = -np.random.default_rng(0).gamma(1.0, 2.0, draws.counts.sum())
    alone, _ = cross_fitted_controls(draws.take(np.flatnonzero(draws.target == 1)), values[draws.counts[:8].sum() :])
    values[0] = -np.inf
    control, expectation = cross_fitted_controls(draws, values)
    first = draws.counts[:8].sum()
    assert not control[:first].any() and not expectation[:8].any()
    np.testing.assert_array_equal(control[first:], alone)  # bit for bit, whatever the neighbours are
