"""Bounds in expectation, in a synthetic family where everything is known; no network."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import logsumexp

from diffscore_fast.bounds import comparators, evidence

TRIALS = 2000


def family(spread: float, outcomes: int = 24) -> np.ndarray:
    """log p(x | z) of equally likely z; the spread of a block of four tokens and its 24 orders is about 0.5."""
    return -9.0 + np.random.default_rng(1).normal(0, spread, outcomes)


def draws(spread: float, count: int) -> tuple[np.ndarray, float]:
    values = family(spread)
    log_p = np.random.default_rng(2).choice(values, (TRIALS, count))
    return log_p, float(logsumexp(values) - np.log(len(values)))


def mean_and_error(values: np.ndarray, log_p: np.ndarray, exact: float) -> tuple[float, float]:
    """Mean over trials, with mean p / p - 1, whose expectation is known to be 0, as control variate."""
    values = values - (np.exp(log_p - exact).mean(axis=1) - 1)
    return float(values.mean()), float(values.std(ddof=1) / np.sqrt(len(values)))


@pytest.mark.parametrize("surrogate", [1, 2, 12])
@pytest.mark.parametrize("orders", [1, 2, 12])
def test_the_exact_value_lies_between_the_means_beyond_monte_carlo_error(orders, surrogate):
    log_p, exact = draws(0.8, orders + surrogate)
    psi = evidence.log_mean_exp(log_p[:, :surrogate]).value
    target = log_p[:, surrogate:]
    upper, upper_error = mean_and_error(evidence.tangent_upper(target, psi).value, target, exact)
    lower, lower_error = mean_and_error(evidence.log_mean_exp(target).value, target, exact)
    assert lower + 3 * lower_error < exact < upper - 3 * upper_error
    both, error = mean_and_error(evidence.cross_fitted_upper(log_p, orders + surrogate).value, log_p, exact)
    assert exact < both - 3 * error


@pytest.mark.parametrize("half", [12, 32])
def test_cross_fitting_has_at_most_065_of_the_gap_and_variance(half):
    log_p, exact = draws(0.5, 2 * half)
    plain = evidence.tangent_upper(log_p[:, half:], evidence.log_mean_exp(log_p[:, :half]).value).value
    crossed = evidence.cross_fitted_upper(log_p, 2 * half).value
    gap = mean_and_error(crossed, log_p, exact)[0] - exact
    assert 0 < gap <= 0.65 * (mean_and_error(plain, log_p[:, half:], exact)[0] - exact)
    assert crossed.var() <= 0.65 * plain.var()


def test_cross_fitting_follows_its_definition():
    log_p = np.random.default_rng(0).normal(-300, 2, (5, 12))
    p = np.exp(log_p + 300).reshape(5, 4, 3)
    expected = np.zeros(5)
    for fold in range(4):
        psi = np.delete(p, fold, axis=1).mean(axis=(1, 2))
        expected += (np.log(psi) - 300 + p[:, fold].mean(1) / psi - 1) / 4
    np.testing.assert_allclose(evidence.cross_fitted_upper(log_p, 4).value, expected, rtol=1e-12)


@pytest.mark.parametrize("count", [16, 64])
def test_delta_method_errors_match_the_spread_over_trials_and_the_bootstrap(count):
    log_p, _ = draws(0.5, count)
    half = count // 2
    estimators = {
        "lower": evidence.log_mean_exp,
        "cross-fitted": lambda item: evidence.cross_fitted_upper(item, item.shape[1]),
        "plain": lambda item: evidence.tangent_upper(
            item[:, half:], evidence.log_mean_exp(item[:, :half]).value, item[:, :half]
        ),
    }
    generator = np.random.default_rng(3)
    for name, estimator in estimators.items():
        found = estimator(log_p)
        rms = np.sqrt((found.stderr**2).mean())
        assert rms == pytest.approx(found.value.std(ddof=1), rel=0.15), name
        if name == "lower":
            resampled = log_p[0][generator.integers(count, size=(4000, count))]
            assert found.stderr[0] == pytest.approx(estimator(resampled).value.std(), rel=0.15)


def test_pair_means_are_the_independent_draws_of_an_antithetic_design():
    values = family(0.8)
    first = np.random.default_rng(4).choice(values, (4000, 8))
    mirrored = 2 * values.mean() - first  # a strongly negative coupling
    log_p = np.stack([first, mirrored], axis=2).reshape(4000, 16)
    np.testing.assert_allclose(np.exp(evidence.pair_means(log_p)), (np.exp(first) + np.exp(mirrored)) / 2)
    found = evidence.log_mean_exp(evidence.pair_means(log_p))
    np.testing.assert_allclose(found.value, evidence.log_mean_exp(log_p).value, atol=1e-12)
    assert np.sqrt((found.stderr**2).mean()) == pytest.approx(found.value.std(ddof=1), rel=0.15)


def test_draws_that_agree_make_all_bounds_agree():
    """With one trajectory (NFE = 1), lower bound, upper bound and exact value are equal."""
    log_p = np.full((3, 8), -7.0)
    for value in (
        evidence.log_mean_exp(log_p).value,
        evidence.cross_fitted_upper(log_p, 8).value,
        evidence.tangent_upper(log_p, np.full(3, -7.0)).value,
        comparators.cubo(log_p),
        comparators.tvo_upper(log_p, np.array([0.5, 1.0])),
        comparators.is_vg_b(log_p),
    ):
        np.testing.assert_allclose(value, -7.0, rtol=1e-12)
    assert (evidence.cross_fitted_upper(log_p, 8).stderr < 1e-12).all()


def test_impossible_texts_and_single_draws():
    nothing = np.full((2, 4), -np.inf)
    assert np.isneginf(evidence.log_mean_exp(nothing).value).all()
    assert np.isposinf(evidence.cross_fitted_upper(nothing, 4).value).all()  # no tangent at 0
    single = np.full((1, 1), -3.0)
    assert np.isnan(evidence.log_mean_exp(single).stderr[0]) and evidence.log_mean_exp(single).value[0] == -3
    assert np.isnan(comparators.is_vg_b(single)[0])
    mixed = np.array([[-np.inf, -1.0, -1.0, -1.0]])
    assert np.isfinite(evidence.cross_fitted_upper(mixed, 4).value).all()


def test_scale_does_not_matter():
    """Probabilities may be far below the smallest float."""
    log_p = np.random.default_rng(0).normal(0, 1, (4, 8))
    for estimator in (
        lambda item: evidence.log_mean_exp(item).value,
        lambda item: evidence.cross_fitted_upper(item, 4).value,
        comparators.cubo,
        lambda item: comparators.tvo_upper(item, np.array([0.25, 1.0])),
        comparators.is_vg_b,
    ):
        np.testing.assert_allclose(estimator(log_p - 5000) + 5000, estimator(log_p), atol=1e-8)


def test_is_vg_b_is_the_mean_over_ordered_pairs():
    log_p = np.random.default_rng(0).normal(-40, 2, (3, 5))
    pairs = [[log_p[:, j] - log_p[:, k] for j in range(5) if j != k] for k in range(5)]
    expected = log_p.mean(1) + np.log(np.exp(np.array(pairs)).mean(axis=(0, 1)))
    np.testing.assert_allclose(comparators.is_vg_b(log_p), expected, rtol=1e-10)


def test_one_heavy_draw_shows_in_the_effective_sample_size():
    log_p = np.array([[0.0, -50, -50, -50], [0.0, 0, 0, 0]])
    np.testing.assert_allclose(evidence.effective_sample_size(log_p), [1, 4], atol=1e-12)


def test_cubo_and_tvo_against_their_exact_expectations():
    """If every outcome is drawn once, the self-normalised estimates are exact, and are upper bounds."""
    values = family(0.8)[None]
    exact = logsumexp(values) - np.log(values.shape[1])
    assert comparators.cubo(values)[0] == pytest.approx(0.5 * np.log(np.mean(np.exp(2 * values))))
    assert exact < comparators.cubo(values)[0] < comparators.cubo(values, 4.0)[0]
    fine = comparators.tvo_upper(values, np.arange(1, 2001) / 2000)[0]
    assert exact < fine < exact + 1e-3 < comparators.tvo_upper(values, np.array([0.5, 1.0]))[0]


@pytest.mark.parametrize("count", [2, 16])
def test_the_error_of_the_tangent_bound_covers_its_surrogate(count):
    generator = np.random.default_rng(0)
    log_p = generator.normal(0.0, 0.3, size=(20_000, 16 + count))
    psi = log_p[:, 16:]
    found = evidence.tangent_upper(log_p[:, :16], evidence.log_mean_exp(psi).value, psi)
    assert np.sqrt(np.mean(found.stderr**2)) == pytest.approx(found.value.std(), rel=0.15)


def test_a_surrogate_of_probability_zero_bounds_nothing():
    assert evidence.tangent_upper(np.array([[-1.0, -2.0]]), np.array([-np.inf])).value.tolist() == [np.inf]
