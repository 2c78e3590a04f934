"""What the network reads at once: the arrays of one pack of prefixes or of windows, laid end to end without padding."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from diffscore_fast.backbones.spec import PatternSpec
from diffscore_fast.engine.plan import AttentionPattern
from diffscore_fast.engine.ragged import offsets_of, places_in, segment_ids, take_segments
from diffscore_fast.engine.windows import Prefixes, Windows


@dataclass(frozen=True)
class PrefixPack:
    """Parts of P sequences, whose keys and values go to the cache.

    Parameters
    ----------
    tokens : int32 [N], offsets : int64 [P + 1]
    positions : int64 [N]
    prefix_starts, visible : int64 [P]
        First cache row of each sequence, and how many of its rows stand there already: the part sees all of them.
    types : int
        Token type of all of them.
    cache_rows : int64 [N]
        Row of the cache that each token's keys and values are written to.
    block : int
        Block size of the causal order inside a sequence; 0 where every token sees all.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    positions: np.ndarray
    types: int
    cache_rows: np.ndarray
    prefix_starts: np.ndarray
    visible: np.ndarray
    block: int

    @staticmethod
    def build(
        prefixes: Prefixes,
        chosen: np.ndarray,
        first: np.ndarray,
        last: np.ndarray,
        starts: np.ndarray,
        attention: AttentionPattern,
        pattern: PatternSpec,
    ) -> PrefixPack:
        """Places `first` to `last` - 1 of the prefixes `chosen`, int64 [P] each.

        `starts` is the cache row that each prefix begins at, by prefix index.
        """
        lengths = last - first
        places = np.repeat(first, lengths) + places_in(lengths)
        return PrefixPack(
            tokens=prefixes.tokens[np.repeat(prefixes.offsets[chosen], lengths) + places],
            offsets=offsets_of(lengths),
            positions=places,
            types=pattern.prefix_type,
            cache_rows=np.repeat(starts[chosen], lengths) + places,
            prefix_starts=starts[chosen],
            visible=first,
            block=pattern.prefix_block(attention.block_size),
        )


@dataclass(frozen=True)
class WindowPack:
    """W windows, each read after the visible part of its prefix.

    Parameters
    ----------
    tokens : int32 [N], offsets : int64 [W + 1]
    positions : int64 [N]
    types : int or int64 [N]
        Token types; one number where all are the same.
    wanted : int64 [M], wanted_offsets : int64 [W + 1]
        Rows of `tokens` whose states are asked for, grouped by window.
    wanted_places, wanted_index : int64 [M]
        Place of each of them within its window, and its index into `Windows.wanted` and `Windows.targets`.
    prefix_starts, visible : int64 [W]
        First cache row of each window's prefix, and how many rows of it the window sees (0 for none).
    """

    tokens: np.ndarray
    offsets: np.ndarray
    positions: np.ndarray
    types: int | np.ndarray
    wanted: np.ndarray
    wanted_offsets: np.ndarray
    wanted_places: np.ndarray
    wanted_index: np.ndarray
    prefix_starts: np.ndarray
    visible: np.ndarray

    @staticmethod
    def build(windows: Windows, chosen: np.ndarray, starts: np.ndarray, pattern: PatternSpec) -> WindowPack:
        """The windows `chosen` int64 [W]; `starts` is the cache row that each prefix begins at, by prefix index."""
        lengths = windows.lengths[chosen]
        of_window, places = segment_ids(lengths), places_in(lengths)
        types: int | np.ndarray = pattern.window_type
        if windows.typed_from is not None:
            types = np.where(places < windows.typed_from[chosen][of_window], pattern.prefix_type, pattern.window_type)
        offsets = offsets_of(lengths)
        counts = np.diff(windows.wanted_offsets)[chosen]
        wanted_index = take_segments(windows.wanted_offsets, chosen)
        wanted_places = windows.wanted[wanted_index] - np.repeat(windows.offsets[:-1][chosen], counts)
        return WindowPack(
            tokens=windows.tokens[take_segments(windows.offsets, chosen)],
            offsets=offsets,
            positions=windows.first_position[chosen][of_window] + places,
            types=types,
            wanted=np.repeat(offsets[:-1], counts) + wanted_places,
            wanted_offsets=offsets_of(counts),
            wanted_places=wanted_places,
            wanted_index=wanted_index,
            prefix_starts=starts[windows.prefix[chosen]],
            visible=windows.visible[chosen],
        )
