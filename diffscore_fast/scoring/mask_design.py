"""The mask design: how the K draws of a target choose their mask ratios and their masked tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from diffscore_fast.arguments import check_at_most, whole_number
from diffscore_fast.errors import InputError
from diffscore_fast.options import (
    COUPLINGS,
    DEFAULT_DRAWS,
    DEFAULT_LEVELS,
    DEFAULT_MASK_RATIOS,
    DEFAULT_MASKING,
    MASK_RATIOS,
    MASKINGS,
    MAX_DRAWS,
    MAX_LEVELS,
    Coupling,
    Masking,
    MaskRatios,
)


@dataclass(frozen=True)
class MaskDesign:
    """K draws of a mask ratio, and how a ratio masks tokens.

    Parameters
    ----------
    draws : int
        K, at most 10,000. An independent grid makes another number of draws: see `num_draws`.
    ratios : {"grid", "stratified", "uniform"}
        The mask ratios t that the score is an expectation over. `grid`: t = k / levels for k = 1 .. levels - 1, as in
        the published code. `stratified` and `uniform`: t from the whole of (0, 1].
    masking : {"bernoulli", "count"}
        `bernoulli`: each token is masked independently with probability t. `count`: ceil(t L) uniformly chosen tokens
        are masked.
    levels : int
        Number of equal bins of (0, 1] for the profile, and the spacing of the grid; at most 1,000.
    replicates : int, optional
        Number of independent repetitions of the design among the draws; the standard error is computed over them. By
        default an independent grid has as many as draws per level, `uniform` as many as draws, and the others two if K
        is even and at least 4, else one.
    coupling : {"balanced", "independent"}, optional
        How the draws of a replicate depend on each other; the expectation of the score is the same.

        `balanced` (the default, except for `uniform`): the mask sizes are spread evenly over their distribution, and
        all tokens get nearly the same total weight; exactly K draws. With two replicates or more, each is corrected by
        a regression on the others (`scoring.control_variates`).

        `independent`: masks are drawn independently, and the score is their plain mean. The grid makes
        max(1, K // levels) draws per level (K = 20 and 10 levels make 18 draws, K = 5 makes 9), `stratified` uses
        t_k = (k - 1 + u_k) / K, and `uniform` independent t.

    Raises
    ------
    InputError
        For values that are unknown, out of range, or do not go together.
    """

    draws: int = DEFAULT_DRAWS
    ratios: MaskRatios = DEFAULT_MASK_RATIOS
    masking: Masking = DEFAULT_MASKING
    levels: int = DEFAULT_LEVELS
    replicates: int | None = None
    coupling: Coupling | None = None

    def __post_init__(self) -> None:
        for name, maximum in (("draws", MAX_DRAWS), ("levels", MAX_LEVELS), ("replicates", MAX_DRAWS)):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, whole_number(name, getattr(self, name)))
                check_at_most(name, getattr(self, name), maximum)
        if self.coupling is None:
            object.__setattr__(self, "coupling", "independent" if self.ratios == "uniform" else "balanced")
        for value, known, what in (
            (self.ratios, MASK_RATIOS, "mask ratios"),
            (self.masking, MASKINGS, "masking"),
            (self.coupling, COUPLINGS, "coupling"),
        ):
            if value not in known:
                raise InputError(f"{what} {value!r} is unknown; use {' or '.join(known)}")
        if self.balanced and self.ratios == "uniform":
            raise InputError("uniform mask ratios are independent draws; balanced ones are 'stratified' or 'grid'")
        if self.draws < 1:
            raise InputError(f"draws must be at least 1, not {self.draws}")
        min_levels = 2 if self.ratios == "grid" else 1
        if self.levels < min_levels:
            raise InputError(f"levels must be at least {min_levels} for {self.ratios} mask ratios, not {self.levels}")
        if self.num_replicates < 1 or self.num_draws % self.num_replicates:
            raise InputError(f"replicates must divide the {self.num_draws} draws, {self.replicates} does not")
        if self._published_grid and self.draws_per_replicate % (self.levels - 1):
            raise InputError(
                f"every replicate of a grid needs all {self.levels - 1} levels equally often; {self.replicates} "
                f"replicates of {self.num_draws} draws in all do not have them"
            )

    @property
    def balanced(self) -> bool:
        """Whether the draws of a replicate are balanced."""
        return self.coupling == "balanced"

    @property
    def _published_grid(self) -> bool:
        return self.ratios == "grid" and not self.balanced

    @property
    def num_draws(self) -> int:
        """Draws that are made: forward passes per target, if no two masks were equal."""
        return (self.levels - 1) * max(1, self.draws // self.levels) if self._published_grid else self.draws

    @property
    def num_replicates(self) -> int:
        """Replicates that are made."""
        if self.replicates is not None:
            return self.replicates
        if self._published_grid:
            return self.num_draws // (self.levels - 1)
        if self.ratios == "uniform":
            return self.num_draws
        return 2 if self.draws >= 4 and self.draws % 2 == 0 else 1

    @property
    def draws_per_replicate(self) -> int:
        """Draws of each replicate."""
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
        """Whether the mask ratios cover the whole of (0, 1], as a lower bound on the log-likelihood needs."""
        return self.ratios != "grid"

    def count_sizes(self, ratio: np.ndarray, lengths: np.ndarray | int) -> np.ndarray:
        """Number of tokens that `count` masking masks at these ratios, in targets of these lengths."""
        # 1e-9 keeps ceil(0.3 * 10) at 3, although 0.3 * 10 is slightly above 3 in floating point.
        return np.clip(np.ceil(ratio * lengths - 1e-9), 1, lengths).astype(np.int64)
