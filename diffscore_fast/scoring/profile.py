"""The profile of a score: the mean log-prob by mask ratio, for every level of the design."""

from __future__ import annotations

import numpy as np

from diffscore_fast.scoring.draws import MaskDraws
from diffscore_fast.scoring.mask_design import MaskDesign

# What the slope of the straight line leans to where few draws were made, in nats for a mask of all tokens, and with
# which weight. Both decide how much the variance falls, and never change the expectation.
PROFILE_SLOPE, PROFILE_RIDGE = -2.0, 0.3


def draw_profile(
    design: MaskDesign, draws: MaskDraws, means: np.ndarray, replicates: np.ndarray, enumerated: np.ndarray
) -> np.ndarray:
    """Profile of each target, float64 [S, levels]; NaN where a level got no draw.

    `level_means`; for balanced draws in several replicates, `unbiased_levels`.

    Parameters
    ----------
    means : float64 [D]
        Mean log-prob of each draw's masked tokens.
    replicates : int64 [S]
        Replicates of each target.
    enumerated : bool [D]
        Draws that are all masks of their target.
    """
    profile = level_means(draws, means, len(replicates))
    several = np.flatnonzero(~enumerated & (replicates[draws.target] > 1))
    one_size = design.masking == "count" and design.ratios == "grid"  # in each level: its draws have equal weights
    if design.balanced and not one_size and len(several):
        targets = np.unique(draws.target[several])
        profile[targets] = unbiased_levels(draws.take(several), means[several], replicates, targets)
    return profile


def level_means(draws: MaskDraws, means: np.ndarray, count: int) -> np.ndarray:
    """Weighted mean of the draws by level, float64 [count, levels]; NaN where a level got no draw.

    It is the level's mean for all masks, and has it as expectation if each draw has one mask ratio. For a single
    replicate of balanced draws it divides by the realised weight, which biases both ends of the profile.
    """
    levels = draws.level_weights.shape[1]
    cell = (draws.target[:, None] * levels + np.arange(levels)).ravel()
    weights = draws.level_weights.ravel()
    terms = np.repeat(means, levels)
    # A weight of 0 leaves its term out, also if that is infinite.
    terms = np.multiply(weights, terms, where=weights != 0, out=np.zeros(len(terms)))
    totals = np.bincount(cell, weights=terms, minlength=count * levels)
    masses = np.bincount(cell, weights=weights, minlength=count * levels)
    profile = np.divide(totals, masses, out=np.full(count * levels, np.nan), where=masses > 0)
    return profile.reshape(count, levels)


def unbiased_levels(draws: MaskDraws, means: np.ndarray, replicates: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Unbiased profile of balanced draws in several replicates, float64 [len(targets), levels].

    A draw's weight w in a level is (probability of its size there) / (probability in the design): E[sum w m] / E[sum w]
    is the level's mean. Dividing by the realised sum of w would be biased. Dividing by the expected one alone would be
    noisy, since the realised sum varies by a third. So the weights are applied to the residuals of a straight line in
    the mask ratio x = |M| / L:

        profile = mean over replicates of [sum w (m - a - b x) + a E[sum w] + b E[sum w x]] / E[sum w]

    a and b are fitted to the target's *other* replicates. Given these, the line is a fixed function: no bias.
    """
    # A unit is a replicate of a target. All units have the same number of draws, and lie side by side.
    own = replicates[targets]
    per = len(draws.target) // int(own.sum())
    of_target = np.repeat(np.arange(len(targets)), own)
    x, m = (draws.counts / draws.lengths).reshape(-1, per), means.reshape(-1, per)
    share = draws.share.reshape(-1, per) * per

    def of_others(values: np.ndarray) -> np.ndarray:
        """Sums over the target's other replicates of a sum over the draws of each."""
        own_sums = values.sum(axis=1)
        return np.bincount(of_target, weights=own_sums)[of_target] - own_sums

    total = of_others(share)
    mean_x, mean_m = of_others(share * x) / total, of_others(share * m) / total
    spread = of_others(share * x**2) - total * mean_x**2
    slope = of_others(share * x * m) - total * mean_x * mean_m
    slope = (slope + PROFILE_RIDGE * PROFILE_SLOPE) / (np.maximum(spread, 0.0) + PROFILE_RIDGE)
    line = mean_m - slope * mean_x
    weights = draws.level_weights.reshape(len(x), per, -1)
    left = m - line[:, None] - slope[:, None] * x
    first = np.arange(len(x)) * per
    mass, ratio = draws.level_mass[first], draws.level_ratio[first]
    sums = np.einsum("ukl,uk->ul", weights, left) + slope[:, None] * ratio
    levels = np.divide(sums, mass, out=np.full(mass.shape, np.nan), where=mass > 0) + line[:, None]
    profile = np.zeros((len(targets), levels.shape[1]))
    np.add.at(profile, of_target, levels / own[of_target, None])
    return profile
