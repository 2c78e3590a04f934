"""Every estimator against the enumeration of all masks."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from diffscore_fast.engine.plan import AttentionPattern, Observation, Sequences
from diffscore_fast.engine.random import target_key
from diffscore_fast.engine.runner import Runner
from diffscore_fast.errors import InputError
from diffscore_fast.scoring import reconstruction
from diffscore_fast.scoring.config import ReconstructionConfig
from diffscore_fast.scoring.mask_design import MaskDesign
from diffscore_fast.scoring.profile import level_means
from diffscore_fast.scoring.reconstruction import MaskedReconstruction
from tests.support.networks import BagOfTokens, RotaryDecoder

LENGTH = 6  # 63 masks: more than the draws below, so that they are sampled


@cache
def subsets(length: int) -> list[np.ndarray]:
    return [np.array(flags, bool) for flags in itertools.product([0, 1], repeat=length)]


@cache
def table_log_probs(bits: int) -> np.ndarray:
    return -np.random.default_rng(bits).gamma(1.0, 2.0, 9)


def table_log_prob(mask: np.ndarray, place: int) -> float:
    """log p(y_place | the unmasked tokens): an arbitrary, strongly mask-dependent table."""
    return float(table_log_probs(int(mask @ (1 << np.arange(len(mask)))))[place])


def mask_probability(mask: np.ndarray, ratio: float, masking: str) -> float:
    size = int(mask.sum())
    if masking == "bernoulli":
        return ratio**size * (1 - ratio) ** (LENGTH - size)
    wanted = max(1, int(np.ceil(ratio * LENGTH - 1e-9)))
    return 1 / math.comb(LENGTH, size) if size == wanted else 0.0


@cache
def table_sum(mask: tuple[bool, ...]) -> float:
    """Log-probs of the masked tokens, summed."""
    return sum(table_log_prob(np.array(mask), i) for i in np.flatnonzero(mask))


def draw_expectation(elbo: bool, masking: str, ratio: float) -> float:
    """E[contribution of a draw | t] by enumeration, from the definitions in the design."""
    total = 0.0
    for mask in subsets(LENGTH):
        chance = mask_probability(mask, ratio, masking)
        size = int(mask.sum())
        if elbo:
            weight = 1 / ratio if masking == "bernoulli" else LENGTH / max(size, 1)
            total += chance * weight * table_sum(tuple(mask)) / LENGTH
        elif size:
            total += chance * table_sum(tuple(mask)) / size
        else:
            total += chance * float(np.mean([table_sum(tuple(single)) for single in np.eye(LENGTH, dtype=bool)]))
    return total


@cache
def level_expectations(elbo: bool, ratios: str, masking: str) -> np.ndarray:
    if ratios == "grid":
        return np.array([draw_expectation(elbo, masking, k / 10) for k in range(1, 10)])
    # Gauss points of 6 cells a level: the integrand is a polynomial between the edges of levels and sizes.
    places, weights = np.polynomial.legendre.leggauss(4)
    cells = [
        weights @ [draw_expectation(elbo, masking, (cell + 0.5 + place / 2) / 60) for place in places] / 2
        for cell in range(60)
    ]
    return np.reshape(cells, (10, 6)).mean(axis=1)


def exact(config: ReconstructionConfig) -> float:
    """The mean of the levels' means, weighted where the estimator says so."""
    levels = level_expectations(config.estimator == "elbo", config.design.ratios, config.design.masking)
    return float(np.average(levels, weights=config.level_weights))


def levels_of(estimator: str, ratios: str) -> tuple[float, ...] | None:
    return tuple(range(1, 10 if ratios == "grid" else 11)) if estimator == "weighted" else None


CONFIGS = [
    ReconstructionConfig(
        estimator,
        MaskDesign(draws, ratios, masking, coupling=coupling, replicates=replicates),
        levels_of(estimator, ratios),
    )
    for estimator in ("mean_logprob", "elbo", "weighted")
    for masking in ("bernoulli", "count")
    for ratios, coupling, draws, replicates in (
        ("grid", "independent", 20, None),
        ("stratified", "independent", 20, None),
        ("uniform", "independent", 8, None),
        ("grid", "balanced", 8, None),
        ("grid", "balanced", 5, None),
        ("stratified", "balanced", 6, 3),
    )
    if (estimator, ratios) != ("weighted", "uniform")
]


