"""The mask design: numbers of draws, ratios, and the distribution of every single draw."""

from __future__ import annotations

import numpy as np
import pytest

from diffscore_fast.engine.ragged import offsets_of
from diffscore_fast.errors import InputError
from diffscore_fast.scoring.corrected import pick_draws
from diffscore_fast.scoring.draws import MaskDraws, draw_masks, mask_ratios
from diffscore_fast.scoring.mask_design import MaskDesign
from diffscore_fast.scoring.sizes import size_table


def keys(count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 2**63, count).astype(np.uint64)


def draw(design: MaskDesign, count: int, length: int, *, elbo: bool = False) -> MaskDraws:
    lengths = np.full(count, length)
    return draw_masks(design, keys(count), lengths, np.full(count, design.num_replicates), elbo=elbo)


def ratios_of(design: MaskDesign, count: int) -> np.ndarray:
    draws = np.tile(np.arange(design.num_draws), count)
    return mask_ratios(design, np.repeat(keys(count), design.num_draws), draws)[0].reshape(count, -1)


@pytest.mark.parametrize(
    ("draws", "made", "replicates"), [(20, 18, 2), (5, 9, 1), (10, 9, 1), (50, 45, 5), (1, 9, 1), (39, 27, 3)]
)
def test_an_independent_grid_makes_the_published_number_of_draws(draws, made, replicates):
    design = MaskDesign(draws, coupling="independent")
    assert (design.num_draws, design.num_replicates) == (made, replicates)
    np.testing.assert_allclose(ratios_of(design, 1)[0], np.tile(np.arange(1, 10) / 10, replicates))


@pytest.mark.parametrize("ratios", ["stratified", "uniform"])
def test_ratios_are_uniform_on_zero_to_one(ratios):
    ratio = ratios_of(MaskDesign(8, ratios, coupling="independent"), 4000)
    assert ratio.min() > 0 and ratio.max() <= 1
    assert abs(ratio.mean() - 0.5) < 0.01 and abs(ratio.var() - 1 / 12) < 0.002
    if ratios == "stratified":  # two replicates of four strata
        strata = np.floor(np.sort(ratio[:, :4], axis=1) * 4 - 1e-12)
        assert (strata == np.arange(4)).all()


@pytest.mark.parametrize("ratios", ["grid", "uniform"])
def test_bernoulli_masks_each_token_with_probability_t(ratios):
    design = MaskDesign(9, ratios, coupling="independent")
    draws = draw(design, 20_000, 3, elbo=True)
    masked, ratio = draws.masked.reshape(20_000, 9, 3), ratios_of(design, 20_000)
    for number in range(9):
        np.testing.assert_allclose(masked[:, number].mean(0), ratio[:, number].mean(), atol=0.015)
    # Tokens of one draw are independent given t: at t = 0.3 both of two with 0.09.
    if ratios == "grid":
        assert abs((masked[:, 2, 0] & masked[:, 2, 1]).mean() - 0.09) < 0.01
    assert (masked.sum(2).ravel() == draws.counts).all()


def test_count_masking_draws_sizes_and_tokens_uniformly():
    draws = draw(MaskDesign(4, "uniform", "count"), 20_000, 5)
    sizes = np.bincount(draws.counts, minlength=6) / 80_000
    np.testing.assert_allclose(sizes[1:], 0.2, atol=0.01)
    np.testing.assert_allclose(draws.masked.reshape(-1, 5).mean(0), 0.6, atol=0.01)


def test_count_masking_on_the_grid_takes_the_exact_share():
    draws = draw(MaskDesign(5, "grid", "count", coupling="independent"), 1, 10)
    assert draws.counts.tolist() == list(range(1, 10))


def test_an_empty_draw_masks_one_uniform_token_or_stays_empty():
    design = MaskDesign(9, coupling="independent")
    filled, empty = draw(design, 20_000, 2), draw(design, 20_000, 2, elbo=True)
    assert filled.counts.min() == 1 and empty.counts.min() == 0
    was_empty = empty.counts == 0
    chosen = filled.masked.reshape(-1, 2)[was_empty]
    assert (chosen.sum(1) == 1).all() and abs(chosen[:, 0].mean() - 0.5) < 0.01
    assert (filled.masked.reshape(-1, 2)[~was_empty] == empty.masked.reshape(-1, 2)[~was_empty]).all()


@pytest.mark.parametrize("masking", ["bernoulli", "count"])
@pytest.mark.parametrize("ratios", ["grid", "stratified"])
def test_balanced_masks_have_the_sizes_of_the_design_and_any_tokens(ratios, masking):
    """Against masks drawn directly from the definition; draws are weighted by their share."""
    length, trials = 5, 10_000
    draws = draw(MaskDesign(4, ratios, masking), trials, length)
    generator = np.random.default_rng(1)
    ratio = generator.integers(1, 10, 200_000) / 10 if ratios == "grid" else 1 - generator.random(200_000)
    sizes = generator.binomial(length, ratio) if masking == "bernoulli" else np.ceil(ratio * length - 1e-9)
    expected = np.bincount(np.maximum(sizes, 1).astype(int), minlength=length + 1) / 200_000
    found = np.bincount(draws.counts, weights=draws.share, minlength=length + 1) / draws.share.sum()
    np.testing.assert_allclose(found, expected, atol=0.015)
    masks = draws.masked.reshape(-1, length)
    for size in range(1, length + 1):  # every draw of a size: tokens, and pairs of tokens, are equally likely
        own = masks[draws.counts == size].astype(float)
        if len(own) < 1000:
            continue
        together = own.T @ own / len(own)
        np.testing.assert_allclose(np.diag(together), size / length, atol=0.06)
        np.testing.assert_allclose(together[0, 1:], size * (size - 1) / length / (length - 1), atol=0.06)


