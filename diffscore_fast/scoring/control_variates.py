"""Control variates for balanced draws: they remove the part of a score that depends on which masks were drawn.

Most of a score's variance over seeds has three causes, which another replicate of the same target shows as well: some
tokens are harder than others, a token is harder if more of the text is masked, and harder if its neighbours are. A
ridge regression on all *other* replicates predicts the log-prob of each masked token from these. The prediction h is
subtracted, and its exact expectation over the design is added. Given the other replicates, h is a fixed function of the
masks: every replicate keeps its expectation, whatever was fitted, and so does their mean.
"""

from __future__ import annotations

import numpy as np

from diffscore_fast.engine.ragged import offsets_of, places_in, segment_ids
from diffscore_fast.scoring.draws import MaskDraws

# Prior of the regression, for few or uninformative replicates. The coefficients, in nats: of the intercept, of a mask
# of all tokens, and of a masked neighbour at distance 1 and at distance 2 (the columns of `_features`). The ridges are
# their weights, and that of the tokens' own levels around 0. Set by the embedded model's scores of 18 rows. They decide
# how much the variance falls, and never change the expectation.
PRIOR = (0.0, -2.0, -0.8, -0.2)
RIDGES = (0.0, 1.0, 6.0, 18.0)
TOKEN_RIDGE = 0.5


def cross_fitted_controls(draws: MaskDraws, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Controls of balanced draws; every target must have two replicates or more.

    Parameters
    ----------
    draws : MaskDraws [D]
        The draws of a target stand together.
    values : float64 [sum of draws.counts]
        Log-prob of every masked token, draw by draw.

    Returns
    -------
    control : float64 [sum of draws.counts]
        Prediction h for every masked token; 0 in targets with a value that is not finite.
    expectation : float64 [D]
        Expectation over the design of the control of the draw's replicate: the sum of share * mean h.
    """
    # A unit is a replicate of a target. Its tokens start at `starts` among those of all units.
    cell = draws.target * (draws.replicate.max() + 1) + draws.replicate
    _, first, of_draw = np.unique(cell, return_index=True, return_inverse=True)
    _, first_of_target, of_unit = np.unique(draws.target[first], return_index=True, return_inverse=True)
    lengths = draws.lengths[first]
    starts, target_starts = offsets_of(lengths), offsets_of(lengths[first_of_target])
    draw = segment_ids(draws.counts)
    entry_unit = of_draw[draw]
    place = places_in(draws.lengths)[draws.masked]
    entry_token = starts[entry_unit] + place
    target_token = np.repeat(target_starts[of_unit], lengths) + places_in(lengths)

    infinite = np.bincount(of_unit[entry_unit], weights=~np.isfinite(values)) > 0
    usable = ~infinite[of_unit]
    observed = np.where(usable[entry_unit], values, 0.0)
    features = _features(draws, place)

    def of_others(own: np.ndarray, group: np.ndarray) -> np.ndarray:
        """Sums over the target's other replicates, from the sums of each replicate."""
        return np.bincount(group, weights=own)[group] - own

    def sums(index: np.ndarray, weights: np.ndarray, size: int) -> np.ndarray:
        # bincount adds in order of occurrence: a sum does not depend on the neighbours.
        return np.bincount(index, weights=weights, minlength=size)

    # Normal equations of the other replicates; the levels of single tokens are eliminated.
    columns, units, tokens = range(len(RIDGES)), len(lengths), int(starts[-1])
    token_sums = np.stack([of_others(sums(entry_token, features[j], tokens), target_token) for j in columns])
    token_observed = of_others(sums(entry_token, observed, tokens), target_token)
    scale = 1.0 / (token_sums[0] + TOKEN_RIDGE)  # the first feature is 1: its sums are counts
    of_token = segment_ids(lengths)
    matrix, vector = np.zeros((units, len(RIDGES), len(RIDGES))), np.zeros((units, len(RIDGES)))
    for i in columns:
        vector[:, i] = of_others(sums(entry_unit, features[i] * observed, units), of_unit)
        vector[:, i] -= sums(of_token, token_sums[i] * token_observed * scale, units)
        for j in range(i + 1):
            entry = of_others(sums(entry_unit, features[i] * features[j], units), of_unit)
            matrix[:, i, j] = matrix[:, j, i] = entry - sums(of_token, token_sums[i] * token_sums[j] * scale, units)
    prior = np.multiply(RIDGES, PRIOR)
    fitted = np.linalg.solve(matrix + np.diag(RIDGES), (vector + prior)[:, :, None])[:, :, 0]
    levels = (token_observed - (token_sums * fitted.T[:, of_token]).sum(axis=0)) * scale

    control = levels[entry_token] + (features[1:] * fitted.T[1:, entry_unit]).sum(axis=0)
    expectation = sums(of_token, levels, units) / lengths
    expectation = expectation[of_draw] + fitted[of_draw, 1] * draws.mean_ratio
    return np.where(usable[entry_unit], control, 0.0), np.where(usable[of_draw], expectation, 0.0)


def _features(draws: MaskDraws, place: np.ndarray) -> np.ndarray:
    """Columns of the regression for every masked token, float64 [4, sum of draws.counts].

    1, |M| / L, and the numbers of masked neighbours at distance 1 and 2, less their expectations over masks of |M|
    tokens and over the tokens of the mask.
    """
    counts, lengths = draws.counts.astype(np.float64), draws.lengths.astype(np.float64)
    draw = segment_ids(draws.counts)
    rows = [np.ones(len(draw)), (counts / lengths)[draw]]
    masked_at = np.flatnonzero(draws.masked)
    others = (counts - 1.0) / np.maximum(lengths - 1.0, 1.0)  # probability that another given token is masked too
    for distance in (1, 2):
        neighbours = np.zeros(len(draw))
        for step, inside in ((-distance, place >= distance), (distance, place < draws.lengths[draw] - distance)):
            neighbours[inside] += draws.masked[masked_at[inside] + step]
        pairs = 2.0 * np.maximum(lengths - distance, 0.0) / lengths  # mean number of neighbours of a token
        rows.append(neighbours - (pairs * others)[draw])
    return np.stack(rows)
