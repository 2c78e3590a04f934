"""What a value must be to count as text."""

from __future__ import annotations

import math
from typing import Any

from diffscore_fast.results import INVALID_RECORD, INVALID_TEXT, MISSING, OK, InvalidRecord


def check_text(name: str, text: Any) -> tuple[str, str]:
    """Status and message of one value of a row; "ok" and "" where it is Unicode text."""
    if isinstance(text, InvalidRecord):
        return INVALID_RECORD, text.message
    # pandas writes null as NaN, NA or NaT.
    if text is None or (isinstance(text, float) and math.isnan(text)) or type(text).__name__ in ("NAType", "NaTType"):
        return MISSING, f"the {name} is missing"
    if not isinstance(text, str):
        return INVALID_TEXT, f"the {name} is a {type(text).__name__}, not text"
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return INVALID_TEXT, f"the {name} holds a lone surrogate at character {error.start}, which is not text"
    return OK, ""
