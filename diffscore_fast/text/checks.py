"""What a value must be to count as text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Number
from typing import Any

from diffscore_fast.status import INVALID_RECORD, INVALID_TEXT, MISSING, OK, InvalidRecord


def check_text(name: str, text: Any) -> tuple[str, str]:
    """Status and message of one value of a row; "ok" and "" where it is Unicode text."""
    if isinstance(text, str) and text.isascii():  # the most frequent case, known at once
        return OK, ""
    if isinstance(text, InvalidRecord):
        return INVALID_RECORD, text.message
    # pandas writes null as NaN, NA or NaT.
    if text is None or (isinstance(text, float) and math.isnan(text)) or type(text).__name__ in ("NAType", "NaTType"):
        return MISSING, f"the {name} is missing"
    if not isinstance(text, str):
        return INVALID_TEXT, f"the {name} is {kind_of(text)}, not text"
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return INVALID_TEXT, f"the {name} holds a lone surrogate at character {error.start}, which is not text"
    return OK, ""


def kind_of(value: Any) -> str:
    """What a message calls a value of the wrong kind."""
    for kinds, name in (
        (bool, "true or false"),
        (Mapping, "an object"),
        (list | tuple, "a list"),
        (Number, "a number"),
        (bytes, "bytes"),
        (str, "a string"),
    ):
        if isinstance(value, kinds):
            return name
    return "null" if value is None else f"a {type(value).__name__}"
