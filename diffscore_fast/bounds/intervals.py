"""Intervals around estimates whose errors rest on many draws, or on few."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.stats import norm as normal
from scipy.stats import t as student_t

from diffscore_fast.arguments import real_number
from diffscore_fast.errors import InputError

if TYPE_CHECKING:
    pass


MAX_Z = 30.0  # beyond, a tail of the normal distribution is hardly a number


def checked_z(z: Any) -> float:
    """The number of standard errors by which an interval is widened."""
    value = real_number("z", z)
    if not 0 <= value < np.inf:
        raise InputError(f"z must be a finite number of at least 0, not {z}")
    if value > MAX_Z:
        raise InputError(f"z must be at most {MAX_Z:g}, not {z}")
    return value


def student_widths(z: float, degrees: np.ndarray) -> np.ndarray:
    """Standard errors to widen by: the quantile of Student's t that is exceeded as rarely as z by a normal number.

    z itself at infinitely many degrees of freedom. 4.5 for z = 3 and 7 degrees, 9.2 for 3, 235 for 1.
    """
    widths = student_t.isf(normal.sf(z), np.where(np.isfinite(degrees), degrees, 1.0))
    return np.where(np.isposinf(degrees), z, np.where(np.isnan(degrees), np.nan, widths))


def combined_degrees(stderr: np.ndarray, degrees: np.ndarray, group: np.ndarray, count: int) -> np.ndarray:
    """Degrees of freedom of each group's sum of independent errors (Welch and Satterthwaite), float64 [count].

    (sum se^2)^2 / sum(se^4 / degrees); +inf for no error, NaN for an unknown one.
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
    """exp(-(sum of values + w se) / tokens), se that of the sum over texts, w as `student_widths` has it for z.

    A negative z widens downwards. Errors of texts with equal keys are one error several times; others are independent.
    """
    _, first, group = np.unique(keys, return_index=True, return_inverse=True)
    errors = np.bincount(group.ravel(), weights=stderr)
    freedom = combined_degrees(errors, degrees[first], np.zeros(len(errors), np.int64), 1)
    width = np.copysign(student_widths(abs(z), freedom)[0], z)
    return float(np.exp(-_widened(values.sum(), np.sqrt((errors**2).sum()), width) / tokens))


def _widened(value: Any, stderr: Any, widths: Any) -> Any:
    """value + widths stderr; an infinite value has no error to add."""
    return np.where(np.isinf(value), value, value + widths * stderr)
