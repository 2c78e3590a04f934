"""Intervals around estimates: how far to widen them when their standard errors rest on many draws, or on few."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.stats import norm as normal
from scipy.stats import t as student_t

from diffscore_fast.arguments import real_number
from diffscore_fast.errors import InputError
from diffscore_fast.options import MAX_Z


def checked_z(z: Any) -> float:
    """z as a float: the number of standard errors by which an interval is widened. Raises `InputError`."""
    value = real_number("z", z)
    if not 0 <= value < np.inf:
        raise InputError(f"z must be a finite number of at least 0, not {z}")
    if value > MAX_Z:
        raise InputError(f"z must be at most {MAX_Z:g}, not {z}")
    return value


def student_widths(z: float, degrees: np.ndarray) -> np.ndarray:
    """The quantile of Student's t with the tail probability that z has under the normal distribution.

    z itself for infinitely many degrees of freedom. For z = 3: 4.5 at 7 degrees of freedom, 9.2 at 3, 235 at 1.
    """
    widths = student_t.isf(normal.sf(z), np.where(np.isfinite(degrees), degrees, 1.0))
    return np.where(np.isposinf(degrees), z, np.where(np.isnan(degrees), np.nan, widths))


def combined_degrees(stderr: np.ndarray, degrees: np.ndarray, group: np.ndarray, count: int) -> np.ndarray:
    """Degrees of freedom of the standard error of each group's sum (Welch and Satterthwaite), float64 [count].

    (sum se^2)^2 / sum(se^4 / degrees), for independent errors. +inf if the error is 0, NaN if it is unknown.
    """
    total = np.bincount(group, weights=stderr**2, minlength=count)
    parts = np.bincount(
        group, weights=np.where(stderr == 0, 0.0, stderr**4 / np.maximum(degrees, 1e-9)), minlength=count
    )
    ratio = np.divide(total**2, parts, out=np.full(count, np.inf), where=parts != 0)
    return np.where(np.isnan(total), np.nan, ratio)


def widened_perplexity(
    values: np.ndarray, stderr: np.ndarray, degrees: np.ndarray, keys: np.ndarray, tokens: float, z: float
) -> float:
    """exp(-(sum of values + w se) / tokens): se is the standard error of the sum, w the width of `student_widths`.

    A negative z widens downwards. Texts with equal keys share their orders, so their errors are added as equal ones;
    the errors of all others are independent.
    """
    _, first, group = np.unique(keys, return_index=True, return_inverse=True)
    errors = np.bincount(group.ravel(), weights=stderr)
    freedom = combined_degrees(errors, degrees[first], np.zeros(len(errors), np.int64), 1)
    width = np.copysign(student_widths(abs(z), freedom)[0], z)
    return float(np.exp(-widened(values.sum(), np.sqrt((errors**2).sum()), width) / tokens))


def widened(value: Any, stderr: Any, widths: Any) -> Any:
    """value + widths * stderr; an infinite value stays as it is."""
    return np.where(np.isinf(value), value, value + widths * stderr)
