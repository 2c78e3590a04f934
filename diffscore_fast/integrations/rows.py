"""Scores of rows for the adapters: a number, or the reason why there is none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from diffscore_fast.distributed.batch import BatchScorer
from diffscore_fast.errors import InputError


@dataclass(frozen=True)
class RowScore:
    """The score of a row.

    Parameters
    ----------
    score : float or None
        In nats per token; None in a row without a score.
    stderr : float or None
        Its standard error over masks.
    status : str
        "ok", or another of the words in `diffscore_fast.status`.
    message : str
        Why there is no score, or what was cut.
    """

    score: float | None
    stderr: float | None
    status: str
    message: str

    @property
    def reason(self) -> str:
        """The status and its sentence, for logs of harnesses."""
        return f"{self.status}: {self.message}" if self.message else self.status


class RowScorer:
    """Scores candidates, each with its source or its references. Pickled as its arguments alone, as `BatchScorer`.

    Parameters
    ----------
    model, options
        As for `BatchScorer`.

    Raises
    ------
    InputError
        For an unknown option.
    """

    def __init__(self, model: str = "mini", **options: Any) -> None:
        self.direction = options.get("direction", "conditional")
        self._with_source = BatchScorer(model, **options)
        self._with_references = BatchScorer(model, references_column="references", **options)

    @property
    def signature(self) -> str:
        """Everything that scores with sources depend on besides their rows; loads the model."""
        return str(self._with_source.signature)

    def __call__(self, candidates: Sequence[str | None], contexts: Sequence[Any]) -> list[RowScore]:
        """One score per candidate.

        Parameters
        ----------
        candidates : sequence of str
        contexts : sequence of str, or of lists of str
            The source of each, or its references. With one list among them all are lists of references, and a single
            text is a list of one.

        Raises
        ------
        InputError
            For unequal lengths, or a single string in place of a list.
        """
        for name, column in (("candidates", candidates), ("contexts", contexts)):
            if isinstance(column, str):
                raise InputError(f"{name} is a single text; give a list")
        candidates, contexts = list(candidates), list(contexts)
        if len(candidates) != len(contexts):
            raise InputError(f"{len(candidates)} candidates but {len(contexts)} contexts; give one per candidate")
        if any(isinstance(context, list | tuple) for context in contexts):
            references = [[item] if isinstance(item, str) else item for item in contexts]
            rows = self._with_references({"references": references, "candidate": candidates})
        else:
            rows = self._with_source({"source": contexts, "candidate": candidates})
        columns = (rows[name] for name in ("score", "stderr", "status", "message"))
        return [RowScore(*values) for values in zip(*columns, strict=True)]


def unit_interval(score: float) -> float:
    """A score as a number in (0, 1]: exp(score), the geometric mean of the probabilities that it averages.

    For harnesses that need one. Order is kept, differences are not. Not for `pmi`, which is no mean of log-probs.
    """
    return math.exp(min(score, 0.0))


def check_has_unit_interval(direction: str) -> None:
    """Raise `InputError` for a direction whose scores `unit_interval` cannot map."""
    if direction == "pmi":
        raise InputError("direction 'pmi' gives differences, which have no place in [0, 1]; use 'conditional'")
