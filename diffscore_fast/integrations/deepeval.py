"""DiffScore as a metric of DeepEval: `DiffScoreMetric(threshold=0.2)`; needs the extra `deepeval`."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from deepeval.metrics import BaseMetric
from deepeval.test_case import LLMTestCase

from diffscore_fast.errors import InputError
from diffscore_fast.integrations.rows import RowScorer, check_has_unit_interval, unit_interval


class DiffScoreMetric(BaseMetric):
    """exp(score) of the actual output: the geometric mean of its masked tokens' probabilities, in (0, 1].

    `score_breakdown` has the score in nats per token and its standard error. A test case without a score has score
    None, `error` says why, and it does not pass.

    Parameters
    ----------
    threshold : float
        Least exp(score) that passes; there is no value that suits every model and every kind of text.
    model : str
        As for `DiffScorer`.
    against : {"input", "expected_output"}
        What the output is scored with: the input as its source, or the expected output.
    options
        As for `BatchScorer`; not the direction `pmi`.

    Raises
    ------
    InputError
        For an unknown option.
    """

    def __init__(
        self,
        threshold: float,
        model: str = "mini",
        *,
        against: Literal["input", "expected_output"] = "input",
        **options: Any,
    ) -> None:
        if against not in ("input", "expected_output"):
            raise InputError(f"against {against!r} is unknown; use input or expected_output")
        self._rows = RowScorer(model, **options)
        check_has_unit_interval(self._rows.direction)
        self.threshold = threshold
        self._against = against

    def measure(self, test_case: LLMTestCase, *args: Any, **kwargs: Any) -> float | None:  # type: ignore[override]
        """Score a test case; None if it has no score."""
        [found] = self._rows([test_case.actual_output], [getattr(test_case, self._against)])
        self.score = None if found.score is None else unit_interval(found.score)
        self.error = found.reason if found.score is None else None
        self.reason = found.reason
        self.score_breakdown = {"nats per token": found.score, "stderr": found.stderr}
        self.success = self.is_successful()
        return self.score

    async def a_measure(self, test_case: LLMTestCase, *args: Any, **kwargs: Any) -> float | None:  # type: ignore[override]
        """The same in a thread."""
        return await asyncio.to_thread(self.measure, test_case)

    @property
    def __name__(self) -> str:
        return "DiffScore"
