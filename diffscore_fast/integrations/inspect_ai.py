"""DiffScore as a scorer of inspect: `Task(..., scorer=diffscore(draws=8))`; needs the extra `inspect`."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from inspect_ai.scorer import Score, Scorer, Target, mean, scorer, stderr
from inspect_ai.solver import TaskState

from diffscore_fast.errors import InputError
from diffscore_fast.integrations.rows import RowScorer

Against = Literal["input", "target"]


@scorer(metrics=[mean(), stderr()])
def diffscore(model: str = "mini", against: Against = "input", **options: Any) -> Scorer:
    """Score the model's completion, in nats per token; higher is better.

    A sample without a score is unscored, with the reason, and left out of the metrics.

    Parameters
    ----------
    model : str
        As for `DiffScorer`.
    against : {"input", "target"}
        What the completion is scored with: the sample's input as its source, or its targets as references.
    options
        As for `BatchScorer`.

    Raises
    ------
    InputError
        For an unknown option.
    """
    if against not in ("input", "target"):
        raise InputError(f"against {against!r} is unknown; use input or target")
    rows = RowScorer(model, **options)
    one_at_a_time = asyncio.Lock()  # all cores compute one sample already

    async def score(state: TaskState, target: Target) -> Score:
        candidate = state.output.completion
        context = list(target) if against == "target" else state.input_text
        async with one_at_a_time:
            [found] = await asyncio.to_thread(rows, [candidate], [context])
        if found.score is None:
            return Score.unscored(reason="scoring_failed", answer=candidate, explanation=found.reason)
        return Score(value=found.score, answer=candidate, explanation=found.reason, metadata={"stderr": found.stderr})

    return score
