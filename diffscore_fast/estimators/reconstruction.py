"""Masked reconstruction: the DiffScore estimators over K mask draws."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from diffscore_fast.engine.ragged import offsets_of, segment_ids
from diffscore_fast.engine.runner import Observation
from diffscore_fast.engine.windows import MaskPlan, Sequences
from diffscore_fast.errors import InputError
from diffscore_fast.estimators.masks import MaskDesign, draw_masks

EstimatorName = Literal["mean_logprob", "elbo", "weighted"]


@dataclass(frozen=True)
class ReconstructionConfig:
    """Which number is made of the draws.

    Parameters
    ----------
    estimator : {"mean_logprob", "elbo", "weighted"}
        `mean_logprob`: S = (1/K) sum_k (1/|M_k|) sum_{i in M_k} log p(y_i | context, y with M_k masked); an empty M_k
        masks one uniformly chosen token instead. `elbo`: the draw's sum weighted 1/t (count masking: L/l), an empty
        draw counting 0, over L: nats a token of a lower bound on log p(y | context), where the ratios cover (0, 1].
        `weighted`: the means of the levels, weighted by level_weights; the design must hold every level equally often.
    design : MaskDesign
    level_weights : tuple of float, optional
        For `weighted`: one non-negative weight a level; normalised to sum 1.
    length_normalised : bool
        Divide once more by |y|, as one printing of the formula has it. The published values do not.
    """

    estimator: EstimatorName = "mean_logprob"
    design: MaskDesign = MaskDesign()
    level_weights: tuple[float, ...] | None = None
    length_normalised: bool = False

    def __post_init__(self) -> None:
        if self.estimator not in ("mean_logprob", "elbo", "weighted"):
            raise InputError(f"estimator {self.estimator!r} is unknown; use mean_logprob, elbo or weighted")
        levels = len(self.design.level_ratios)
        if (self.level_weights is not None) != (self.estimator == "weighted"):
            raise InputError("level weights belong to the estimator 'weighted', which needs them")
        if self.estimator == "weighted" and not self.design.holds_levels_equally:
            raise InputError(
                "weighted means need every level equally often in every replicate: grid mask ratios, or stratified "
                f"ones with a multiple of {self.design.levels} draws a replicate"
            )
        if self.level_weights is not None:
            weights = np.asarray(self.level_weights, dtype=np.float64)
            if weights.shape != (levels,) or not np.isfinite(weights).all() or (weights < 0).any() or not weights.any():
                raise InputError(f"level weights must be {levels} non-negative numbers, one a level, not all 0")

    @property
    def kind(self) -> str:
        """What the number is: "mean log-prob", or "lower bound" where the estimator is one."""
        bound = self.estimator == "elbo" and self.design.covers_all_ratios and not self.length_normalised
        return "lower bound" if bound else "mean log-prob"


@dataclass(frozen=True)
class ReconstructionResult:
    """The reduction for n targets.

    Parameters
    ----------
    replicate_scores : float64 [n, R]
        Score of each replicate; their mean is the score.
    profile : float64 [n, levels]
        Mean over the level's draws of the mean log-prob of the masked tokens; NaN where a level got no draw.
    token_log_probs : float64 [sum L]
        Mean log-prob of each token over the draws in which it was masked; NaN if in none.
    token_counts : int64 [sum L]
        Number of those draws.
    """

    replicate_scores: np.ndarray
    profile: np.ndarray
    token_log_probs: np.ndarray
    token_counts: np.ndarray


class MaskedReconstruction:
    """The DiffScore estimator (arXiv 2605.11601, equation of S(y | x)) for all targets of a `Sequences`.

    Parameters
    ----------
    config : ReconstructionConfig
    sequences : Sequences
        Every target has at least one token.
    keys : uint64 [S]
        Random key of each target.
    """

    def __init__(self, config: ReconstructionConfig, sequences: Sequences, keys: np.ndarray) -> None:
        self._config = config
        self._lengths = sequences.target_lengths
        self._draws = draw_masks(config.design, keys, self._lengths, fill_empty=config.estimator != "elbo")

    def plan(self, observed: list[Observation]) -> MaskPlan | None:
        """One round: every draw of every target."""
        if observed:
            return None
        sequence = np.repeat(np.arange(len(self._lengths)), self._config.design.num_draws)
        return MaskPlan(sequence, np.zeros_like(sequence), self._lengths[sequence], self._draws.masked)

    def reduce(self, observed: list[Observation]) -> ReconstructionResult:
        design, draws = self._config.design, self._draws
        values = observed[0].log_probs.astype(np.float64)
        shape = draws.ratio.shape
        segment_lengths = np.repeat(self._lengths, design.num_draws)
        masked_segment = segment_ids(segment_lengths)[draws.masked]
        # bincount adds in order of occurrence: a draw's sum does not depend on its neighbours.
        sums = np.bincount(masked_segment, weights=values, minlength=shape[0] * shape[1]).reshape(shape)
        means = np.divide(sums, draws.masked_counts, out=np.full(shape, np.nan), where=draws.masked_counts > 0)
        scores = self._draw_scores(sums, means)
        if self._config.length_normalised:
            scores = scores / self._lengths[:, None]
        replicates = scores.reshape(shape[0], design.num_replicates, -1).mean(axis=2)
        token_log_probs, token_counts = self._token_scores(values)
        return ReconstructionResult(replicates, self._profile(means), token_log_probs, token_counts)

    def _draw_scores(self, sums: np.ndarray, means: np.ndarray) -> np.ndarray:
        """Each draw's contribution [n, K]; the score is their plain mean."""
        config, draws = self._config, self._draws
        if config.estimator == "mean_logprob":
            return means
        if config.estimator == "weighted":
            weights = np.asarray(config.level_weights, dtype=np.float64)
            return means * (weights / weights.sum() * len(weights))[draws.level]
        if config.design.masking == "count":
            return means  # (L / l) / L = 1 / |M|
        return sums / (draws.ratio * self._lengths[:, None])

    def _profile(self, means: np.ndarray) -> np.ndarray:
        count, levels = len(self._lengths), len(self._config.design.level_ratios)
        cell = np.arange(count)[:, None] * levels + self._draws.level
        made = ~np.isnan(means)
        totals = np.bincount(cell[made], weights=means[made], minlength=count * levels)
        numbers = np.bincount(cell[made], minlength=count * levels)
        profile = np.divide(totals, numbers, out=np.full(count * levels, np.nan), where=numbers > 0)
        return profile.reshape(count, levels)

    def _token_scores(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        draws = self._draws
        segment_lengths = np.repeat(self._lengths, self._config.design.num_draws)
        segment = segment_ids(segment_lengths)
        place = np.arange(len(segment)) - offsets_of(segment_lengths)[segment]
        token = offsets_of(self._lengths)[segment // self._config.design.num_draws] + place
        total = int(self._lengths.sum())
        counts = np.bincount(token[draws.masked], minlength=total)
        sums = np.bincount(token[draws.masked], weights=values, minlength=total)
        return np.divide(sums, counts, out=np.full(total, np.nan), where=counts > 0), counts
