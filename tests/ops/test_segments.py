"""log_mean_exp and evidence_bounds: closed forms, extreme log-values, the bounds in expectation over all outcomes."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diffscore_fast.ops import evidence_bounds, log_mean_exp
from tests.support.products import needs_extension

IMPLEMENTATIONS = ["reference", pytest.param("cpu", marks=needs_extension)]


def edges(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int64)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_log_mean_exp_of_plain_numbers(implementation):
    p = torch.tensor([0.5, 0.25, 0.25, 2.0, 1.0], dtype=torch.float64)
    got = log_mean_exp(p.log(), edges(3, 0, 1, 1), implementation=implementation)
    want = torch.tensor([1 / 3, math.nan, 2.0, 1.0], dtype=torch.float64).log()
    torch.testing.assert_close(got.log_mean, want, equal_nan=True)
    error = p[:3].std() / math.sqrt(3) / p[:3].mean()
    torch.testing.assert_close(got.standard_error[0], error)
    assert got.standard_error[1:].isnan().all()
    assert got.count.tolist() == [3, 0, 1, 1]
    assert got.minimum.exp().tolist() == pytest.approx([0.25, math.inf, 2.0, 1.0])
    assert got.maximum.exp().tolist() == pytest.approx([0.5, 0.0, 2.0, 1.0])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_log_mean_exp_far_outside_the_range_of_exp(implementation):
    values = torch.tensor([-5000.0, -5000.0 + math.log(3), 4000.0, -math.inf, -math.inf, -math.inf])
    got = log_mean_exp(values, edges(2, 2, 2), implementation=implementation)
    assert got.log_mean[0] == pytest.approx(-5000.0 + math.log(2), abs=1e-3)  # the values are float32
    assert got.log_mean[1] == pytest.approx(4000.0 - math.log(2))
    assert got.log_mean[2] == -math.inf
    assert got.standard_error[2].isnan()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_nan_is_both_extremes_of_its_segment(implementation, place):
    check_nan_in_a_segment(implementation, place)


def check_nan_in_a_segment(implementation: str, place: int) -> None:
    values = torch.tensor([1.0, 2.0, 3.0, 4.0])
    values[place] = math.nan
    got = log_mean_exp(values, edges(3, 1), implementation=implementation)
    for column in (got.log_mean, got.standard_error, got.minimum, got.maximum):
        assert column[0].isnan()
    assert got.minimum[1] == got.maximum[1] == 4.0


@needs_extension
@settings(max_examples=80, deadline=None)
@given(st.lists(st.lists(st.floats(-800, 800) | st.just(-math.inf), max_size=7), min_size=1, max_size=6))
def test_implementations_agree_on_any_segments(segments):
    values = torch.tensor([value for segment in segments for value in segment], dtype=torch.float64)
    cpu, reference = (
        log_mean_exp(values, edges(*map(len, segments)), implementation=name) for name in ("cpu", "reference")
    )
    for name in ("log_mean", "standard_error", "minimum", "maximum", "count"):
        torch.testing.assert_close(getattr(cpu, name), getattr(reference, name), equal_nan=True, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_million_segments(implementation):
    segments = torch.arange(0, 2_000_001, 2)
    got = log_mean_exp(torch.zeros(2_000_000, dtype=torch.float64), segments, implementation=implementation)
    assert got.log_mean.shape == (1_000_000,)
    assert (got.log_mean == 0).all()
    assert (got.standard_error == 0).all()


def test_segments_that_do_not_cover_the_values_are_refused():
    for wrong in ([0, 2], [1, 3], [0, 2, 1, 3]):
        with pytest.raises(ValueError, match="segments must rise from 0 to 3"):
            log_mean_exp(torch.zeros(3), torch.tensor(wrong))


def test_complex_values_are_refused():
    for operation in (
        lambda values: log_mean_exp(values, edges(4)),
        lambda values: evidence_bounds(values, 2, edges(4)),
    ):
        with pytest.raises(TypeError, match="must be of real numbers; got torch.complex64"):
            operation(torch.zeros(4, dtype=torch.complex64))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("folds", [2, 3])
def test_bounds_hold_in_expectation_over_every_outcome(implementation, folds):
    """A latent of three values, all 3^n equally likely outcomes enumerated: E lower <= log p <= E upper."""
    p, draws = np.array([0.7, 0.2, 0.003]), folds
    outcomes = np.log(p[np.array(list(product(range(3), repeat=draws)))])
    segments = torch.arange(0, outcomes.size + 1, draws)
    got = evidence_bounds(torch.from_numpy(outcomes.ravel()), folds, segments, implementation=implementation)
    exact = math.log(p.mean())
    assert got.lower.mean() < exact < got.upper.mean()
    # Cross-fitting averages exchangeable terms, so its expectation is that of the plain split.
    assert got.upper.mean() == pytest.approx(float(got.upper_plain.mean()))
    psi = np.array([np.mean(item) for item in product(p, repeat=draws - 1)])
    assert got.upper.mean() == pytest.approx(np.mean(np.log(psi) + p.mean() / psi - 1))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_equal_draws_close_the_gap(implementation):
    got = evidence_bounds(torch.full((12,), -1000.0), 3, edges(6, 3, 3), implementation=implementation)
    for bound in (got.lower, got.upper, got.upper_plain):
        torch.testing.assert_close(bound, torch.full((3,), -1000.0, dtype=torch.float64))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_dominating_fold_leaves_the_others_their_digits(implementation):
    got = evidence_bounds(torch.tensor([0.0, -900.0, -901.0]), 3, edges(3), implementation=implementation)
    assert got.upper_plain[0] == math.inf  # e^900: the tangent is too steep for a float64
    got = evidence_bounds(torch.tensor([-900.0, -901.0, 0.0]), 3, edges(3), implementation=implementation)
    assert got.upper_plain[0] == pytest.approx(math.log(0.5) - 1.0)
    assert got.lower[0] == pytest.approx(-math.log(3))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_impossible_blocks(implementation):
    values = torch.tensor([-math.inf, -math.inf, -math.inf, 0.0])
    got = evidence_bounds(values, 2, edges(2, 2), implementation=implementation)
    assert got.lower[0] == -math.inf
    assert got.upper[0] == math.inf
    assert got.lower[1] == pytest.approx(-math.log(2))
    assert got.upper_plain[1] == pytest.approx(-1.0)  # p_hat = 0 against psi = 1
    assert got.upper[1] == math.inf


def test_folds_must_divide_the_draws():
    for folds in (1, 2):
        with pytest.raises(ValueError, match="block 1 has 3 draws|block 0 has 2 draws"):
            evidence_bounds(torch.zeros(5), folds, edges(2, 3))


@needs_extension
@settings(max_examples=60, deadline=None)
@given(st.integers(2, 4), st.data())
def test_bounds_of_both_implementations_agree(folds, data):
    each = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    count = sum(each) * folds
    values = data.draw(st.lists(st.floats(-300, 300) | st.just(-math.inf), min_size=count, max_size=count))
    arguments = torch.tensor(values, dtype=torch.float64), folds, edges(*(item * folds for item in each))
    cpu, reference = (evidence_bounds(*arguments, implementation=name) for name in ("cpu", "reference"))
    for name in ("lower", "upper_plain", "upper"):
        torch.testing.assert_close(getattr(cpu, name), getattr(reference, name), rtol=1e-9, atol=1e-9)


@needs_extension
def test_registration_passes_opcheck():
    values = torch.randn(6, dtype=torch.float64)
    torch.library.opcheck(torch.ops.diffscore_fast.log_mean_exp.default, (values, edges(4, 2)))
    torch.library.opcheck(torch.ops.diffscore_fast.evidence_bounds.default, (values, 2, edges(4, 2)))
