"""Mask designs: counts, ratios, distribution of every single draw."""

from __future__ import annotations

import numpy as np
import pytest

from diffscore_fast.errors import InputError
from diffscore_fast.estimators.masks import MaskDesign, draw_masks


def keys(count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 2**63, count).astype(np.uint64)


@pytest.mark.parametrize(
    ("draws", "made", "replicates"), [(20, 18, 2), (5, 9, 1), (10, 9, 1), (50, 45, 5), (1, 9, 1), (39, 27, 3)]
)
def test_grid_makes_the_published_number_of_draws(draws, made, replicates):
    design = MaskDesign(draws)
    assert (design.num_draws, design.num_replicates) == (made, replicates)
    ratio = draw_masks(design, keys(1), np.array([4]), fill_empty=True).ratio[0]
    np.testing.assert_allclose(ratio, np.tile(np.arange(1, 10) / 10, replicates))


@pytest.mark.parametrize("ratios", ["stratified", "uniform"])
def test_ratios_are_uniform_on_zero_to_one(ratios):
    ratio = draw_masks(MaskDesign(8, ratios), keys(4000), np.ones(4000, np.int64), fill_empty=True).ratio
    assert ratio.min() > 0 and ratio.max() <= 1
    assert abs(ratio.mean() - 0.5) < 0.01 and abs(ratio.var() - 1 / 12) < 0.002
    if ratios == "stratified":  # two replicates of four strata
        strata = np.floor(np.sort(ratio[:, :4], axis=1) * 4 - 1e-12)
        assert (strata == np.arange(4)).all()


@pytest.mark.parametrize("ratios", ["grid", "uniform"])
def test_bernoulli_masks_each_token_with_probability_t(ratios):
    design = MaskDesign(9, ratios)
    draws = draw_masks(design, keys(20_000), np.full(20_000, 3), fill_empty=False)
    masked = draws.masked.reshape(20_000, 9, 3)
    for draw in range(9):
        np.testing.assert_allclose(masked[:, draw].mean(0), draws.ratio[:, draw].mean(), atol=0.015)
    # Tokens of one draw are independent given t: at t = 0.3 both of two with 0.09.
    if ratios == "grid":
        assert abs((masked[:, 2, 0] & masked[:, 2, 1]).mean() - 0.09) < 0.01
    assert (masked.sum(2) == draws.masked_counts).all()


def test_count_masking_draws_sizes_uniformly_and_tokens_evenly():
    draws = draw_masks(MaskDesign(4, "uniform", "count"), keys(20_000), np.full(20_000, 5), fill_empty=True)
    sizes = np.bincount(draws.masked_counts.ravel(), minlength=6) / 80_000
    np.testing.assert_allclose(sizes[1:], 0.2, atol=0.01)
    np.testing.assert_allclose(draws.masked.reshape(-1, 5).mean(0), 0.6, atol=0.01)


def test_count_masking_on_the_grid_takes_the_exact_share():
    draws = draw_masks(MaskDesign(5, "grid", "count"), keys(1), np.array([10]), fill_empty=True)
    assert draws.masked_counts[0].tolist() == list(range(1, 10))


def test_an_empty_draw_masks_one_token_evenly_or_stays_empty():
    design = MaskDesign(9)
    filled = draw_masks(design, keys(20_000), np.full(20_000, 2), fill_empty=True)
    empty = draw_masks(design, keys(20_000), np.full(20_000, 2), fill_empty=False)
    assert filled.masked_counts.min() == 1 and empty.masked_counts.min() == 0
    was_empty = empty.masked_counts == 0
    chosen = filled.masked.reshape(20_000, 9, 2)[was_empty]
    assert (chosen.sum(1) == 1).all() and abs(chosen[:, 0].mean() - 0.5) < 0.01
    same = ~was_empty
    assert (filled.masked.reshape(20_000, 9, 2)[same] == empty.masked.reshape(20_000, 9, 2)[same]).all()


def test_a_target_s_draws_do_not_depend_on_its_neighbours():
    lengths, own = np.array([4, 7, 2]), keys(3)
    for design in (MaskDesign(20), MaskDesign(6, "stratified", "count")):
        together = draw_masks(design, own, lengths, fill_empty=True)
        alone = draw_masks(design, own[1:2], lengths[1:2], fill_empty=True)
        start = 4 * design.num_draws
        assert (together.masked[start : start + 7 * design.num_draws] == alone.masked).all()


@pytest.mark.parametrize(
    "options",
    [dict(draws=0), dict(levels=1), dict(ratios="other"), dict(masking="other"), dict(draws=20, replicates=5),
     dict(draws=20, replicates=0), dict(ratios="stratified", draws=6, replicates=4), dict(draws=40, replicates=36)],
)  # fmt: skip
def test_impossible_designs_are_refused(options):
    with pytest.raises(InputError):
        MaskDesign(**options)
