"""Two systems on the same rows: their difference, its paired bootstrap interval, and a paired permutation test."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, fields

import numpy as np
from scipy.stats import bootstrap, permutation_test

from diffscore_fast.arguments import check_at_most, checked_seed, whole_number
from diffscore_fast.errors import InputError
from diffscore_fast.options import DEFAULT_CONFIDENCE, DEFAULT_RESAMPLES, DEFAULT_SEED, MAX_RESAMPLES
from diffscore_fast.scoring.table import ScoreTable
from diffscore_fast.status import SCORED

RESAMPLED_CHUNK = 1 << 22  # resampled values that are in memory together


@dataclass(frozen=True)
class Comparison:
    """System A against system B.

    Parameters
    ----------
    rows : int64 [n]
        Rows in which both systems have a score; everything below is about these rows.
    differences : float64 [n]
        Score of A - score of B, in nats per token.
    mean_a, mean_b, difference : float
        Means over rows, and the mean of the differences; NaN without rows.
    low, high : float
        Percentile bootstrap interval of the difference, by resampling rows; NaN for fewer than two rows.
    confidence : float
        Its coverage.
    p_value : float
        Two-sided, of the permutation test that exchanges A and B within rows; NaN for fewer than two rows.
    wins_a, wins_b, ties : int
        Number of rows in which A scores higher, B scores higher, and both score the same.
    excluded : dict of str to int
        Number of other rows by reason: "A: " or "B: " and the status. A row that failed on both sides counts for A.
    """

    rows: np.ndarray
    differences: np.ndarray
    mean_a: float
    mean_b: float
    difference: float
    low: float
    high: float
    confidence: float
    p_value: float
    wins_a: int
    wins_b: int
    ties: int
    excluded: dict[str, int]

    def most_different(self, count: int) -> np.ndarray:
        """Positions in `rows` of the largest differences of either sign, the largest first. int64 [<= count]."""
        return np.argsort(-np.abs(self.differences), kind="stable")[:count]

    def to_dict(self) -> dict[str, float | int | dict[str, int] | None]:
        """The numbers by name, without the arrays; NaN becomes None."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        values = {name: value for name, value in values.items() if not isinstance(value, np.ndarray)}
        values["rows"] = len(self.rows)
        return {
            name: None if isinstance(value, float) and math.isnan(value) else value for name, value in values.items()
        }


def compare(
    a: ScoreTable,
    b: ScoreTable,
    *,
    resamples: int = DEFAULT_RESAMPLES,
    confidence: float = DEFAULT_CONFIDENCE,
    seed: int = DEFAULT_SEED,
) -> Comparison:
    """Compare two systems row by row.

    Both tables must have the same signature. A row without a score on one side is excluded on both. Masks follow from
    the scored text: in `reverse` both scores of a row use the same masks of the source; in other directions only equal
    outputs have the same masks, and their difference is exactly 0.

    Parameters
    ----------
    a, b : ScoreTable
        Row i of both has the same source.
    resamples : int
        Number of resamples of the bootstrap and of the permutation test (which is exact if there are fewer exchanges).
    confidence : float
        Coverage of the interval.
    seed : int
        Seed of the resampling; it does not change the scores.

    Raises
    ------
    InputError
        If lengths or signatures differ.

    Examples
    --------
    >>> from diffscore_fast import DiffScorer
    >>> scorer = DiffScorer("mini")
    >>> sources = ["The cat sat on the mat.", "It rained all day."]
    >>> a = scorer.score(sources, ["A cat sat.", "It rained."], draws=5)
    >>> b = scorer.score(sources, ["A cat sat.", "Rained it."], draws=5)
    >>> compare(a, b).wins_a
    1
    """
    if len(a) != len(b):
        raise InputError(f"{len(a)} rows against {len(b)}; row i of both must have the same source")
    if a.signature != b.signature:
        raise InputError(f"the scores are not comparable: {a.signature} against {b.signature}")
    check_resampling(resamples, confidence)
    kept, excluded = [], Counter[str]()
    for row, states in enumerate(zip(a.status, b.status, strict=True)):
        failed = [f"{side}: {state}" for side, state in zip("AB", states, strict=True) if state not in SCORED]
        if failed:
            excluded[failed[0]] += 1
        else:
            kept.append(row)
    rows = np.array(kept, dtype=np.int64)
    scores_a, scores_b = a.scores[rows], b.scores[rows]
    differences = scores_a - scores_b
    low = high = p_value = math.nan
    if len(rows) > 1:
        # Two streams, so that the interval and the p-value are independent.
        first, second = np.random.default_rng(checked_seed(seed) % 2**128).spawn(2)
        batch = max(1, RESAMPLED_CHUNK // len(rows))
        interval = bootstrap(
            (differences,),
            np.mean,
            n_resamples=resamples,
            batch=batch,
            confidence_level=confidence,
            method="percentile",
            rng=first,
        ).confidence_interval
        low, high = float(interval.low), float(interval.high)
        p_value = float(
            permutation_test(
                (differences,),
                np.mean,
                permutation_type="samples",
                vectorized=True,
                n_resamples=resamples,
                batch=batch,
                rng=second,
            ).pvalue
        )
    mean_a, mean_b, difference = (
        float(values.mean()) if len(rows) else math.nan for values in (scores_a, scores_b, differences)
    )
    return Comparison(
        rows,
        differences,
        mean_a,
        mean_b,
        difference,
        low,
        high,
        confidence,
        p_value,
        int((differences > 0).sum()),
        int((differences < 0).sum()),
        int((differences == 0).sum()),
        dict(excluded),
    )


def check_resampling(resamples: int, confidence: float) -> None:
    """Raise `InputError` for values that `compare` does not take."""
    if not 0.0 < confidence < 1.0:
        raise InputError(f"confidence must lie between 0 and 1, not {confidence}")
    if whole_number("resamples", resamples) < 1:
        raise InputError(f"resamples must be at least 1, not {resamples}")
    check_at_most("resamples", resamples, MAX_RESAMPLES)
