"""Checks of arguments where they enter the package."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from numbers import Real
from operator import index
from typing import Any

from diffscore_fast.errors import InputError


def whole_number(name: str, value: Any) -> int:
    """The value as an int; numpy's integers are taken too. Raises `InputError` for anything else."""
    try:
        return index(value)
    except TypeError:
        raise InputError(f"{name} must be a whole number, not {value!r}") from None


def check_at_most(name: str, value: int, maximum: int) -> None:
    """Raise `InputError` for a count above its limit."""
    if value > maximum:
        raise InputError(f"{name} must be at most {maximum:,}, not {value:,}")


def checked_seed(value: Any) -> int:
    """The seed as an int of at most 128 bits, which the key of the random numbers can hold."""
    seed = whole_number("seed", value)
    if not -(2**127) <= seed < 2**127:
        raise InputError("the seed must fit in 128 bits")
    return seed


def real_number(name: str, value: Any) -> float:
    """The value as a float; ints and numpy's numbers are taken too. Raises `InputError` for anything else."""
    try:
        if isinstance(value, Real | Decimal) or getattr(value, "shape", None) == () and value.dtype.kind in "iuf":
            return float(value)
    except (OverflowError, AttributeError):
        pass
    raise InputError(f"{name} must be a number, not {value!r}")


def checked_column(name: str, column: Any) -> list[Any]:
    """The texts of a list, tuple, array or pandas Series, by position. Raises `InputError` for anything else."""
    if isinstance(column, str | bytes):
        raise InputError(f"{name} is one string; give a list of texts, [text] for a single one")
    sequence = hasattr(column, "__len__") and hasattr(column, "__getitem__") and getattr(column, "ndim", 1) == 1
    if isinstance(column, Mapping) or not sequence:
        raise InputError(f"{name} must be a sequence of texts, not {type(column).__name__}")
    return list(column)  # a pandas Series is indexed by its labels
