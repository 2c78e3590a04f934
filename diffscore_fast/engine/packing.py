"""Deduplication and packing: which windows are evaluated, in which order, in which packs."""

from __future__ import annotations

import numpy as np

from diffscore_fast.engine.ragged import places_in, runs_within, segment_ids
from diffscore_fast.engine.windows import Windows

_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def distinct_windows(windows: Windows) -> tuple[np.ndarray, np.ndarray]:
    """First occurrence of each distinct window, and for every window the index of its representative among them.

    Windows are equal when prefix, visible length, tokens, types, wanted rows and targets are equal. Their 128-bit
    fingerprints are compared: among a billion windows, two different ones collide with probability below 1e-20.
    """
    prints = np.stack([_fingerprint(windows, salt) for salt in (1, 2)], axis=1)
    _, first, inverse = np.unique(prints.view("V16").ravel(), return_index=True, return_inverse=True)
    # np.unique orders by fingerprint; the plan's order keeps windows of one prefix together.
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return first[order], rank[inverse.ravel()]


def pack_windows(
    prefix: np.ndarray, lengths: np.ndarray, prefix_lengths: np.ndarray, token_budget: int, cache_rows: int
) -> list[tuple[np.ndarray, list[np.ndarray]]]:
    """Group windows into waves whose prefixes fit the cache together, and each wave into packs of a token budget.

    Parameters
    ----------
    prefix, lengths : int64 [W]
        Prefix index (-1 for none) and number of tokens of each window.
    prefix_lengths : int64 [P]
        Tokens of each prefix.
    token_budget : int
        Maximum number of window tokens in a pack; a longer window is a pack of its own.
    cache_rows : int
        Maximum number of prefix tokens of a wave; a longer prefix is a wave of its own.

    Returns
    -------
    list of (prefixes, packs)
        The prefix indices of a wave, and index arrays into the windows. Windows of one prefix and one length are
        neighbours, so that they stack densely.
    """
    # Longest first within a prefix: the pack that needs the most memory comes early.
    order = np.lexsort((-lengths, prefix))
    used = np.unique(prefix[prefix >= 0])
    wave_of = np.zeros(len(prefix_lengths) + 1, dtype=np.int64)  # the last entry serves prefix -1
    for wave, (start, stop) in enumerate(runs_within(prefix_lengths[used], cache_rows)):
        wave_of[used[start:stop]] = wave
    waves = []
    wave_of_window = wave_of[prefix[order]]
    for wave in range(int(wave_of_window.max(initial=-1)) + 1):
        members = order[wave_of_window == wave]
        packs = [members[start:stop] for start, stop in runs_within(lengths[members], token_budget)]
        waves.append((used[wave_of[used] == wave], packs))
    return waves


def _fingerprint(windows: Windows, salt: int) -> np.ndarray:
    """A 64-bit sum of mixed (place, token) and (place, target) pairs, per window."""
    lengths = windows.lengths
    total = np.zeros(len(windows), dtype=np.uint64)
    _add(total, segment_ids(lengths), _mix(_pair(places_in(lengths), windows.tokens), 4 * salt))
    counts = np.diff(windows.wanted_offsets)
    of_wanted = segment_ids(counts)
    wanted_places = windows.wanted - windows.offsets[:-1][of_wanted]
    _add(total, of_wanted, _mix(_pair(wanted_places, windows.targets), 4 * salt + 1))
    total += _mix(_pair(windows.prefix + 1, windows.visible), 4 * salt + 2)
    if windows.typed_from is not None:
        total = _mix(total ^ windows.typed_from.astype(np.uint64), 4 * salt + 2)
    return _mix(total ^ _mix(lengths.astype(np.uint64), 4 * salt + 3), salt)


def _add(total: np.ndarray, segment: np.ndarray, values: np.ndarray) -> None:
    """Add values to their segments, modulo 2^64; segments ascend and may be empty."""
    if len(values):
        starts = np.flatnonzero(np.diff(segment, prepend=-1))
        total[segment[starts]] += np.add.reduceat(values, starts)


def _pair(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    return (high.astype(np.uint64) << np.uint64(32)) | low.astype(np.uint64)


def _mix(values: np.ndarray, salt: int) -> np.ndarray:
    """SplitMix64's finaliser (Steele, Lea, Flood, OOPSLA 2014) of values offset by a salt."""
    values = values + np.uint64((salt * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF)
    values = (values ^ (values >> np.uint64(30))) * _MIX[0]
    values = (values ^ (values >> np.uint64(27))) * _MIX[1]
    return values ^ (values >> np.uint64(31))
