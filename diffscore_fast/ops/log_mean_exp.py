"""Log-mean-exp over segments of log-values: orders of a block, draws of a text."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from diffscore_fast.ops.extension import cpu_unavailable
from diffscore_fast.ops.registry import AUTO, Implementation, Operation, anywhere, check_one_device, check_real
from diffscore_fast.ops.triton_kernels import kernels, on_its_device, triton_unavailable


@dataclass(frozen=True)
class LogMeanExp:
    """Per segment, [S] each.

    Parameters
    ----------
    log_mean : float64
        -inf where every value is -inf; NaN for an empty segment.
    standard_error : float64
        Of log_mean, by the delta method: s / (sqrt(n) m) with m and s the mean and the sample standard deviation of
        exp(value). NaN for fewer than two values and where all are -inf.
    minimum, maximum : float64
        Of the values; +inf and -inf for an empty segment.
    count : int64
        Number of values.
    """

    log_mean: Tensor
    standard_error: Tensor
    minimum: Tensor
    maximum: Tensor
    count: Tensor


def log_mean_exp(values: Tensor, segments: Tensor, *, implementation: str = AUTO) -> LogMeanExp:
    """Log-mean-exp of each segment in one pass, without leaving the log domain. Not differentiable.

    log_mean[s] = log (1/n sum_i exp values[i]) over the n values of segment s.

    Parameters
    ----------
    values : Tensor [N]
        Log-values; read as float64.
    segments : Tensor [S + 1], int64
        Segment s holds values[segments[s] .. segments[s + 1]].
    implementation : str
        "auto", or a name; a named one runs or raises.
    """
    values = values.detach()
    check_segments("log_mean_exp", values, segments)
    chosen = LOG_MEAN_EXP.resolve(values.device, implementation)
    return LogMeanExp(*LOG_MEAN_EXP.run(chosen, values.double().contiguous(), segments.contiguous()))


def check_segments(operation: str, values: Tensor, segments: Tensor) -> None:
    """Refuses segments that do not cover the values in order."""
    check_one_device(operation, values=values, segments=segments)
    check_real(operation, values=values)
    if values.dim() != 1 or segments.dim() != 1 or segments.dtype != torch.int64 or len(segments) == 0:
        raise ValueError(
            f"{operation}: values must be [N] and segments [S + 1] int64; got {list(values.shape)} and "
            f"{list(segments.shape)} {segments.dtype}"
        )
    falls = bool((segments[1:] < segments[:-1]).any())
    if falls or int(segments[0]) != 0 or int(segments[-1]) != len(values):
        raise ValueError(f"{operation}: segments must rise from 0 to {len(values)}")


def segment_log_sums(values: Tensor, segment: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(log sum exp, maximum) [count] of values [N] by their segment number [N]; -inf for an empty segment."""
    maximum = values.new_full((count,), -torch.inf).scatter_reduce(0, segment, values, "amax")
    centre = torch.where(maximum > -torch.inf, maximum, 0.0)  # -inf minus -inf would be NaN
    total = values.new_zeros(count).index_add(0, segment, torch.exp(values - centre[segment]))
    return centre + torch.log(total), maximum


def _reference(values: Tensor, segments: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    count = segments.diff()
    segment = torch.repeat_interleave(torch.arange(len(count), device=values.device), count)
    log_sum, maximum = segment_log_sums(values, segment, len(count))
    minimum = values.new_full((len(count),), torch.inf).scatter_reduce(0, segment, values, "amin")
    log_mean = log_sum - torch.log(count.double())
    log_mean = torch.where(count > 0, log_mean, torch.nan)
    # Relative to the mean, so that nothing overflows: exp(value) / m = exp(value - log_mean).
    ratio = torch.exp(values - log_mean[segment])
    squares = values.new_zeros(len(count)).index_add(0, segment, (ratio - 1.0) ** 2)
    error = torch.sqrt(squares / (count - 1) / count)
    return log_mean, torch.where((count > 1) & (maximum > -torch.inf), error, torch.nan), minimum, maximum, count


def _cpu(values: Tensor, segments: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return torch.ops.diffscore_fast.log_mean_exp(values, segments)


@on_its_device
def _triton(values: Tensor, segments: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return kernels("log_mean_exp").run(values, segments)


LOG_MEAN_EXP = Operation(
    "log_mean_exp",
    [
        Implementation("cpu", _cpu, cpu_unavailable),
        Implementation("triton", _triton, triton_unavailable),
        Implementation("reference", _reference, anywhere),
    ],
)
