"""Characters of words to the tokens that spell them."""

from __future__ import annotations

import numpy as np


def tokens_within(spans: np.ndarray, ranges: np.ndarray) -> np.ndarray:
    """Which tokens share a character with a range: a token that straddles a border belongs to both sides.

    Parameters
    ----------
    spans : integer [L, 2]
        Half-open characters of each token; an empty one shares none.
    ranges : integer [m, 2]
        Half-open, ascending, disjoint.

    Returns
    -------
    bool [L]
    """
    if not len(ranges):
        return np.zeros(len(spans), dtype=bool)
    start, end = spans[:, 0], spans[:, 1]
    at = np.searchsorted(ranges[:, 1], start, side="right")  # the first range that ends beyond the token's start
    meets = (at < len(ranges)) & (ranges[np.minimum(at, len(ranges) - 1), 0] < end)
    return meets & (start < end)
