"""Which keys each query of `prefix_attention` sees."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class AttentionLayout:
    """Which queries see which keys, for W windows packed end to end.

    Host arrays, which must not change after their first use: their copies on a GPU are kept in `schedules`.

    Parameters
    ----------
    key_offsets : int64 [W + 1]
        Window w owns key (and value) rows key_offsets[w] .. key_offsets[w + 1].
    query_offsets : int64 [W + 1]
        Likewise for query rows. The last layer has fewer queries than keys.
    query_places : int64 [Q] or None
        Place of each query in its window, from 0 and below the window's length; None if each key row has its query, in
        order. Used with `block` only.
    prefix_starts, prefix_lengths : int64 [W]
        Window w also sees rows prefix_starts[w] .. prefix_starts[w] + prefix_lengths[w] of the prefix keys; none if the
        length is 0.
    block : int
        0: a window sees all of itself. B > 0: the token at place p sees places below (p // B + 1) * B (block-causal).
    """

    key_offsets: np.ndarray
    query_offsets: np.ndarray
    prefix_starts: np.ndarray
    prefix_lengths: np.ndarray
    query_places: np.ndarray | None = None
    block: int = 0
    schedules: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
