"""Masked reconstruction: the DiffScore estimators over K mask draws."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from diffscore_fast.arguments import check_at_most, real_number, whole_number
from diffscore_fast.engine.plan import AttentionPattern, MaskPlan, Observation, Sequences
from diffscore_fast.engine.ragged import offsets_of, places_in, segment_ids, take_segments
from diffscore_fast.errors import InputError
from diffscore_fast.options import MAX_DRAWS
from diffscore_fast.scoring.control_variates import cross_fitted_controls
from diffscore_fast.scoring.draws import MaskDraws, all_masks, draw_masks, pick_draws
from diffscore_fast.scoring.mask_design import MaskDesign

EstimatorName = Literal["mean_logprob", "elbo", "weighted"]

PILOT_REPLICATES = 5  # of the design, each with its number of draws
# What the straight line of a profile leans to where few draws were made, in nats for a mask of all tokens, and how
# firmly. It decides how much variance goes, never the expectation.
PROFILE_SLOPE, PROFILE_RIDGE = -2.0, 0.3


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
    target_stderr : float, optional
        Standard error to aim at, in the score's unit. A pilot of 5 replicates, which the estimate does not use, sets
        how many replicates of the design a row gets.
    max_draws : int
        Most draws that a row may get for it; itself at most 10,000.
    full_draws : int or "auto", optional
        J, for attention "corrected": draws of the design that are evaluated under `full` as well, a multiple of the
        replicates and at least 2. "auto" takes for each row the J with the least variance times cost, by the
        variances of the pilot.
    """

    estimator: EstimatorName = "mean_logprob"
    design: MaskDesign = MaskDesign()
    level_weights: tuple[float, ...] | None = None
    length_normalised: bool = False
    target_stderr: float | None = None
    max_draws: int = 128
    full_draws: int | Literal["auto"] | None = None

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

        self._check_rounds()

    def _check_rounds(self) -> None:
        design = self.design
        object.__setattr__(self, "max_draws", whole_number("max draws", self.max_draws))
        check_at_most("max draws", self.max_draws, MAX_DRAWS)
        if self.target_stderr is not None:
            object.__setattr__(self, "target_stderr", real_number("target stderr", self.target_stderr))
            if not (np.isfinite(self.target_stderr) and self.target_stderr > 0):
                raise InputError(f"the target standard error must be a positive number, not {self.target_stderr}")
            if self.max_draws < 2 * design.draws_per_replicate:
                raise InputError(
                    f"max draws must hold two replicates of {design.draws_per_replicate} draws, {self.max_draws} do not"
                )
        if self.full_draws is None or self.full_draws == "auto":
            return
        object.__setattr__(self, "full_draws", whole_number("full draws", self.full_draws))
        if design.num_draws < 2:
            raise InputError("corrected scores need at least 2 draws; their error would be unknown with one")
        if not 2 <= self.full_draws <= design.num_draws or self.full_draws % design.num_replicates:
            raise InputError(
                f"full draws must be a multiple of the {design.num_replicates} replicates, from 2 to the "
                f"{design.num_draws} draws, not {self.full_draws}"
            )

    @property
    def most_draws(self) -> int:
        """Draws of a target that are held at once, at most: the pilot's and the estimate's."""
        pilot = PILOT_REPLICATES * self.design.draws_per_replicate
        if self.target_stderr is not None:
            return pilot + self.max_draws
        return self.design.num_draws + (pilot if self.full_draws == "auto" else 0)

    @property
    def kind(self) -> str:
        """What the number is: "mean log-prob", or "lower bound" where the estimator is one."""
        bound = self.estimator == "elbo" and self.design.covers_all_ratios and not self.length_normalised
        return "lower bound" if bound else "mean log-prob"


