"""The status of a row: scored, or the reason why it has no number."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

OK = "ok"
TRUNCATED_SOURCE = "truncated_source"  # scored; the end of the source was cut, by the over-length policy
SKIPPED_REFERENCE = "skipped_reference"  # scored against the other references of the row
UNRELIABLE = "unreliable"  # has bounds, but too few or too unequal draws for a standard error
EMPTY_CANDIDATE = "empty_candidate"
EMPTY_SOURCE = "empty_source"
EMPTY_TEXT = "empty_text"
MISSING = "missing"
NO_ELIGIBLE_TOKENS = "no_eligible_tokens"
TOO_LONG = "too_long"
INVALID_TEXT = "invalid_text"
INVALID_RECORD = "invalid_record"
NON_FINITE_SCORE = "non_finite_score"  # the model gives a token probability 0, or returns NaN

SCORED = frozenset({OK, TRUNCATED_SOURCE, SKIPPED_REFERENCE, UNRELIABLE})


@dataclass(frozen=True)
class InvalidRecord:
    """Takes the place of the texts of a row that could not be read; the row gets status "invalid_record"."""

    message: str


def non_finite_message(what: str, value: float) -> str:
    """Why a row that was evaluated has no number."""
    if np.isnan(value):
        return f"the {what} is not a number: the model returned NaN, or infinities that cancel"
    return f"the {what} is {value}: the model gives a token of the text probability 0"
