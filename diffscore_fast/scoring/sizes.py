"""Mask sizes: how many tokens a draw masks, and what all masks of a size weigh in the score.

A random mask of a given size is a uniform choice of that many tokens, whatever its mask ratio was. So every score is
S = sum_l c(l) g(l), where g(l) is the mean, over all masks of l tokens, of their mean log-prob, and c(l) sums to 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import betainc, gammaln

from diffscore_fast.scoring.mask_design import MaskDesign


@dataclass(frozen=True)
class SizeTable:
    """Weights of the masks of a target of L tokens, by their size 1 .. L.

    Parameters
    ----------
    score : float64 [L]
        c(l), the weight in the score of all masks of l tokens together.
    levels : float64 [levels, L]
        Probability that a draw of the level masks l tokens. The profile of a level is sum_l levels[., l] g(l), divided
        by the probability of a nonempty mask.
    """

    score: np.ndarray
    levels: np.ndarray

    @property
    def mean_size(self) -> float:
        """Mean number of masked tokens, by the weights of the score."""
        return float((self.score * np.arange(1, len(self.score) + 1)).sum() / self.score.sum())


def size_table(design: MaskDesign, length: int, *, elbo: bool, level_weights: tuple[float, ...] | None) -> SizeTable:
    """The exact table of a design.

    With `elbo`, of draws weighted 1/t; otherwise of means over masked tokens, where an empty draw masks one token.

    Raises
    ------
    NotImplementedError
        For mask ratios or a masking that have no table here.
    """
    if design.ratios not in ("grid", "stratified", "uniform") or design.masking not in ("bernoulli", "count"):
        raise NotImplementedError(
            f"there is no table of mask sizes for {design.ratios!r} mask ratios with {design.masking!r} masking"
        )
    probabilities = _size_probabilities(design, length)
    levels, sizes = probabilities[:, 1:].copy(), np.arange(1, length + 1)
    if not elbo:
        levels[:, 0] += probabilities[:, 0]  # an empty draw masks one token
        return SizeTable(np.average(levels, axis=0, weights=level_weights), levels)
    if design.masking == "count":
        return SizeTable(levels.mean(axis=0), levels)
    if design.ratios == "grid":
        return SizeTable((levels / design.level_ratios[:, None]).mean(axis=0) * sizes / length, levels)
    # The integral over t of (1/t) t^l (1 - t)^(L - l) binomial(L, l) is 1/l.
    return SizeTable(np.full(length, 1.0 / length), levels)


def log_binomial(length: int) -> np.ndarray:
    """Logarithm of the number of masks with 0 .. L tokens, float64 [L + 1]."""
    sizes = np.arange(length + 1)
    return gammaln(length + 1) - gammaln(sizes + 1) - gammaln(length - sizes + 1)


def _size_probabilities(design: MaskDesign, length: int) -> np.ndarray:
    """Probability of masking 0 .. L tokens at each level, float64 [levels, L + 1]."""
    sizes, edges = np.arange(length + 1), np.arange(design.levels + 1) / design.levels
    if design.ratios == "grid":
        ratio = design.level_ratios[:, None]
        if design.masking == "count":
            return (design.count_sizes(ratio, length) == sizes).astype(np.float64)
        return np.exp(log_binomial(length) + sizes * np.log(ratio) + (length - sizes) * np.log1p(-ratio))
    if design.masking == "count":  # a ratio in ((l - 1)/L, l/L] masks l tokens
        low, high = np.maximum((sizes - 1) / length, edges[:-1, None]), np.minimum(sizes / length, edges[1:, None])
        return np.maximum(high - low, 0.0) * design.levels
    below = betainc(sizes + 1, length - sizes + 1, edges[:, None])
    return np.diff(below, axis=0) * design.levels / (length + 1)
