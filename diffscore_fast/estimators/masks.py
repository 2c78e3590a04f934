"""Mask designs: how the K draws of a target choose their mask ratios and their masked tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from diffscore_fast.arguments import whole_number
from diffscore_fast.engine.ragged import offsets_of, places_in, segment_ids
from diffscore_fast.engine.random import uniforms
from diffscore_fast.errors import InputError

MaskRatios = Literal["grid", "stratified", "uniform"]
Masking = Literal["bernoulli", "count"]

_RATIO_STREAM, _TOKEN_STREAM, _FALLBACK_STREAM = 0, 1, 2


@dataclass(frozen=True)
class MaskDesign:
    """K draws of a mask ratio, and how a ratio masks tokens.

    Parameters
    ----------
    draws : int
        K as asked for. `num_draws` says how many are made.
    ratios : {"grid", "stratified", "uniform"}
        `grid`: t = k / levels for k = 1 .. levels - 1, with max(1, K // levels) draws a level, as in the published
        code (K = 20 and 10 levels make 18 draws, K = 5 makes 9). `stratified`: t_k = (k - 1 + u_k) / K.
        `uniform`: independent on (0, 1].
    masking : {"bernoulli", "count"}
        `bernoulli`: each token independently with probability t. `count`: ceil(t L) tokens, uniformly chosen.
    levels : int
        Number of equal bins of (0, 1] for the profile, and the spacing of the grid.
    replicates : int, optional
        Independent repetitions of the design among the draws; the standard error is taken over them. By default a
        grid has one a draw of each level, `uniform` one a draw, `stratified` two where K is even and at least 4.
    """

    draws: int = 20
    ratios: MaskRatios = "grid"
    masking: Masking = "bernoulli"
    levels: int = 10
    replicates: int | None = None

    def __post_init__(self) -> None:
        for name in ("draws", "levels", "replicates"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, whole_number(name, getattr(self, name)))
        if self.ratios not in ("grid", "stratified", "uniform"):
            raise InputError(f"mask ratios {self.ratios!r} are unknown; use grid, stratified or uniform")
        if self.masking not in ("bernoulli", "count"):
            raise InputError(f"masking {self.masking!r} is unknown; use bernoulli or count")
        if self.draws < 1:
            raise InputError(f"draws must be at least 1, not {self.draws}")
        least = 2 if self.ratios == "grid" else 1
        if self.levels < least:
            raise InputError(f"levels must be at least {least} for {self.ratios} mask ratios, not {self.levels}")
        if self.num_replicates < 1 or self.num_draws % self.num_replicates:
            raise InputError(f"replicates must divide the {self.num_draws} draws, {self.replicates} does not")
        if self.ratios == "grid" and (self.num_draws // self.num_replicates) % (self.levels - 1):
            raise InputError(f"a grid replicate holds every level equally often; {self.replicates} replicates of "
                             f"{self.num_draws} draws over {self.levels - 1} levels cannot")  # fmt: skip

    @property
    def num_draws(self) -> int:
        """Draws actually made, which is forward passes a target without deduplication."""
        return (self.levels - 1) * max(1, self.draws // self.levels) if self.ratios == "grid" else self.draws

    @property
    def num_replicates(self) -> int:
        if self.replicates is not None:
            return self.replicates
        if self.ratios == "grid":
            return self.num_draws // (self.levels - 1)
        if self.ratios == "uniform":
            return self.num_draws
        return 2 if self.draws >= 4 and self.draws % 2 == 0 else 1

    @property
    def level_ratios(self) -> np.ndarray:
        """Mask ratio of each level of the profile: the grid's values, or the middles of the bins. float64 [levels]."""
        if self.ratios == "grid":
            return np.arange(1, self.levels) / self.levels
        return (np.arange(self.levels) + 0.5) / self.levels

    @property
    def holds_levels_equally(self) -> bool:
        """Whether every replicate has the same number of draws in every level."""
        per_replicate = self.num_draws // self.num_replicates
        return self.ratios == "grid" or (self.ratios == "stratified" and per_replicate % self.levels == 0)

    @property
    def covers_all_ratios(self) -> bool:
        """Whether the mask ratios follow the whole of (0, 1], which a lower bound on log-likelihood needs."""
        return self.ratios != "grid"


@dataclass(frozen=True)
class MaskDraws:
    """K draws for each of n targets.

    Parameters
    ----------
    ratio : float64 [n, K]
        Mask ratio t of each draw.
    level : int64 [n, K]
        Level of the profile that each draw belongs to.
    lengths : int64 [n]
        Tokens of each target.
    masked : bool [K * sum(lengths)]
        Target by target, draw by draw, token by token.
    masked_counts : int64 [n, K]
        |M_k|.
    """

    ratio: np.ndarray
    level: np.ndarray
    lengths: np.ndarray
    masked: np.ndarray
    masked_counts: np.ndarray


def draw_masks(design: MaskDesign, keys: np.ndarray, lengths: np.ndarray, *, fill_empty: bool) -> MaskDraws:
    """Make the draws of n targets. Each depends on its key alone, not on the other targets.

    Parameters
    ----------
    keys : uint64 [n]
        From `engine.random.target_key`.
    lengths : int64 [n]
        Tokens of each target, at least 1.
    fill_empty : bool
        Whether an empty draw masks one uniformly chosen token instead.
    """
    count, draws = len(keys), design.num_draws
    ratio, level = _ratios(design, keys)
    segment_lengths = np.repeat(lengths, draws)  # one segment a draw
    segment, token = segment_ids(segment_lengths), places_in(segment_lengths)
    numbers = uniforms(np.repeat(keys, draws)[segment], segment % draws, token, _TOKEN_STREAM)
    if design.masking == "count":
        # 1e-9 keeps ceil(0.3 * 10) at 3 where 0.3 * 10 is a hair above it.
        sizes = np.clip(np.ceil(ratio.ravel() * segment_lengths - 1e-9), 1, segment_lengths).astype(np.int64)
        order = np.lexsort((numbers, segment))
        masked = np.empty(len(numbers), dtype=bool)
        masked[order] = token < sizes[segment]  # `order` keeps segments in place, so `token` is the rank
    else:
        masked = numbers < ratio.ravel()[segment]
    counts = np.bincount(segment[masked], minlength=count * draws)
    if fill_empty and not counts.all():
        empty = np.flatnonzero(counts == 0)
        choice = uniforms(np.repeat(keys, draws)[empty], empty % draws, np.zeros_like(empty), _FALLBACK_STREAM)
        masked[offsets_of(segment_lengths)[empty] + (choice * segment_lengths[empty]).astype(np.int64)] = True
        counts[empty] = 1
    return MaskDraws(ratio, level, lengths, masked, counts.reshape(count, draws))


def _ratios(design: MaskDesign, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mask ratio in (0, 1] and level of each draw, [n, K]. Draws run replicate by replicate."""
    count, draws = len(keys), design.num_draws
    draw = np.arange(draws)
    if design.ratios == "grid":
        level = draw % (design.levels - 1)
        return np.broadcast_to(design.level_ratios[level], (count, draws)), np.broadcast_to(level, (count, draws))
    grid_draws = np.broadcast_to(draw, (count, draws))
    numbers = uniforms(np.repeat(keys, draws), grid_draws.ravel(), np.zeros(count * draws, np.int64), _RATIO_STREAM)
    ratio = 1.0 - numbers.reshape(count, draws)  # (0, 1]
    if design.ratios == "stratified":
        strata = draws // design.num_replicates
        ratio = (draw % strata + ratio) / strata
    return ratio, np.minimum((ratio * design.levels).astype(np.int64), design.levels - 1)
