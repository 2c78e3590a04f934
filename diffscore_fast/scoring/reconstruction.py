"""Masked reconstruction: the DiffScore estimator, from mask draws to scores with their standard errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from diffscore_fast.engine.plan import AttentionPattern, MaskPlan, Observation, Sequences
from diffscore_fast.engine.ragged import offsets_of, places_in, segment_ids, take_segments
from diffscore_fast.scoring.config import PILOT_REPLICATES, ReconstructionConfig
from diffscore_fast.scoring.control_variates import cross_fitted_controls
from diffscore_fast.scoring.corrected import best_picks, combined_values, pick_draws
from diffscore_fast.scoring.draws import MaskDraws, all_masks, draw_masks
from diffscore_fast.scoring.profile import draw_profile


@dataclass(frozen=True)
class ReconstructionResult:
    """Scores of n rows, which are made of S sequences.

    Parameters
    ----------
    scores, stderr : float64 [n]
        Mean over replicates, and its standard error: NaN for one replicate, 0 where all masks were enumerated.
    num_draws, full_draws : int64 [n]
        Draws of the row (or enumerated masks), the largest number of its sequences; and how many of them were read
        under `full` to correct the others, counted as often as they were picked.
    profile : float64 [n, levels]
        Mean over the level's draws of the mean log-prob of the masked tokens; NaN where a level got no draw. Balanced
        draws in several replicates give an unbiased estimate, for which every level uses all draws. In a single
        replicate it is a weighted mean, which is biased at both ends.
    token_log_probs : float64 [sum L]
        Mean log-prob of each token over the draws that masked it, weighted by their share; NaN if none did.
    token_counts : int64 [sum L]
        Number of those draws.
    """

    scores: np.ndarray
    stderr: np.ndarray
    num_draws: np.ndarray
    full_draws: np.ndarray
    profile: np.ndarray
    token_log_probs: np.ndarray
    token_counts: np.ndarray

    @staticmethod
    def none(levels: int) -> ReconstructionResult:
        """The result for no rows."""
        real, whole = np.zeros(0), np.zeros(0, np.int64)
        return ReconstructionResult(real, real, whole, whole, np.zeros((0, levels)), real, whole)


@dataclass(frozen=True)
class _Phase:
    """Draws that are evaluated and reduced together: those of the pilot, or those of the estimate.

    Parameters
    ----------
    draws : MaskDraws
    replicates, picks : int64 [S]
        Replicates of each sequence, 0 if it gets no draws or all its masks; corrected draws per replicate.
    enumerated : bool [D]
        Draws of targets whose masks are all evaluated.
    factor : float64 [D]
        Weight of a draw's difference (full - prefix); see `scoring.corrected`.
    """

    draws: MaskDraws
    replicates: np.ndarray
    picks: np.ndarray
    enumerated: np.ndarray
    factor: np.ndarray


class MaskedReconstruction:
    """The DiffScore estimator (arXiv 2605.11601, equation of S(y | x)) for all targets of a `Sequences`.

    A target with at most as many masks (2^L - 1) as draws gets all masks, with their exact weights. For balanced draws
    in several replicates, cross-fitted control variates (`scoring.control_variates`) are subtracted from the mean over
    draws: the expectation stays, and the variance falls. Their profile has a straight line as control variate. Token
    scores are plain means.

    Parameters
    ----------
    config : ReconstructionConfig
        With `full_draws`, the corrected estimator: the pattern of the run is `prefix`, and corrections are read under
        `full`.
    sequences : Sequences
        Every target has at least one token.
    keys : uint64 [S]
        Random key of each target.
    row_of : int64 [S], coefficient : float64 [S], optional
        A row's score is the sum of coefficient * score over its sequences. If not given, every row is one sequence.
    """

    def __init__(
        self,
        config: ReconstructionConfig,
        sequences: Sequences,
        keys: np.ndarray,
        row_of: np.ndarray | None = None,
        coefficient: np.ndarray | None = None,
    ) -> None:
        self._config, self._design, self._keys = config, config.design, keys
        self._lengths = sequences.target_lengths
        self._context_lengths = np.diff(sequences.context_offsets)[sequences.context_of]
        self._row_of = np.arange(len(keys)) if row_of is None else row_of
        self._coefficient = np.ones(len(keys)) if coefficient is None else coefficient
        self._corrected = config.full_draws is not None
        self._has_pilot = config.target_stderr is not None or config.full_draws == "auto"
        self._phases: list[_Phase] = []

    # A token of probability 0 makes the score of its row -inf or NaN. The caller reports it, so numpy need not warn.
    @np.errstate(invalid="ignore")
    def plan(self, observed: list[Observation]) -> MaskPlan | None:
        """Rounds: the draws of the pilot, if there is one, then those of the estimate; corrections follow each."""
        phase, part = divmod(len(observed), 2 if self._corrected else 1)
        if phase > self._has_pilot:
            return None
        if len(self._phases) == phase:
            self._phases.append(self._pilot() if phase < self._has_pilot else self._estimate(observed))
        current = self._phases[phase]
        draws = current.draws.take(self._evaluated(current)[part])
        return MaskPlan(
            draws.target,
            np.zeros_like(draws.target),
            draws.lengths,
            draws.masked,
            attention=AttentionPattern("full") if part else None,
        )

    @np.errstate(invalid="ignore")
    def reduce(self, observed: list[Observation]) -> ReconstructionResult:
        """Scores from the draws of the estimate; the pilot's are not used."""
        phase, draws = self._phases[-1], self._phases[-1].draws
        values = self._values(phase, observed)
        replicates = self._row_replicates(phase, values)
        made = np.bincount(draws.target, minlength=len(self._lengths))
        scores, stderr = _mean_and_error(replicates, self._max_in_row(phase.replicates))
        profile = draw_profile(self._design, draws, _means(draws, values), phase.replicates, phase.enumerated)
        token_log_probs, token_counts = self._token_scores(draws, values)
        return ReconstructionResult(
            scores,
            stderr,
            self._max_in_row(made),
            self._max_in_row(phase.replicates * phase.picks),
            self._sum_in_row(profile),
            token_log_probs,
            token_counts,
        )

    def _pilot(self) -> _Phase:
        """A few replicates of every target, except those that are enumerated in any case."""
        sampled = ~_masks_at_most(self._lengths, self._design.num_draws)
        picks = self._config.full_draws
        per_replicate = 1 if picks == "auto" else (picks or 0) // self._design.num_replicates
        return self._make_phase(np.where(sampled, PILOT_REPLICATES, 0), per_replicate * sampled, np.zeros_like(sampled))

    def _estimate(self, pilot_observed: list[Observation]) -> _Phase:
        """The draws of the estimate: replicates that follow those of the pilot."""
        config, design = self._config, self._design
        replicates = np.full(len(self._lengths), design.num_replicates)
        picks = np.zeros_like(replicates)
        if config.full_draws is not None and config.full_draws != "auto":
            picks += config.full_draws // design.num_replicates
        if self._has_pilot:
            pilot = self._phases[0]
            scores = self._row_replicates(pilot, self._values(pilot, pilot_observed))
            variance = _finite(scores.var(axis=1, ddof=1))
            if config.full_draws == "auto":
                prefix = self._row_replicates(pilot, self._values(pilot, pilot_observed, corrected=False))
                row_picks, variance = best_picks(
                    design,
                    _finite(prefix.var(axis=1, ddof=1)),
                    _finite((scores - prefix).var(axis=1, ddof=1)),
                    np.bincount(self._row_of, weights=self._lengths),
                    np.bincount(self._row_of, weights=self._lengths + self._context_lengths),
                )
                picks = row_picks[self._row_of]
            if config.target_stderr is not None:
                # With f degrees of freedom the estimate s^2 is often too low: E[1/s^2] = f / (f - 2) / sigma^2.
                freedom = PILOT_REPLICATES - 1
                needed = variance / config.target_stderr**2 * freedom / (freedom - 2)
                needed = np.ceil(np.minimum(needed, config.max_draws))
                replicates = np.clip(needed, 2, config.max_draws // design.draws_per_replicate)
                replicates = replicates.astype(np.int64)[self._row_of]
        draws = np.maximum(replicates * design.draws_per_replicate, design.num_draws)
        return self._make_phase(
            replicates, picks, _masks_at_most(self._lengths, draws), first=PILOT_REPLICATES * self._has_pilot
        )

    def _make_phase(
        self, replicates: np.ndarray, picks: np.ndarray, enumerate_all: np.ndarray, first: int = 0
    ) -> _Phase:
        """Draws of all sequences: `replicates` of the design, or all masks of those that are enumerated."""
        options: dict[str, Any] = {
            "elbo": self._config.estimator == "elbo",
            "level_weights": self._config.level_weights,
        }
        replicates = np.where(enumerate_all, 0, replicates)
        draws = MaskDraws.join(
            [
                draw_masks(self._design, self._keys, self._lengths, replicates, first=first, **options),
                all_masks(self._design, self._lengths, np.flatnonzero(enumerate_all), **options),
            ]
        )
        enumerated = enumerate_all[draws.target]
        factor = np.ones(len(enumerated))
        if self._corrected:
            sampled = np.flatnonzero(~enumerated)
            factor[sampled] = pick_draws(self._design, self._keys, draws.take(sampled), picks)
        return _Phase(draws, replicates, picks, enumerated, factor)

    def _evaluated(self, phase: _Phase) -> list[np.ndarray]:
        """Indices of the draws of each round: all draws; or those under `prefix`, and those under `full`."""
        if not self._corrected:
            return [np.arange(len(phase.factor))]
        return [np.flatnonzero(~phase.enumerated), np.flatnonzero(phase.factor)]

    def _values(self, phase: _Phase, observed: list[Observation], *, corrected: bool = True) -> np.ndarray:
        """Log-prob of every masked token of the draws; for the corrected estimator see `combined_values`."""
        parts = self._evaluated(phase)
        own = observed[-len(parts) :]
        if not self._corrected:
            return own[0].log_probs.astype(np.float64)
        full = own[1].log_probs if corrected else None
        return combined_values(phase.draws.counts, phase.factor, parts[0], own[0].log_probs, parts[1], full)

    def _row_replicates(self, phase: _Phase, values: np.ndarray) -> np.ndarray:
        """Score of each replicate of each row, float64 [n, max replicates]; an enumerated score is repeated."""
        draws, width = phase.draws, int(phase.replicates.max(initial=1))
        if phase is self._phases[0] and self._has_pilot:
            width = PILOT_REPLICATES  # also if no target is sampled: the variance is then 0, not unknown
        means = self._controlled_means(phase, values)
        scores = np.multiply(draws.weight, means, where=draws.weight != 0, out=np.zeros(len(means)))
        if self._config.length_normalised:
            scores = scores / draws.lengths
        # bincount adds in order of occurrence: a sum does not depend on the neighbours.
        cell = draws.target * width + draws.replicate
        by_target = np.bincount(cell, weights=scores, minlength=len(self._lengths) * width).reshape(-1, width)
        exact = np.unique(draws.target[phase.enumerated])
        by_target[exact] = by_target[exact, :1]
        return self._sum_in_row(by_target)

    def _controlled_means(self, phase: _Phase, values: np.ndarray) -> np.ndarray:
        """Mean log-prob of each draw, [D].

        For balanced draws in several replicates: less the mean control, plus its expectation over the replicate.
        """
        draws, means = phase.draws, _means(phase.draws, values)
        several = np.flatnonzero(~phase.enumerated & (phase.replicates[draws.target] > 1))
        if not self._design.balanced or not len(several):
            return means
        entries = take_segments(offsets_of(draws.counts), several)
        chosen = draws.take(several)
        control, expectation = cross_fitted_controls(chosen, values[entries])
        means[several] += expectation - _means(chosen, control)
        return means

    def _sum_in_row(self, values: np.ndarray) -> np.ndarray:
        """Sums [n, m] over the sequences of each row, from values [S, m] times the coefficients."""
        out = np.zeros((int(self._row_of.max(initial=-1)) + 1, values.shape[1]))
        coefficient = self._coefficient[:, None]
        # A coefficient of 0 leaves its term out, also if that is NaN or infinite.
        terms = np.multiply(coefficient, values, where=coefficient != 0, out=np.zeros(values.shape))
        np.add.at(out, self._row_of, terms)
        return out

    def _max_in_row(self, values: np.ndarray) -> np.ndarray:
        """Maximum over the sequences of each row, int64 [n]."""
        out = np.zeros(int(self._row_of.max(initial=-1)) + 1, dtype=np.int64)
        np.maximum.at(out, self._row_of, values)
        return out

    def _token_scores(self, draws: MaskDraws, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean log-prob of each token over the draws that masked it, and their number, [sum L]."""
        token = (np.repeat(offsets_of(self._lengths)[draws.target], draws.lengths) + places_in(draws.lengths))[
            draws.masked
        ]
        share, total = np.repeat(draws.share, draws.counts), int(self._lengths.sum())
        shares = np.bincount(token, weights=share, minlength=total)
        sums = np.bincount(token, weights=share * values, minlength=total)
        means = np.divide(sums, shares, out=np.full(total, np.nan), where=shares > 0)
        return means, np.bincount(token, minlength=total)


def _finite(variance: np.ndarray) -> np.ndarray:
    """The variance; 0 where it is not finite: a row of infinite scores gets the smallest number of draws."""
    return np.where(np.isfinite(variance), variance, 0.0)


def _masks_at_most(lengths: np.ndarray, draws: np.ndarray | int) -> np.ndarray:
    """Whether a target has at most as many nonempty masks as draws, bool [S]."""
    return 2.0 ** np.minimum(lengths, 64) - 1.0 <= draws


def _means(draws: MaskDraws, values: np.ndarray) -> np.ndarray:
    """Mean log-prob of each draw's masked tokens, [D]; 0 for an empty draw."""
    sums = np.bincount(segment_ids(draws.counts), weights=values, minlength=len(draws.counts))
    return sums / np.maximum(draws.counts, 1)


def _mean_and_error(replicates: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean [n] over the first `counts` replicates of each row, and its standard error. A count of 0: exact, error 0."""
    made = np.maximum(counts, 1)
    used = np.arange(replicates.shape[1]) < made[:, None]
    # cumsum adds one by one: the sum does not depend on the width, which other rows decide.
    means = np.where(used, replicates, 0.0).cumsum(axis=1)[:, -1] / made
    squares = np.where(used, (replicates - means[:, None]) ** 2, 0.0).cumsum(axis=1)[:, -1]
    error = np.sqrt(squares / (np.maximum(made - 1, 1) * made))
    return means, np.where(counts == 0, 0.0, np.where(counts == 1, np.nan, error))
