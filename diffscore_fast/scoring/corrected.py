"""The corrected estimator: the score under `full`, from draws that are read under the cheaper pattern `prefix`.

    S = mean over K draws of prefix_k + mean over J >= 2 of them of (full_j - prefix_j), on the same masks

The J draws are a random subset of the K, and no coefficient is fitted: the expectation is the score under `full`,
whatever the model does under `prefix`. The users' option for it is `attention="corrected"`, since it takes the place of
a pattern there; it is an estimator, and reads both patterns.
"""

from __future__ import annotations

import numpy as np

from diffscore_fast.engine.ragged import offsets_of, take_segments
from diffscore_fast.engine.random import uniforms
from diffscore_fast.scoring.draws import PICK_STREAM, MaskDraws
from diffscore_fast.scoring.mask_design import MaskDesign


def pick_draws(design: MaskDesign, keys: np.ndarray, draws: MaskDraws, picks: np.ndarray) -> np.ndarray:
    """Factor of each draw in the mean over the picked ones, of expectation 1, [D]; 0 for a draw that is not picked.

    The factor is (times the draw is picked) / (picks in all * share). The draws of a replicate are laid end to end in
    random order, each as long as its share, and picked at equal steps from one uniformly drawn place. If all shares are
    equal, this is a uniformly random subset.

    Parameters
    ----------
    picks : int64 [n]
        Picks per replicate of each target, at least 1 where it has draws.
    """
    per = design.draws_per_replicate
    target, number, share = (item.reshape(-1, per) for item in (draws.target, draws.number, draws.share))
    zeros = np.zeros(len(draws.target), np.int64)
    rank = uniforms(keys[draws.target], draws.number, zeros, PICK_STREAM).reshape(-1, per)
    offset = uniforms(keys[target[:, 0]], number[:, 0], np.ones(len(target), np.int64), PICK_STREAM)[:, None]
    order, steps = rank.argsort(axis=1, kind="stable"), picks[target[:, :1]]
    ends = np.take_along_axis(share, order, axis=1).cumsum(axis=1) * steps
    ends[:, -1:] = steps  # exactly: rounding could leave it below
    picked = np.diff(np.ceil(ends - offset), axis=1, prepend=0.0)
    factor = np.empty_like(ends)
    np.put_along_axis(factor, order, picked, axis=1)
    return (factor / (steps * share)).ravel()


def combined_values(
    counts: np.ndarray,
    factor: np.ndarray,
    prefix_draws: np.ndarray,
    prefix_log_probs: np.ndarray,
    full_draws: np.ndarray,
    full_log_probs: np.ndarray | None,
) -> np.ndarray:
    """Value of every masked token: prefix + factor * (full - prefix), float64 [sum of counts].

    Parameters
    ----------
    counts : int64 [D]
        Masked tokens of each draw.
    factor : float64 [D]
        From `pick_draws`; 1 for draws that are read under `full` alone.
    prefix_draws, full_draws : int64
        Indices of the draws that were read under each pattern.
    prefix_log_probs, full_log_probs : float32
        Log-probs of their masked tokens. Without those under `full`, the values under `prefix`.
    """
    offsets = offsets_of(counts)
    values = np.zeros(int(offsets[-1]))  # 0 is the `prefix` value of draws that are read under `full` alone
    values[take_segments(offsets, prefix_draws)] = prefix_log_probs
    if full_log_probs is not None:
        at = take_segments(offsets, full_draws)
        values[at] += np.repeat(factor[full_draws], counts[full_draws]) * (full_log_probs - values[at])
    return values


def best_picks(
    design: MaskDesign,
    prefix_variance: np.ndarray,
    difference_variance: np.ndarray,
    prefix_cost: np.ndarray,
    full_cost: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Picks per replicate with the smallest variance times cost, int64 [n], and that variance, float64 [n].

    Parameters
    ----------
    prefix_variance, difference_variance : float64 [n]
        Of a replicate: of the score under `prefix`, and of the correction, with one pick.
    prefix_cost, full_cost : float64 [n]
        Window tokens of a draw under each pattern. The prefix itself, which draws and candidates share, is left out.
    """
    per = design.draws_per_replicate
    picks = np.arange(1 if design.num_replicates > 1 else min(2, per), per + 1)
    variance = prefix_variance[:, None] + difference_variance[:, None] * (1.0 / picks - 1.0 / per)
    best = (variance * (per * prefix_cost[:, None] + picks * full_cost[:, None])).argmin(axis=1)
    return picks[best], np.take_along_axis(variance, best[:, None], axis=1)[:, 0]
