"""Ragged arrays as (flat values, offsets), and the index arithmetic that planning needs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def offsets_of(lengths: np.ndarray) -> np.ndarray:
    """int64 offsets [n + 1] of segments with these lengths laid end to end."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def segment_ids(lengths: np.ndarray) -> np.ndarray:
    """Index of the segment of each element, for segments laid end to end: int64 [sum of lengths]."""
    return np.repeat(np.arange(len(lengths)), lengths)


def places_in(lengths: np.ndarray) -> np.ndarray:
    """Place of each element within its segment, for segments laid end to end: int64 [sum of lengths]."""
    return np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def take_segments(offsets: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Flat indices int64 of the elements of the segments `chosen`, in that order."""
    lengths = (offsets[1:] - offsets[:-1])[chosen]
    return np.repeat(offsets[:-1][chosen], lengths) + places_in(lengths)


def spread(values: np.ndarray, rows: np.ndarray | list[int], count: int, fill: float = np.nan) -> np.ndarray:
    """[count, ...]: `values` at `rows`, `fill` elsewhere."""
    out = np.full((count, *values.shape[1:]), fill, dtype=values.dtype)
    out[rows] = values
    return out


def runs_within(sizes: np.ndarray, budget: int) -> list[tuple[int, int]]:
    """Half-open runs of consecutive items whose sizes fit a budget; an item that is larger is a run of its own."""
    ends = np.cumsum(sizes)
    runs, start = [], 0
    while start < len(sizes):
        reached = ends[start - 1] if start else 0
        stop = max(int(np.searchsorted(ends, reached + budget, side="right")), start + 1)
        runs.append((start, stop))
        start = stop
    return runs


def concatenate(arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """int32 token arrays to (flat values, offsets)."""
    offsets = offsets_of(np.array([len(item) for item in arrays], dtype=np.int64))
    flat = np.concatenate(arrays) if len(arrays) else np.zeros(0, dtype=np.int32)
    return flat.astype(np.int32, copy=False), offsets
