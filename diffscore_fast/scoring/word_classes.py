"""One class of words: an estimator for some tokens of each target; the others are read, but never masked or scored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from diffscore_fast.engine.plan import Estimator, MaskPlan, Observation, Sequences
from diffscore_fast.engine.ragged import offsets_of, segment_ids, take_segments
from diffscore_fast.scoring.reconstruction import ReconstructionResult


class WithinEligible:
    """Runs an estimator on targets reduced to their eligible tokens, and extends its masks to the whole targets.

    Parameters
    ----------
    eligible : bool [sum of target lengths]
        Every target has at least one.
    sequences : Sequences
    build : callable
        Makes the estimator for the reduced sequences.
    """

    def __init__(
        self, eligible: np.ndarray, sequences: Sequences, build: Callable[[Sequences], Estimator[ReconstructionResult]]
    ) -> None:
        self._eligible, self._sequences = eligible, sequences
        counts = np.bincount(segment_ids(sequences.target_lengths)[eligible], minlength=len(sequences.context_of))
        assert counts.all(), "a target without eligible tokens"
        reduced = replace(sequences, target_tokens=sequences.target_tokens[eligible], target_offsets=offsets_of(counts))
        self._inner = build(reduced)
        self._plans: list[MaskPlan] = []

    def plan(self, observed: list[Observation]) -> MaskPlan | None:
        """The inner plan, on the whole targets."""
        plan = self._inner.plan(self._inner_view(observed))
        if plan is None:
            return None
        assert not plan.start.any(), "the estimator must plan whole targets"
        self._plans.append(plan)
        lengths = self._sequences.target_lengths[plan.sequence]
        eligible = self._eligible[take_segments(self._sequences.target_offsets, plan.sequence)]

        def spread(flags: np.ndarray) -> np.ndarray:
            out = np.zeros(len(eligible), dtype=bool)
            out[eligible] = flags
            return out

        wanted = None if plan.wanted is None else spread(plan.wanted)
        return replace(plan, stop=lengths, masked=spread(plan.masked), wanted=wanted)

    def reduce(self, observed: list[Observation]) -> ReconstructionResult:
        """The inner result. Tokens that are not eligible have no score, and count 0."""
        result = self._inner.reduce(self._inner_view(observed))
        log_probs, counts = np.full(len(self._eligible), np.nan), np.zeros(len(self._eligible), dtype=np.int64)
        log_probs[self._eligible], counts[self._eligible] = result.token_log_probs, result.token_counts
        return replace(result, token_log_probs=log_probs, token_counts=counts)

    def _inner_view(self, observed: list[Observation]) -> list[Observation]:
        # The masked tokens keep their order, so the log-probs need no permutation.
        return [replace(item, plan=plan) for plan, item in zip(self._plans, observed, strict=True)]
