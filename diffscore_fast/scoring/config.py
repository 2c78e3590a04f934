"""The configuration of scores: what is scored (`ScoreConfig`), and which number is made of the draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from diffscore_fast.arguments import check_at_most, checked_seed, real_number, whole_number
from diffscore_fast.engine.plan import AttentionPattern
from diffscore_fast.errors import InputError
from diffscore_fast.options import (
    AGGREGATES,
    ATTENTION_OPTIONS,
    DEFAULT_ALPHA,
    DEFAULT_DIRECTION,
    DEFAULT_DRAWS,
    DEFAULT_ESTIMATOR,
    DEFAULT_LEVELS,
    DEFAULT_MASK_RATIOS,
    DEFAULT_MASK_WORDS,
    DEFAULT_MASKING,
    DEFAULT_MAX_DRAWS,
    DEFAULT_OVERLENGTH,
    DEFAULT_SEED,
    DEFAULT_TAGGER,
    DEFAULT_TEMPLATE,
    DIRECTIONS,
    ESTIMATORS,
    MASK_WORDS,
    MAX_DRAWS,
    OVERLENGTH_POLICIES,
    Aggregate,
    AttentionOption,
    Coupling,
    Direction,
    EstimatorName,
    FullDraws,
    Masking,
    MaskRatios,
    MaskWords,
    Overlength,
)
from diffscore_fast.scoring.mask_design import MaskDesign
from diffscore_fast.text.templates import PLAIN, Template, find_template

# The patterns that each value of `attention` reads. The corrected estimator reads all draws under the first of its
# patterns, and some of them under the second.
PATTERNS_READ: dict[str, tuple[str, ...]] = {
    "full": ("full",),
    "prefix": ("prefix",),
    "block": ("block",),
    "corrected": ("prefix", "full"),
}
PILOT_REPLICATES = 5  # of the design, each with its number of draws


@dataclass(frozen=True)
class ReconstructionConfig:
    """Which number is made of the draws.

    Parameters
    ----------
    estimator : {"mean_logprob", "elbo", "weighted"}
        `mean_logprob`: S = (1/K) sum_k (1/|M_k|) sum_{i in M_k} log p(y_i | context, y with M_k masked). An empty M_k
        masks one uniformly chosen token instead.

        `elbo`: the sum over M_k, weighted 1/t (count masking: L/l), divided by L; an empty draw counts 0. If the mask
        ratios cover (0, 1], this is a lower bound on log p(y | context), in nats per token.

        `weighted`: the means of the levels, weighted by `level_weights`. The design must have every level equally
        often.
    design : MaskDesign
    level_weights : tuple of float, optional
        For `weighted`: one non-negative weight per level; normalised to sum 1.
    length_normalised : bool
        Divide once more by |y|, as one printing of the formula has it. The published values do not.
    target_stderr : float, optional
        Standard error to aim at, in the score's unit. A pilot of 5 replicates, which the estimate does not use, sets
        how many replicates of the design a row gets.
    max_draws : int
        For `target_stderr`: the largest number of draws of a row; at most 10,000.
    full_draws : int or "auto", optional
        J, for the corrected estimator: how many draws are read under `full` as well. A multiple of the replicates, and
        at least 2. "auto" chooses for each row the J with the smallest variance times cost, by the pilot's variances.

    Raises
    ------
    InputError
        For values that are unknown, out of range, or do not go together.
    """

    estimator: EstimatorName = DEFAULT_ESTIMATOR
    design: MaskDesign = MaskDesign()
    level_weights: tuple[float, ...] | None = None
    length_normalised: bool = False
    target_stderr: float | None = None
    max_draws: int = DEFAULT_MAX_DRAWS
    full_draws: FullDraws | None = None

    def __post_init__(self) -> None:
        if self.estimator not in ESTIMATORS:
            raise InputError(f"estimator {self.estimator!r} is unknown; use {', '.join(ESTIMATORS)}")
        levels = len(self.design.level_ratios)
        if (self.level_weights is not None) != (self.estimator == "weighted"):
            raise InputError("level weights belong to the estimator 'weighted', which needs them")
        if self.estimator == "weighted" and not self.design.holds_levels_equally:
            raise InputError(
                "weighted means need every level equally often in every replicate: grid mask ratios, or stratified "
                f"ones with a multiple of {self.design.levels} draws per replicate"
            )
        if self.level_weights is not None:
            weights = np.asarray(self.level_weights, dtype=np.float64)
            if weights.shape != (levels,) or not np.isfinite(weights).all() or (weights < 0).any() or not weights.any():
                raise InputError(f"level weights must be {levels} non-negative numbers, one per level, not all 0")
        self._check_target_stderr()
        self._check_full_draws()

    def _check_target_stderr(self) -> None:
        object.__setattr__(self, "max_draws", whole_number("max draws", self.max_draws))
        check_at_most("max draws", self.max_draws, MAX_DRAWS)
        if self.target_stderr is None:
            return
        object.__setattr__(self, "target_stderr", real_number("target stderr", self.target_stderr))
        if not (np.isfinite(self.target_stderr) and self.target_stderr > 0):
            raise InputError(f"the target standard error must be a positive number, not {self.target_stderr}")
        if self.max_draws < 2 * self.design.draws_per_replicate:
            raise InputError(
                f"max draws must hold two replicates of {self.design.draws_per_replicate} draws, "
                f"{self.max_draws} do not"
            )

    def _check_full_draws(self) -> None:
        if self.full_draws is None or self.full_draws == "auto":
            return
        object.__setattr__(self, "full_draws", whole_number("full draws", self.full_draws))
        draws, replicates = self.design.num_draws, self.design.num_replicates
        if draws < 2:
            raise InputError("corrected scores need at least 2 draws; with one, their standard error would be unknown")
        if not 2 <= self.full_draws <= draws or self.full_draws % replicates:
            raise InputError(
                f"full draws must be a multiple of the {replicates} replicates, from 2 to the {draws} draws, "
                f"not {self.full_draws}"
            )

    @property
    def max_draws_held(self) -> int:
        """The largest number of draws of a target that are in memory together: the pilot's and the estimate's."""
        pilot = PILOT_REPLICATES * self.design.draws_per_replicate
        if self.target_stderr is not None:
            return pilot + self.max_draws
        return self.design.num_draws + (pilot if self.full_draws == "auto" else 0)

    @property
    def kind(self) -> str:
        """What the number is: "lower bound" if the estimator is one, else "mean log-prob"."""
        bound = self.estimator == "elbo" and self.design.covers_all_ratios and not self.length_normalised
        return "lower bound" if bound else "mean log-prob"


@dataclass(frozen=True, kw_only=True)
class ScoreConfig:
    """How rows are scored. The fields are the keyword arguments of `DiffScorer.score`.

    Raises
    ------
    InputError
        For values that are unknown, out of range, or do not go together.
    """

    direction: Direction = DEFAULT_DIRECTION
    reconstruction: ReconstructionConfig = ReconstructionConfig()
    alpha: float = DEFAULT_ALPHA
    seed: int = DEFAULT_SEED
    masks_by_item: bool = False  # rows have a third value, the name of their item: its targets share masks
    attention: str = "prefix"  # one of ATTENTION_OPTIONS
    block_size: int | None = None  # for `block`; None for the model's own, see `DiffScorer.complete`
    overlength: Overlength = DEFAULT_OVERLENGTH
    token_scores: bool = False
    template: Template = PLAIN
    aggregate: Aggregate | None = None  # of references, which take the place of the source; None for no references
    mask_words: MaskWords = DEFAULT_MASK_WORDS
    tagger: str = DEFAULT_TAGGER

    def __post_init__(self) -> None:
        for value, known, what in (
            (self.direction, DIRECTIONS, "direction"),
            (self.attention, ATTENTION_OPTIONS, "attention"),
            (self.overlength, OVERLENGTH_POLICIES, "overlength policy"),
            (self.mask_words, MASK_WORDS, "class of words"),
            (self.aggregate, (None, *AGGREGATES), "aggregate"),
        ):
            if value not in known:
                raise InputError(f"{what} {value!r} is unknown; use {', '.join(filter(None, known))}")
        if self.aggregate is not None and not self.needs_source:
            raise InputError("marginal reads no references; use another direction")
        if self.aggregate == "mean" and self.direction == "reverse" and self.token_scores:
            raise InputError("in reverse, the mean over references scores no single text; for token scores use max")
        object.__setattr__(self, "alpha", real_number("alpha", self.alpha))
        if not 0.0 <= self.alpha <= 1.0:
            raise InputError(f"alpha must lie in [0, 1], not {self.alpha}")
        if self.block_size is not None:
            object.__setattr__(self, "block_size", whole_number("block size", self.block_size))
            if self.attention != "block":
                raise InputError(f"a block size belongs to attention 'block', not to {self.attention!r}")
            if self.block_size < 1:
                raise InputError(f"a block size must be at least 1, not {self.block_size}")
        if self.corrected != (self.reconstruction.full_draws is not None):
            raise InputError("full draws belong to attention 'corrected', which needs them")
        object.__setattr__(self, "seed", checked_seed(self.seed))

    @property
    def corrected(self) -> bool:
        """Whether the score is the corrected estimate of the score under `full`: see `scoring.corrected`."""
        return self.attention == "corrected"

    @property
    def patterns(self) -> tuple[AttentionPattern, ...]:
        """Attention patterns that the model must have."""
        return tuple(AttentionPattern(name, self.block_size or 0) for name in PATTERNS_READ[self.attention])

    @property
    def needs_source(self) -> bool:
        """Whether the direction reads a source (or references)."""
        return self.direction != "marginal"

    @property
    def context_name(self) -> str:
        """The word for the text besides the candidate, in messages."""
        return "source" if self.aggregate is None else "reference"

    @property
    def kind(self) -> str:
        """What the numbers are; see `ScoreTable`."""
        if self.direction == "pmi":
            return "difference"
        # The largest of several noisy lower bounds is no lower bound: its expectation may exceed every likelihood.
        bound = self.aggregate == "max" and self.reconstruction.kind == "lower bound"
        return "maximum of lower bounds" if bound else self.reconstruction.kind

    @property
    def passes(self) -> tuple[tuple[str, float], ...]:
        """(simple direction, coefficient) pairs; the score is the sum of coefficient * score of the direction."""
        if self.direction == "bidirectional":
            return ("conditional", self.alpha), ("reverse", 1.0 - self.alpha)
        if self.direction == "pmi":
            return ("conditional", 1.0), ("marginal", -1.0)
        return ((self.direction, 1.0),)


def default_full_draws(attention: str, design: MaskDesign, full_draws: FullDraws | None) -> FullDraws | None:
    """J as given; if it is not given, the smallest possible one for the corrected estimator."""
    if attention == "corrected" and full_draws is None:
        return max(2, design.num_replicates)
    return full_draws


def make_config(
    default_pattern: str,
    *,
    direction: Direction = DEFAULT_DIRECTION,
    draws: int = DEFAULT_DRAWS,
    seed: int = DEFAULT_SEED,
    masks_by_item: bool = False,
    estimator: EstimatorName = DEFAULT_ESTIMATOR,
    mask_ratios: MaskRatios = DEFAULT_MASK_RATIOS,
    masking: Masking = DEFAULT_MASKING,
    levels: int = DEFAULT_LEVELS,
    replicates: int | None = None,
    coupling: Coupling | None = None,
    target_stderr: float | None = None,
    max_draws: int = DEFAULT_MAX_DRAWS,
    level_weights: Sequence[float] | None = None,
    length_normalised: bool = False,
    alpha: float = DEFAULT_ALPHA,
    attention: AttentionOption | None = None,
    block_size: int | None = None,
    full_draws: FullDraws | None = None,
    overlength: Overlength = DEFAULT_OVERLENGTH,
    token_scores: bool = False,
    template: str | Path | Template = DEFAULT_TEMPLATE,
    aggregate: Aggregate | None = None,
    mask_words: MaskWords = DEFAULT_MASK_WORDS,
    tagger: str = DEFAULT_TAGGER,
) -> ScoreConfig:
    """The configuration that the keyword arguments of `DiffScorer.score` describe.

    Parameters
    ----------
    default_pattern : str
        The model's, read where neither `attention` nor `block_size` is given.
    masks_by_item : bool
        Rows have items.
    aggregate : {"max", "mean"}, optional
        Rows have references, and this is made of them.

    Raises
    ------
    InputError
        For values that are unknown, out of range, or do not go together.
    """
    design = MaskDesign(
        draws, ratios=mask_ratios, masking=masking, levels=levels, replicates=replicates, coupling=coupling
    )
    weights = None
    if level_weights is not None:
        weights = tuple(real_number("a level weight", weight) for weight in level_weights)
    name = attention or ("block" if block_size is not None else default_pattern)
    reconstruction = ReconstructionConfig(
        estimator,
        design,
        weights,
        length_normalised=length_normalised,
        target_stderr=target_stderr,
        max_draws=max_draws,
        full_draws=default_full_draws(name, design, full_draws),
    )
    return ScoreConfig(
        direction=direction,
        reconstruction=reconstruction,
        alpha=alpha,
        seed=seed,
        masks_by_item=masks_by_item,
        attention=name,
        block_size=block_size,
        overlength=overlength,
        token_scores=token_scores,
        template=find_template(template),
        aggregate=aggregate,
        mask_words=mask_words,
        tagger=tagger,
    )