@dataclass(frozen=True)
class ReconstructionResult:
    """The reduction for n rows of S sequences.

    Parameters
    ----------
    scores, stderr : float64 [n]
        Mean over replicates, and its standard error: NaN for one replicate, 0 where all masks were enumerated.
    num_draws, full_draws : int64 [n]
        Draws, or masks enumerated, of the row (the most of its sequences), and how many of them, counted as often as
        they were picked, were evaluated under `full` to correct the others.
    profile : float64 [n, levels]
        Mean over the level's draws of the mean log-prob of the masked tokens; NaN where a level got no draw. Of
        balanced draws in several replicates, an unbiased estimate of it, every level of which rests on all draws; in
        a single replicate a weighted mean, which has a bias at the ends.
    token_log_probs : float64 [sum L]
        Mean log-prob of each token over the draws in which it was masked, by their share; NaN if in none.
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
        """For no rows."""
        real, whole = np.zeros(0), np.zeros(0, np.int64)
        return ReconstructionResult(real, real, whole, whole, np.zeros((0, levels)), real, whole)


@dataclass(frozen=True)
class _Phase:
    """Draws that are evaluated and reduced together: the pilot's, or the estimate's.

    Parameters
    ----------
    draws : MaskDraws
    replicates, picks : int64 [S]
        Replicates of each sequence, 0 where it gets no draws or all its masks; corrected draws in each.
    enumerated : bool [D]
        Draws that are all masks of their target.
    factor : float64 [D]
        Weight of a draw's difference (full - prefix), of expectation 1; 0 where it is not picked.
    """

    draws: MaskDraws
    replicates: np.ndarray
    picks: np.ndarray
    enumerated: np.ndarray
    factor: np.ndarray


class MaskedReconstruction:
    """The DiffScore estimator (arXiv 2605.11601, equation of S(y | x)) for all targets of a `Sequences`.

    A target whose 2^L - 1 masks are no more than its draws gets all of them, with their exact weights. The score of
    balanced draws in several replicates is that mean over draws less cross-fitted control variates (`controls`): the
    same expectation with less variance. Their profile has a straight line as a control variate; token scores are plain
    means.

    Parameters
    ----------
    config : ReconstructionConfig
        With `full_draws`, the run's attention is the cheap one, and corrections are read under `full`.
    sequences : Sequences
        Every target has at least one token.
    keys : uint64 [S]
        Random key of each target.
    row_of : int64 [S], coefficient : float64 [S], optional
        A row's score is the sum of coefficient * score over its sequences; one sequence a row if not given.
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

    # A token of probability 0 makes its row's score -inf or NaN, which the caller names; numpy need not warn of it.
    @np.errstate(invalid="ignore")
    def plan(self, observed: list[Observation]) -> MaskPlan | None:
        """Rounds: the pilot's draws if there is one, then the estimate's; each followed by its corrections if any."""
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
        phase, draws = self._phases[-1], self._phases[-1].draws
        values = self._values(phase, observed)
        replicates = self._row_replicates(phase, values)
        made = np.bincount(draws.target, minlength=len(self._lengths))
        scores, stderr = _mean_and_error(replicates, self._most_in_row(phase.replicates))
        token_log_probs, token_counts = self._token_scores(draws, values)
        return ReconstructionResult(
            scores,
            stderr,
            self._most_in_row(made),
            self._most_in_row(phase.replicates * phase.picks),
            self._sum_in_row(self._profile(phase, _means(draws, values))),
            token_log_probs,
            token_counts,
        )

    def _pilot(self) -> _Phase:
        """A few replicates of every target that will not be enumerated in any case."""
        sampled = ~_masks_at_most(self._lengths, self._design.num_draws)
        picks = self._config.full_draws
        per_replicate = 1 if picks == "auto" else (picks or 0) // self._design.num_replicates
        return self._make_phase(np.where(sampled, PILOT_REPLICATES, 0), per_replicate * sampled, np.zeros_like(sampled))

    def _estimate(self, pilot_observed: list[Observation]) -> _Phase:
        """The estimate's draws, which count on after the pilot's."""
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
                cheap = self._row_replicates(pilot, self._values(pilot, pilot_observed, corrected=False))
                row_picks, variance = self._best_picks(
                    _finite(cheap.var(axis=1, ddof=1)), _finite((scores - cheap).var(axis=1, ddof=1))
                )
                picks = row_picks[self._row_of]
            if config.target_stderr is not None:
                # A variance s^2 estimated by f degrees of freedom is often too low: E[1/s^2] = f / (f - 2) / sigma^2.
                freedom = PILOT_REPLICATES - 1
                needed = variance / config.target_stderr**2 * freedom / (freedom - 2)
                needed = np.ceil(np.minimum(needed, config.max_draws))
                replicates = np.clip(needed, 2, config.max_draws // design.draws_per_replicate)
                replicates = replicates.astype(np.int64)[self._row_of]
        draws = np.maximum(replicates * design.draws_per_replicate, design.num_draws)
        return self._make_phase(
            replicates, picks, _masks_at_most(self._lengths, draws), first=PILOT_REPLICATES * self._has_pilot
        )

    def _best_picks(self, cheap: np.ndarray, difference: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Corrections a replicate with the least variance times cost, and that variance, for each row.

        `cheap` and `difference` are variances of a replicate with one correction. A cost is the tokens of a window;
        the prefix, shared by draws and candidates, is left out.
        """
        per = self._design.draws_per_replicate
        picks = np.arange(1 if self._design.num_replicates > 1 else min(2, per), per + 1)
        variance = cheap[:, None] + difference[:, None] * (1.0 / picks - 1.0 / per)
        cheap_cost = np.bincount(self._row_of, weights=self._lengths)[:, None]
        full_cost = np.bincount(self._row_of, weights=self._lengths + self._context_lengths)[:, None]
        best = (variance * (per * cheap_cost + picks * full_cost)).argmin(axis=1)
        return picks[best], np.take_along_axis(variance, best[:, None], axis=1)[:, 0]

    def _make_phase(
        self, replicates: np.ndarray, picks: np.ndarray, enumerate_all: np.ndarray, first: int = 0
    ) -> _Phase:
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
        """Draws of each part: all; or those under the cheap pattern and those under `full`."""
        if not self._corrected:
            return [np.arange(len(phase.factor))]
        return [np.flatnonzero(~phase.enumerated), np.flatnonzero(phase.factor)]

    def _values(self, phase: _Phase, observed: list[Observation], *, corrected: bool = True) -> np.ndarray:
        """Log-prob of every masked token of the draws: cheap + factor * (full - cheap), where there are both."""
        parts = self._evaluated(phase)
        own = observed[-len(parts) :]
        if not self._corrected:
            return own[0].log_probs.astype(np.float64)
        offsets = offsets_of(phase.draws.counts)
        values = np.zeros(int(offsets[-1]))  # enumerated masks are read under `full` alone
        values[take_segments(offsets, parts[0])] = own[0].log_probs
        if corrected:
            at = take_segments(offsets, parts[1])
            factor = np.repeat(phase.factor[parts[1]], phase.draws.counts[parts[1]])
            values[at] += factor * (own[1].log_probs - values[at])
        return values

    def _row_replicates(self, phase: _Phase, values: np.ndarray) -> np.ndarray:
        """Score of each replicate of each row, float64 [n, most replicates]; an enumerated score is in all of them."""
        draws, width = phase.draws, int(phase.replicates.max(initial=1))
        if phase is self._phases[0] and self._has_pilot:
            width = PILOT_REPLICATES  # also where no target is sampled: no variance then, not an unknown one
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
        """Mean log-prob of each draw, [D]; where balanced draws have another replicate, less the mean control and plus
        its expectation over the replicate, whose shares sum to 1."""
        draws, means = phase.draws, _means(phase.draws, values)
        several = np.flatnonzero(~phase.enumerated & (phase.replicates[draws.target] > 1))
        if not self._design.balanced or not len(several):
            return means
        entries = take_segments(offsets_of(draws.counts), several)
        chosen = draws.take(several)
        control, expectation = cross_fitted_controls(chosen, values[entries])
        means[several] += expectation - _means(chosen, control)
        return means

    def _profile(self, phase: _Phase, means: np.ndarray) -> np.ndarray:
        """Profile of each sequence, [S, levels]: see `_level_means`; of balanced replicates, `_unbiased_levels`."""
        draws, count = phase.draws, len(self._lengths)
        profile = _level_means(draws, means, count)
        several = np.flatnonzero(~phase.enumerated & (phase.replicates[draws.target] > 1))
        one_size = self._design.masking == "count" and self._design.ratios == "grid"  # in each level: equal weights
        if self._design.balanced and not one_size and len(several):
            targets = np.unique(draws.target[several])
            profile[targets] = _unbiased_levels(draws.take(several), means[several], phase.replicates, targets)
        return profile

    def _sum_in_row(self, values: np.ndarray) -> np.ndarray:
        """Values [S, m] of sequences, with their coefficients, as values [n, m] of rows."""
        out = np.zeros((int(self._row_of.max(initial=-1)) + 1, values.shape[1]))
        coefficient = self._coefficient[:, None]
        # What has no part in the sum is 0, be it NaN or infinite.
        terms = np.multiply(coefficient, values, where=coefficient != 0, out=np.zeros(values.shape))
        np.add.at(out, self._row_of, terms)
        return out

    def _most_in_row(self, values: np.ndarray) -> np.ndarray:
        out = np.zeros(int(self._row_of.max(initial=-1)) + 1, dtype=np.int64)
        np.maximum.at(out, self._row_of, values)
        return out

    def _token_scores(self, draws: MaskDraws, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        token = (np.repeat(offsets_of(self._lengths)[draws.target], draws.lengths) + places_in(draws.lengths))[
            draws.masked
        ]
        share, total = np.repeat(draws.share, draws.counts), int(self._lengths.sum())
        shares = np.bincount(token, weights=share, minlength=total)
        sums = np.bincount(token, weights=share * values, minlength=total)
        means = np.divide(sums, shares, out=np.full(total, np.nan), where=shares > 0)
        return means, np.bincount(token, minlength=total)


def _finite(variance: np.ndarray) -> np.ndarray:
    """0 in place of what is no number: a row of infinite scores needs no more draws than the least."""
    return np.where(np.isfinite(variance), variance, 0.0)


def _masks_at_most(lengths: np.ndarray, draws: np.ndarray | int) -> np.ndarray:
    """Whether a target's nonempty masks are no more than its draws, [S]."""
    return 2.0 ** np.minimum(lengths, 64) - 1.0 <= draws


def _means(draws: MaskDraws, values: np.ndarray) -> np.ndarray:
    """Mean log-prob of each draw's masked tokens, [D]; 0 for an empty draw."""
    sums = np.bincount(segment_ids(draws.counts), weights=values, minlength=len(draws.counts))
    return sums / np.maximum(draws.counts, 1)


def _unbiased_levels(draws: MaskDraws, means: np.ndarray, replicates: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Profile of balanced draws in several replicates, [len(targets), levels], without bias.

    A draw's weight w in a level is (chance of its size there) / (chance in the design): E[sum w m] / E[sum w] is the
    level's mean. Dividing by the realised sum of w would be biased, and by the expected one alone noisy, since that sum
    moves by a third. So the weights act on what a straight line in the mask ratio leaves,

        profile = mean over replicates of [sum w (m - a - b x) + a E[sum w] + b E[sum w x]] / E[sum w],  x = |M| / L,

    where a and b are fitted to the target's *other* replicates: given these, a fixed function, and so no bias.
    """
    # Units are replicates of targets; all have as many draws, and lie side by side.
    own = replicates[targets]
    per = len(draws.target) // int(own.sum())
    of_target = np.repeat(np.arange(len(targets)), own)
    x, m = (draws.counts / draws.lengths).reshape(-1, per), means.reshape(-1, per)
    share = draws.share.reshape(-1, per) * per

    def of_others(values: np.ndarray) -> np.ndarray:
        """Sums over the target's other replicates of a sum over the draws of each."""
        own_sums = values.sum(axis=1)
        return np.bincount(of_target, weights=own_sums)[of_target] - own_sums

    total = of_others(share)
    mean_x, mean_m = of_others(share * x) / total, of_others(share * m) / total
    spread = of_others(share * x**2) - total * mean_x**2
    slope = of_others(share * x * m) - total * mean_x * mean_m
    slope = (slope + PROFILE_RIDGE * PROFILE_SLOPE) / (np.maximum(spread, 0.0) + PROFILE_RIDGE)
    line = mean_m - slope * mean_x
    weights = draws.level_weights.reshape(len(x), per, -1)
    left = m - line[:, None] - slope[:, None] * x
    first = np.arange(len(x)) * per
    mass, ratio = draws.level_mass[first], draws.level_ratio[first]
    sums = np.einsum("ukl,uk->ul", weights, left) + slope[:, None] * ratio
    levels = np.divide(sums, mass, out=np.full(mass.shape, np.nan), where=mass > 0) + line[:, None]
    profile = np.zeros((len(targets), levels.shape[1]))
    np.add.at(profile, of_target, levels / own[of_target, None])
    return profile


def _level_means(draws: MaskDraws, means: np.ndarray, count: int) -> np.ndarray:
    """Mean of the draws by level, [S, levels]; NaN where a level got no draw.

    With exact weights (all masks, or a ratio a draw) it is the level's mean or has it as expectation; for a single
    replicate of balanced draws it divides by the realised weight, which biases the ends.
    """
    levels = draws.level_weights.shape[1]
    cell = (draws.target[:, None] * levels + np.arange(levels)).ravel()
    weights = draws.level_weights.ravel()
    terms = np.repeat(means, levels)
    terms = np.multiply(weights, terms, where=weights != 0, out=np.zeros(len(terms)))  # no part in it: be it infinite
    totals = np.bincount(cell, weights=terms, minlength=count * levels)
    masses = np.bincount(cell, weights=weights, minlength=count * levels)
    profile = np.divide(totals, masses, out=np.full(count * levels, np.nan), where=masses > 0)
    return profile.reshape(count, levels)


def _mean_and_error(replicates: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean [n] over the first `counts` replicates of each row, and its standard error; a count of 0 is exact."""
    made = np.maximum(counts, 1)
    used = np.arange(replicates.shape[1]) < made[:, None]
    # cumsum adds one by one, whatever the width, which is that of the row with the most replicates.
    means = np.where(used, replicates, 0.0).cumsum(axis=1)[:, -1] / made
    squares = np.where(used, (replicates - means[:, None]) ** 2, 0.0).cumsum(axis=1)[:, -1]
    error = np.sqrt(squares / (np.maximum(made - 1, 1) * made))
    return means, np.where(counts == 0, 0.0, np.where(counts == 1, np.nan, error))
