"""How much scores under `prefix` differ from scores under `full`, to decide whether `prefix` may be used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import spearmanr

from diffscore_fast.arguments import checked_column
from diffscore_fast.options import DEFAULT_CALIBRATION_DRAWS, DEFAULT_SEED
from diffscore_fast.scoring.scorer import DiffScorer

PREFIX_LENGTH_BINS = 4


@dataclass(frozen=True)
class PatternComparison:
    """Scores under `prefix` compared with those under `full`, on the same masks.

    Parameters
    ----------
    label : str
        Which scores: "all rows", "mask ratio 0.3", or "prefix of 20 to 41 tokens".
    rows : int
        Number of rows that are scored under both.
    rank_correlation : float
        Spearman's; NaN for fewer than three rows, and if one side is constant.
    mean_difference, worst_difference : float
        Mean of prefix - full, and the difference of largest size, in nats per token; NaN without rows.
    """

    label: str
    rows: int
    rank_correlation: float
    mean_difference: float
    worst_difference: float


def calibrate(
    scorer: DiffScorer,
    sources: Sequence[str],
    candidates: Sequence[str],
    *,
    draws: int = DEFAULT_CALIBRATION_DRAWS,
    seed: int = DEFAULT_SEED,
) -> list[PatternComparison]:
    """Compare the two patterns on a sample of rows: on all rows, by mask ratio, and by quartile of prefix length.

    Parameters
    ----------
    sources, candidates : sequence of str
        Rows that cannot be scored are left out.
    draws : int
        K of the published grid; 20 make 18 forward passes under each pattern.
    seed : int

    Raises
    ------
    UnsupportedPatternError
        If the model lacks one of the patterns.
    """
    sources, candidates = checked_column("sources", sources), checked_column("candidates", candidates)
    prefix, full = (
        scorer.score(sources, candidates, draws=draws, seed=seed, coupling="independent", attention=name)
        for name in ("prefix", "full")
    )
    kept = np.flatnonzero(np.isfinite(prefix.scores) & np.isfinite(full.scores))
    comparisons = [_compare("all rows", prefix.scores[kept], full.scores[kept])]
    for level, ratio in enumerate(prefix.profile_ratios):
        name = f"mask ratio {ratio:g}"
        comparisons.append(_compare(name, prefix.profile[kept, level], full.profile[kept, level]))
    if len(kept):
        lengths = scorer.count_tokens([sources[int(row)] for row in kept])
        edges = np.unique(np.quantile(lengths, np.linspace(0, 1, PREFIX_LENGTH_BINS + 1), method="lower"))
        bins = np.minimum(np.searchsorted(edges, lengths, side="right"), max(1, len(edges) - 1))
        for number in np.unique(bins):
            own = bins == number
            name = f"prefix of {lengths[own].min()} to {lengths[own].max()} tokens"
            comparisons.append(_compare(name, prefix.scores[kept[own]], full.scores[kept[own]]))
    return comparisons


def _compare(label: str, prefix: np.ndarray, full: np.ndarray) -> PatternComparison:
    made = np.isfinite(prefix) & np.isfinite(full)
    prefix, full = prefix[made], full[made]
    if not len(prefix):
        return PatternComparison(label, 0, np.nan, np.nan, np.nan)
    ranked = len(prefix) > 2 and np.ptp(prefix) > 0 and np.ptp(full) > 0
    correlation = float(spearmanr(prefix, full).statistic) if ranked else np.nan
    difference = prefix - full
    worst = difference[np.abs(difference).argmax()]
    return PatternComparison(label, len(prefix), correlation, float(difference.mean()), float(worst))