def evaluate(config: ReconstructionConfig, trials: int, length: int = LENGTH):
    """One target under many seeds, read from the table."""
    target = np.arange(length, dtype=np.int32)
    sequences = Sequences.build([np.zeros(0, np.int32)], np.zeros(trials, np.int64), [target] * trials)
    keys = np.array([target_key(seed, target) for seed in range(trials)], dtype=np.uint64)
    estimator = MaskedReconstruction(config, sequences, keys)
    plans, observed = [], []
    while (plan := estimator.plan(observed)) is not None:
        masks = plan.masked.reshape(-1, length)
        table = np.array([[table_log_prob(mask, i) for i in range(length)] for mask in subsets(length)])
        index = masks @ (1 << np.arange(length)[::-1])
        observed.append(Observation(plan, table[index][masks].astype(np.float32)))
        plans.append(masks)
    return estimator.reduce(observed), plans


@pytest.mark.parametrize(
    "config",
    CONFIGS,
    ids=lambda item: "-".join(
        [item.estimator, item.design.ratios, item.design.masking, item.design.coupling, str(item.design.draws)]
    ),
)
def test_mean_over_seeds_is_the_enumerated_expectation_and_the_standard_error_covers(config):
    trials = 2000
    result, _ = evaluate(config, trials)
    error = result.scores.std(ddof=1) / np.sqrt(trials)
    assert abs(result.scores.mean() - exact(config)) < 4 * error
    assert (result.num_draws == config.design.num_draws).all()
    if config.design.num_replicates > 1:
        assert np.sqrt((result.stderr**2).mean()) == pytest.approx(result.scores.std(ddof=1), rel=0.1)
    else:
        assert np.isnan(result.stderr).all()


