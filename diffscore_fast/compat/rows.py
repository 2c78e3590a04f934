"""Scores for callers that know no statuses: NaN and a warning in their place."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from diffscore_fast.scoring.scorer import DiffScorer
from diffscore_fast.status import SCORED


def scores_or_nan(
    scorer: DiffScorer, sources: Sequence[str], candidates: Sequence[str], max_length: int | None = None, **options: Any
) -> np.ndarray:
    """Scores float64 [n]; NaN where a row has none, and one warning that counts the reasons.

    A row with a text of more than `max_length` tokens, in any role, has none: nothing is cut.
    """
    table = scorer.score(sources, candidates, **options)
    scores, reasons = table.scores.copy(), Counter(status for status in table.status if status not in SCORED)
    if max_length is not None:
        lengths = [scorer.count_tokens(column) for column in (sources, candidates)]
        long = (np.maximum(*lengths) > max_length) & ~np.isnan(scores)
        scores[long] = np.nan
        if long.any():
            reasons[f"longer than max_length={max_length}"] = int(long.sum())
    if reasons:
        counted = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
        warnings.warn(
            f"{sum(reasons.values())} of {len(scores)} rows have no score and are NaN: {counted}", stacklevel=3
        )
    return scores


def default_device() -> str:
    """The first GPU, or the processor."""
    return "cuda:0" if torch.cuda.is_available() else "cpu"