def test_balanced_masks_give_tokens_nearly_equal_weight():
    """A token's weight in a score varies less than a quarter as much as with independent draws."""
    spreads = {}
    for coupling in ("balanced", "independent"):
        design = MaskDesign(9, coupling=coupling, replicates=1)
        draws = draw(design, 500, 24)
        weight = np.repeat(draws.share / draws.counts, 24) * draws.masked
        spreads[coupling] = weight.reshape(500, -1, 24).sum(axis=1).std(axis=1).mean()
    assert spreads["balanced"] < spreads["independent"] / 4


def test_size_tables_are_distributions():
    for design in (MaskDesign(8), MaskDesign(8, "stratified"), MaskDesign(8, "grid", "count")):
        for length, elbo in ((1, False), (7, True), (2000, False), (2000, True)):
            table = size_table(design, length, elbo=elbo, level_weights=None)
            assert table.score.sum() == pytest.approx(1, abs=1e-9) and (table.score >= 0).all()
            if not elbo:
                np.testing.assert_allclose(table.levels.sum(axis=1), 1, atol=1e-9)


@pytest.mark.parametrize("elbo", [False, True])
@pytest.mark.parametrize(("field", "value"), [("ratios", "cosine"), ("masking", "spans")])
def test_a_design_without_a_table_of_mask_sizes_is_refused(field, value, elbo):
    design = MaskDesign(8, "stratified")
    object.__setattr__(design, field, value)  # as a new name in options.py would get there
    with pytest.raises(NotImplementedError, match=value):
        size_table(design, 5, elbo=elbo, level_weights=None)


@pytest.mark.parametrize(("field", "value"), [("ratios", "cosine"), ("masking", "spans")])
def test_unknown_masks_are_not_drawn(field, value):
    design = MaskDesign(8, "uniform")
    object.__setattr__(design, field, value)
    with pytest.raises(NotImplementedError, match=value):
        draw(design, 1, 5)


def test_picked_draws_represent_their_share():
    for design in (MaskDesign(8, replicates=1), MaskDesign(5, coupling="independent")):
        draws = draw(design, 8000, 3)
        factor = pick_draws(design, keys(8000), draws, np.full(8000, 3)).reshape(8000, -1)
        shares = draws.share.reshape(8000, -1)
        np.testing.assert_allclose(factor.mean(axis=0), 1, atol=0.1)
        picks = factor * shares * 3
        np.testing.assert_allclose(picks.sum(axis=1), 3, atol=1e-9)
        if not design.balanced:  # equal shares: every subset of three is as likely
            assert (np.isclose(picks, 0) | np.isclose(picks, 1)).all()
            together = (picks.T @ picks / 8000)[np.triu_indices(9, 1)]
            np.testing.assert_allclose(together, 3 * 2 / 9 / 8, atol=0.015)


def test_draws_of_a_target_do_not_depend_on_its_neighbours():
    lengths, own = np.array([4, 7, 2]), keys(3)
    for design in (MaskDesign(20, coupling="independent"), MaskDesign(6, "stratified", "count"), MaskDesign(8)):
        replicates = np.array([3, 2, 1])
        together = draw_masks(design, own, lengths, replicates, first=2)
        alone = draw_masks(design, own[1:2], lengths[1:2], replicates[1:2], first=2)
        chosen = together.take(np.flatnonzero(together.target == 1))
        for name in ("masked", "counts", "share", "weight", "level_weights", "number"):
            assert (getattr(chosen, name) == getattr(alone, name)).all()
        # Later replicates are those that a longer run would have had there.
        longer = draw_masks(design, own[1:2], lengths[1:2], np.array([4]))
        assert (longer.masked[offsets_of(longer.lengths)[2 * design.draws_per_replicate] :] == alone.masked).all()


@pytest.mark.parametrize(
    "options",
    [
        dict(draws=0),
        dict(levels=1),
        dict(ratios="other"),
        dict(masking="other"),
        dict(draws=20, replicates=5, coupling="independent"),
        dict(draws=20, replicates=0),
        dict(ratios="stratified", draws=6, replicates=4),
        dict(draws=40, replicates=36, coupling="independent"),
        dict(ratios="uniform", coupling="balanced"),
        dict(coupling="other"),
    ],
)
def test_impossible_designs_are_refused(options):
    with pytest.raises(InputError):
        MaskDesign(**options)
