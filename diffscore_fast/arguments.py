"""Checks of arguments at the border."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from numbers import Real
from operator import index
from typing import Any

from diffscore_fast.errors import InputError


def whole_number(name: str, value: Any) -> int:
    """An int, or anything that counts as one (numpy's); raises `InputError` for others."""
    try:
        return index(value)
    except TypeError:
        raise InputError(f"{name} must be a whole number, not {value!r}") from None


def check_at_most(name: str, value: int, most: int) -> None:
    """Raise `InputError` for a count that no run could mean."""
    if value > most:
        raise InputError(f"{name} must be at most {most:,}, not {value:,}")


def checked_seed(value: Any) -> int:
    """A seed that the generator's key can hold."""
    seed = whole_number("seed", value)
    if not -(2**127) <= seed < 2**127:
        raise InputError("the seed must fit in 128 bits")
    return seed


def real_number(name: str, value: Any) -> float:
    """A float, or anything that counts as one (numpy's, an int); raises `InputError` for others."""
    try:
        if isinstance(value, Real | Decimal) or getattr(value, "shape", None) == () and value.dtype.kind in "iuf":
            return float(value)
    except (OverflowError, AttributeError):
        pass
    raise InputError(f"{name} must be a number, not {value!r}")


def checked_column(name: str, column: Any) -> list[Any]:
    """The texts of an ordered collection, by position; refuses anything else."""
    if isinstance(column, str | bytes):
        raise InputError(f"{name} is one string; give a list of texts, [text] for a single one")
    sequence = hasattr(column, "__len__") and hasattr(column, "__getitem__") and getattr(column, "ndim", 1) == 1
    if isinstance(column, Mapping) or not sequence:
        raise InputError(f"{name} must be a sequence of texts, not {type(column).__name__}")
    return list(column)  # a pandas Series is indexed by its labels