@pytest.mark.parametrize("masking", ["bernoulli", "count"])
@pytest.mark.parametrize("ratios", ["grid", "stratified"])
@pytest.mark.parametrize("estimator", ["mean_logprob", "elbo", "weighted"])
def test_few_masks_are_all_scored_with_their_exact_weights(estimator, ratios, masking):
    design = MaskDesign(
        63 if ratios == "stratified" else 80,
        ratios,
        masking,
        coupling="balanced" if ratios == "stratified" else "independent",
    )
    config = ReconstructionConfig(estimator, design, levels_of(estimator, ratios))
    result, (masks,) = evaluate(config, 2)
    assert result.scores == pytest.approx([exact(config)] * 2, abs=1e-6)
    assert result.stderr.tolist() == [0.0, 0.0]
    # A grid of counts has no mask of every size.
    assert len(np.unique(masks[: len(masks) // 2], axis=0)) == result.num_draws[0] == len(masks) // 2
    if estimator == "mean_logprob":
        np.testing.assert_allclose(result.profile[0], level_expectations(False, ratios, masking), atol=1e-6)
        for token in range(LENGTH):
            held = [mask for mask in subsets(LENGTH) if mask[token]]
            chances = [sum(mask_probability(mask, k / 10, masking) for k in range(1, 10)) for mask in held]
            if ratios == "grid" and masking == "count":  # no mask is filled in
                expected = np.average([table_log_prob(mask, token) for mask in held], weights=chances)
                assert result.token_log_probs[token] == pytest.approx(expected, abs=1e-6)


def test_elbo_is_a_lower_bound_and_counts_empty_draws_as_zero():
    assert ReconstructionConfig("elbo", MaskDesign(8, "uniform")).kind == "lower bound"
    assert ReconstructionConfig("elbo", MaskDesign(20, "grid")).kind == "mean log-prob"
    assert ReconstructionConfig("elbo", MaskDesign(8, "uniform"), length_normalised=True).kind == "mean log-prob"
    design = MaskDesign(5, coupling="independent")
    sequences = Sequences.build([np.zeros(0, np.int32)], np.zeros(1, np.int64), [np.arange(4, dtype=np.int32)])
    estimator = MaskedReconstruction(ReconstructionConfig("elbo", design), sequences, np.array([3], np.uint64))
    plan = estimator.plan([])
    sizes = plan.masked.reshape(9, 4).sum(1)
    assert (sizes == 0).any()
    result = estimator.reduce([Observation(plan, np.full(int(sizes.sum()), -1.0, np.float32))])
    ratios = np.arange(1, 10) / 10
    assert result.scores[0] == pytest.approx(-(sizes / ratios).mean() / 4)
    assert np.isnan(result.profile[0][sizes == 0]).all()


def test_profile_and_token_scores_are_means_over_their_draws():
    backbone = BagOfTokens(restart_positions=True)
    target = np.array([5, 6, 7, 8, 5], np.int32)
    sequences = Sequences.build([np.array([9], np.int32)], np.array([0, 0]), [target, target])
    config = ReconstructionConfig("mean_logprob", MaskDesign(20, coupling="independent"))
    keys = np.array([target_key(seed, target) for seed in (0, 1)], dtype=np.uint64)
    estimator = MaskedReconstruction(config, sequences, keys)
    result = Runner(backbone).evaluate(estimator, sequences, AttentionPattern("prefix"))
    masks = estimator.plan([]).masked.reshape(2, 18, 5)
    for item in range(2):
        means, per_token = [], [[] for _ in target]
        for mask in masks[item]:
            seen = [2, 9, *np.where(mask, 1, target)]
            values = {i: backbone.log_prob(int(target[i]), i, seen) for i in np.flatnonzero(mask)}
            means.append(np.mean(list(values.values())))
            for i, value in values.items():
                per_token[i].append(value)
        np.testing.assert_allclose(result.profile[item], np.reshape(means, (2, 9)).mean(0), atol=1e-5)
        replicates = np.reshape(means, (2, 9)).mean(1)
        assert result.scores[item] == pytest.approx(replicates.mean(), abs=1e-5)
        assert result.stderr[item] == pytest.approx(abs(replicates[0] - replicates[1]) / 2, abs=1e-5)
        expected = [np.mean(values) for values in per_token]
        np.testing.assert_allclose(result.token_log_probs[5 * item : 5 * item + 5], expected, atol=1e-5)
        assert result.token_counts[5 * item : 5 * item + 5].tolist() == [len(values) for values in per_token]


def test_the_printed_formula_divides_once_more_by_length():
    sequences = Sequences.build([np.zeros(0, np.int32)], np.zeros(1, np.int64), [np.arange(4, dtype=np.int32)])
    scores = []
    for normalised in (False, True):
        config = ReconstructionConfig("mean_logprob", MaskDesign(5), length_normalised=normalised)
        estimator = MaskedReconstruction(config, sequences, np.array([3], np.uint64))
        plan = estimator.plan([])
        values = np.linspace(-3, -1, int(plan.masked.sum()), dtype=np.float32)
        scores.append(estimator.reduce([Observation(plan, values)]).scores[0])
    assert scores[1] == pytest.approx(scores[0] / 4)


@pytest.mark.parametrize(
    "options",
    [
        dict(estimator="other"),
        dict(estimator="weighted"),
        dict(level_weights=(1.0,) * 9),
        dict(estimator="weighted", level_weights=(1.0,) * 8),
        dict(estimator="weighted", level_weights=(1.0,) * 10, design=MaskDesign(5, "uniform")),
        dict(
            estimator="weighted", level_weights=(1.0,) * 10, design=MaskDesign(8, "stratified", coupling="independent")
        ),
        dict(estimator="weighted", level_weights=(0.0,) * 9),
        dict(estimator="weighted", level_weights=(-1.0,) + (1.0,) * 8),
        dict(target_stderr=0.0),
        dict(target_stderr=float("nan")),
        dict(target_stderr=0.1, max_draws=7),
        dict(full_draws=1),
        dict(full_draws=3),
        dict(full_draws=10),
    ],
)
def test_impossible_configurations_are_refused(options):
    with pytest.raises(InputError):
        ReconstructionConfig(**options)


def test_a_target_error_is_met_by_draws_that_the_pilot_did_not_see():
    """Below the largest number of draws, the root mean square error over seeds is the target, and there is no bias."""
    config = ReconstructionConfig("mean_logprob", MaskDesign(8), target_stderr=0.2, max_draws=400)
    result, (pilot, masks) = evaluate(config, 500, length=9)
    assert len(pilot) == 500 * 20 and len(masks) == result.num_draws.sum() and (result.num_draws % 4 == 0).all()
    assert 8 <= result.num_draws.min() < result.num_draws.mean() < 200
    assert result.scores.std(ddof=1) == pytest.approx(0.2, rel=0.15)
    many = evaluate(ReconstructionConfig("mean_logprob", MaskDesign(40)), 500, length=9)[0].scores
    error = np.sqrt((result.scores.var(ddof=1) + many.var(ddof=1)) / 500)
    assert abs(result.scores.mean() - many.mean()) < 4 * error


def test_a_row_that_may_have_all_masks_for_its_target_error_gets_them():
    config = ReconstructionConfig("mean_logprob", MaskDesign(8), target_stderr=1e-6, max_draws=64)
    result, (pilot, masks) = evaluate(config, 1)
    assert result.num_draws.tolist() == [63] and result.stderr[0] == 0 and len(masks) == 63
    assert result.scores[0] == pytest.approx(exact(config), abs=1e-6)


def test_the_number_of_masks_of_a_long_target_does_not_overflow():
    """2^1100 is beyond float64; warnings are errors here."""
    sequences = Sequences.build([np.zeros(0, np.int32)], np.zeros(1, np.int64), [np.full(1100, 5, np.int32)])
    plan = MaskedReconstruction(ReconstructionConfig(), sequences, np.zeros(1, np.uint64)).plan([])
    assert plan is not None and len(plan.sequence) == 8


CORRECTED = {
    "balanced, J = 2": (MaskDesign(8), 2),
    "balanced, J = 6": (MaskDesign(8), 6),
    "balanced, one replicate": (MaskDesign(5, replicates=1), 3),
    "published grid": (MaskDesign(5, coupling="independent"), 4),
    "J by a pilot": (MaskDesign(8), "auto"),
}


@pytest.mark.parametrize(("design", "full_draws"), CORRECTED.values(), ids=CORRECTED)
@pytest.mark.parametrize("estimator", ["mean_logprob", "elbo"])
def test_corrected_has_the_expectation_of_full(design, full_draws, estimator):
    backbone, trials = RotaryDecoder(), 400
    target = np.array([5, 6, 7, 8, 5], np.int32)
    sequences = Sequences.build([np.array([9, 11, 4], np.int32)], np.zeros(trials, np.int64), [target] * trials)
    keys = np.array([target_key(seed, target) for seed in range(trials)], dtype=np.uint64)
    enumerating = MaskedReconstruction(ReconstructionConfig(estimator, replace(design, draws=40)), sequences, keys)
    expected = {
        name: Runner(backbone).evaluate(enumerating, sequences, AttentionPattern(name)).scores[0]
        for name in ("full", "prefix")
    }
    config = ReconstructionConfig(estimator, design, full_draws=full_draws)
    estimator = MaskedReconstruction(config, sequences, keys)
    result = Runner(backbone).evaluate(estimator, sequences, AttentionPattern("prefix"))
    error = result.scores.std(ddof=1) / np.sqrt(trials)
    assert abs(result.scores.mean() - expected["full"]) < 4 * error
    assert abs(expected["prefix"] - expected["full"]) > 4 * error
    assert (result.full_draws == full_draws).all() or full_draws == "auto"
    assert (result.full_draws >= 2).all() and (result.full_draws <= design.num_draws).all()
    if design.num_replicates > 1:
        assert np.sqrt((result.stderr**2).mean()) == pytest.approx(result.scores.std(ddof=1), rel=0.15)


def test_correcting_every_draw_gives_the_full_score_and_enumerates_under_full():
    backbone = RotaryDecoder()
    target = np.array([5, 6, 7, 8, 5], np.int32)
    sequences = Sequences.build([np.array([9, 11, 4], np.int32)], np.zeros(2, np.int64), [target, target[:2]])
    keys = np.array([3, 4], np.uint64)
    for design in (MaskDesign(18, coupling="independent"), MaskDesign(18, "uniform")):
        results = []
        for pattern, full_draws in (("prefix", design.num_draws), ("full", None)):
            estimator = MaskedReconstruction(
                ReconstructionConfig("elbo", design, full_draws=full_draws), sequences, keys
            )
            results.append(Runner(backbone).evaluate(estimator, sequences, AttentionPattern(pattern)))
        for name in ("scores", "profile", "token_log_probs"):
            first, second = (getattr(item, name) for item in results)
            np.testing.assert_allclose(first, second, atol=1e-6)
        assert results[0].stderr[1] == 0 and results[0].full_draws.tolist() == [design.num_draws, 0]


@pytest.mark.parametrize(
    ("ratios", "masking", "estimator", "draws", "replicates"),
    [
        ("grid", "bernoulli", "mean_logprob", 8, None),
        ("stratified", "bernoulli", "mean_logprob", 8, None),
        ("grid", "bernoulli", "mean_logprob", 6, 3),
        ("stratified", "count", "mean_logprob", 8, None),
        ("stratified", "bernoulli", "elbo", 8, None),
        ("grid", "bernoulli", "weighted", 8, None),
    ],
)
def test_a_balanced_profile_has_no_bias_at_any_level(monkeypatch, ratios, masking, estimator, draws, replicates):
    """And it varies little more than the mean over realised weights, whose bias at t = 0.95 was -0.1 nats."""
    trials = 4000
    config = ReconstructionConfig(
        estimator, MaskDesign(draws, ratios, masking, replicates=replicates), levels_of(estimator, ratios)
    )
    profile = evaluate(config, trials)[0].profile
    expected = level_expectations(False, ratios, masking)
    if estimator == "elbo":  # empty draws are no part of a level
        expected = evaluate(replace(config, design=replace(config.design, draws=64)), 1)[0].profile[0]
    error = profile.std(axis=0, ddof=1) / np.sqrt(trials)
    assert (np.abs(profile.mean(axis=0) - expected) < 4 * error).all()
    monkeypatch.setattr(
        reconstruction, "draw_profile", lambda design, draws, means, *others: level_means(draws, means, trials)
    )
    realised = evaluate(config, trials)[0].profile
    assert np.isfinite(profile).all()
    if masking == "bernoulli":  # with counts, the other is NaN where a level got no draw
        assert (profile.std(axis=0) < 1.6 * np.nanstd(realised, axis=0)).all()


def test_a_level_of_one_size_is_the_mean_of_its_draws():
    """On a grid of counts a level has one size: the mean has no bias, and a level without a draw is NaN."""
    profile = evaluate(ReconstructionConfig(design=MaskDesign(8, masking="count")), 4000)[0].profile
    made = np.isfinite(profile).sum(axis=0)
    error = np.nanstd(profile, axis=0, ddof=1) / np.sqrt(made)
    expected = level_expectations(False, "grid", "count")
    assert (np.abs(np.nanmean(profile, axis=0) - expected) < 4 * error + 1e-6).all() and made.min() < 4000


def test_corrected_profiles_have_no_bias_either():
    backbone, trials = RotaryDecoder(), 600
    target = np.array([5, 6, 7, 8, 5], np.int32)
    sequences = Sequences.build([np.array([9, 11, 4], np.int32)], np.zeros(trials, np.int64), [target] * trials)
    keys = np.array([target_key(seed, target) for seed in range(trials)], dtype=np.uint64)
    design = MaskDesign(8)
    enumerating = MaskedReconstruction(ReconstructionConfig(design=replace(design, draws=40)), sequences, keys)
    expected = Runner(backbone).evaluate(enumerating, sequences, AttentionPattern("full")).profile[0]
    corrected = MaskedReconstruction(ReconstructionConfig(design=design, full_draws=4), sequences, keys)
    profile = Runner(backbone).evaluate(corrected, sequences, AttentionPattern("prefix")).profile
    error = profile.std(axis=0, ddof=1) / np.sqrt(trials)
    assert (np.abs(profile.mean(axis=0) - expected) < 4 * error).all()
