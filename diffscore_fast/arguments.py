"""Checks of arguments at the border."""

from __future__ import annotations

from operator import index
from typing import Any

from diffscore_fast.errors import InputError


def whole_number(name: str, value: Any) -> int:
    """An int, or anything that counts as one (numpy's); raises `InputError` for others."""
    try:
        return index(value)
    except TypeError:
        raise InputError(f"{name} must be a whole number, not {value!r}") from None


def checked_seed(value: Any) -> int:
    """A seed that the generator's key can hold."""
    seed = whole_number("seed", value)
    if not -(2**127) <= seed < 2**127:
        raise InputError("the seed must fit in 128 bits")
    return seed


def checked_column(name: str, column: Any) -> None:
    """Refuse what is not an ordered collection of texts."""
    if isinstance(column, str | bytes):
        raise InputError(f"{name} is one string; give a list of texts, [text] for a single one")
    if isinstance(column, dict) or not hasattr(column, "__len__") or not hasattr(column, "__getitem__"):
        raise InputError(f"{name} must be a sequence of texts, not {type(column).__name__}")
