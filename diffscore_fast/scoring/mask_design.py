"""Mask designs: how the K draws of a target choose their mask ratios and their masked tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from diffscore_fast.arguments import check_at_most, whole_number
from diffscore_fast.errors import InputError
from diffscore_fast.options import MAX_DRAWS, MAX_LEVELS

MaskRatios = Literal["grid", "stratified", "uniform"]
Masking = Literal["bernoulli", "count"]
Coupling = Literal["balanced", "independent"]


@dataclass(frozen=True)
class MaskDesign:
    """K draws of a mask ratio, and how a ratio masks tokens.

    Parameters
    ----------
    draws : int
        K as asked for, at most 10,000. `num_draws` says how many are made.
    ratios : {"grid", "stratified", "uniform"}
        What the score is an expectation over. `grid`: t = k / levels for k = 1 .. levels - 1, as in the published
        code. `stratified` and `uniform`: t from the whole of (0, 1].
    masking : {"bernoulli", "count"}
        `bernoulli`: each token independently with probability t. `count`: ceil(t L) tokens, uniformly chosen.
    levels : int
        Number of equal bins of (0, 1] for the profile, and the spacing of the grid; at most 1,000.
    replicates : int, optional
        Independent repetitions of the design among the draws; the standard error is taken over them. By default an
        independent grid has one a draw of each level, `uniform` one a draw, the others two where K is even and at
        least 4.
    coupling : {"balanced", "independent"}, optional
        How the draws of a replicate hang together; the expectation is the same. `balanced` (default, not for
        `uniform`): the sizes of the masks are spread evenly over their distribution, and tokens are shared out so
        that each has nearly the same total weight; exactly K draws. With two replicates or more, what the others say
        of tokens and neighbours corrects each (`estimators.controls`). `independent`: masks are drawn without regard
        to each other, and their plain mean is taken; on the grid max(1, K // levels) a level (K = 20 and 10 levels
        make 18 draws, K = 5 makes 9), `stratified` with t_k = (k - 1 + u_k) / K, `uniform` with independent t.
    """

    draws: int = 8
    ratios: MaskRatios = "grid"
    masking: Masking = "bernoulli"
    levels: int = 10
    replicates: int | None = None
    coupling: Coupling | None = None

    def __post_init__(self) -> None:
        for name, most in (("draws", MAX_DRAWS), ("levels", MAX_LEVELS), ("replicates", MAX_DRAWS)):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, whole_number(name, getattr(self, name)))
                check_at_most(name, getattr(self, name), most)
        if self.coupling is None:
            object.__setattr__(self, "coupling", "independent" if self.ratios == "uniform" else "balanced")
        for value, known, what in (
            (self.ratios, ("grid", "stratified", "uniform"), "mask ratios"),
            (self.masking, ("bernoulli", "count"), "masking"),
            (self.coupling, ("balanced", "independent"), "coupling"),
        ):
            if value not in known:
                raise InputError(f"{what} {value!r} is unknown; use {' or '.join(known)}")
        if self.balanced and self.ratios == "uniform":
            raise InputError("uniform mask ratios are independent draws; balanced ones are 'stratified' or 'grid'")
        if self.draws < 1:
            raise InputError(f"draws must be at least 1, not {self.draws}")
        least = 2 if self.ratios == "grid" else 1
        if self.levels < least:
            raise InputError(f"levels must be at least {least} for {self.ratios} mask ratios, not {self.levels}")
        if self.num_replicates < 1 or self.num_draws % self.num_replicates:
            raise InputError(f"replicates must divide the {self.num_draws} draws, {self.replicates} does not")
        if self._published_grid and self.draws_per_replicate % (self.levels - 1):
            raise InputError(
                f"a grid replicate holds every level equally often; {self.replicates} replicates of "
                f"{self.num_draws} draws over {self.levels - 1} levels cannot"
            )

    @property
    def balanced(self) -> bool:
        return self.coupling == "balanced"

    @property
    def _published_grid(self) -> bool:
        return self.ratios == "grid" and not self.balanced

    @property
    def num_draws(self) -> int:
        """Draws actually made, which is forward passes a target without deduplication."""
        return (self.levels - 1) * max(1, self.draws // self.levels) if self._published_grid else self.draws

    @property
    def num_replicates(self) -> int:
        if self.replicates is not None:
            return self.replicates
        if self._published_grid:
            return self.num_draws // (self.levels - 1)
        if self.ratios == "uniform":
            return self.num_draws
        return 2 if self.draws >= 4 and self.draws % 2 == 0 else 1

    @property
    def draws_per_replicate(self) -> int:
        return self.num_draws // self.num_replicates

    @property
    def level_ratios(self) -> np.ndarray:
        """Mask ratio of each level of the profile: the grid's values, or the middles of the bins. float64 [levels]."""
        if self.ratios == "grid":
            return np.arange(1, self.levels) / self.levels
        return (np.arange(self.levels) + 0.5) / self.levels

    @property
    def holds_levels_equally(self) -> bool:
        """Whether every replicate gives all levels the same weight."""
        return (
            self.ratios == "grid"
            or self.balanced
            or (self.ratios == "stratified" and self.draws_per_replicate % self.levels == 0)
        )

    @property
    def covers_all_ratios(self) -> bool:
        """Whether the mask ratios follow the whole of (0, 1], which a lower bound on log-likelihood needs."""
        return self.ratios != "grid"

    def count_sizes(self, ratio: np.ndarray, lengths: np.ndarray | int) -> np.ndarray:
        """Tokens that `count` masking masks at these ratios, of targets of these lengths."""
        # 1e-9 keeps ceil(0.3 * 10) at 3 where 0.3 * 10 is a hair above it.
        return np.clip(np.ceil(ratio * lengths - 1e-9), 1, lengths).astype(np.int64)
