"""What became of a row: scored, or why not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    pass


OK = "ok"
TRUNCATED_SOURCE = "truncated_source"  # scored, the source cut as the policy says
SKIPPED_REFERENCE = "skipped_reference"  # scored against the row's other references
UNRELIABLE = "unreliable"  # bounded, by draws that are too few or too unequal for their own error
EMPTY_CANDIDATE = "empty_candidate"
EMPTY_SOURCE = "empty_source"
EMPTY_TEXT = "empty_text"
MISSING = "missing"
NO_ELIGIBLE_TOKENS = "no_eligible_tokens"
TOO_LONG = "too_long"
INVALID_TEXT = "invalid_text"
INVALID_RECORD = "invalid_record"
NON_FINITE_SCORE = "non_finite_score"  # the model gives a token probability 0, or no number

SCORED = frozenset({OK, TRUNCATED_SOURCE, SKIPPED_REFERENCE, UNRELIABLE})


@dataclass(frozen=True)
class InvalidRecord:
    """Stands in for the texts of a row that could not be read; the row gets status "invalid_record"."""

    message: str


def non_finite_message(what: str, value: float) -> str:
    """Why a row has no number although it was evaluated."""
    if np.isnan(value):
        return f"the {what} is not a number: the model returned NaN, or infinities that cancel"
    return f"the {what} is {value}: the model gives a token of the text probability 0"
