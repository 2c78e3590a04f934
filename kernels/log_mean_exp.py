"""Triton kernel of log_mean_exp: one program per segment, float64."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 128


@triton.jit
def log_mean_exp_kernel(values, segments, log_mean, error, minimum, maximum, BLOCK: tl.constexpr):
    """values [N] float64, segments [S + 1] int64; log_mean, error, minimum, maximum [S] float64.

    Three passes over a segment: extremes, sum of exp, squares about the mean. After the first it is in cache.
    """
    segment = tl.program_id(0).to(tl.int64)
    first, last = tl.load(segments + segment), tl.load(segments + segment + 1)
    lane = tl.arange(0, BLOCK)
    low = tl.full((BLOCK,), float("inf"), dtype=tl.float64)
    high = tl.full((BLOCK,), float("-inf"), dtype=tl.float64)
    nan_seen = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(first, last, BLOCK):
        at = start + lane
        value = tl.load(values + at, mask=at < last, other=float("inf"))
        low = tl.minimum(low, value)
        high = tl.maximum(high, tl.where(at < last, value, float("-inf")))
        nan_seen |= (value != value).to(tl.int32)
    lowest, highest = tl.min(low, axis=0), tl.max(high, axis=0)
    has_nan = tl.max(nan_seen, axis=0) > 0  # tl.minimum and tl.maximum ignore a NaN
    centre = tl.where(highest == float("-inf"), 0.0, highest)  # -inf minus -inf would be NaN
    terms = tl.zeros((BLOCK,), dtype=tl.float64)
    for start in range(first, last, BLOCK):
        at = start + lane
        terms += tl.exp(tl.load(values + at, mask=at < last, other=float("-inf")) - centre)
    count = (last - first).to(tl.float64)
    mean = centre + tl.log(tl.sum(terms, axis=0)) - tl.log(count)
    squares = tl.zeros((BLOCK,), dtype=tl.float64)
    for start in range(first, last, BLOCK):
        at = start + lane
        ratio = tl.exp(tl.load(values + at, mask=at < last, other=float("-inf")) - mean) - 1.0
        squares += tl.where(at < last, ratio * ratio, 0.0)
    spread = tl.sqrt(tl.sum(squares, axis=0) / (count - 1.0) / count)
    known = (count > 1.0) & (highest > float("-inf"))
    tl.store(log_mean + segment, tl.where(count > 0.0, mean, float("nan")))
    tl.store(error + segment, tl.where(known, spread, float("nan")))
    tl.store(minimum + segment, tl.where(has_nan, float("nan"), lowest))
    tl.store(maximum + segment, tl.where(has_nan, float("nan"), highest))


def run(values: Tensor, segments: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(log_mean, standard error, minimum, maximum, count) of each segment."""
    count = len(segments) - 1
    outputs = [torch.empty(count, dtype=torch.float64, device=values.device) for _ in range(4)]
    if count:
        log_mean_exp_kernel[(count,)](values, segments, *outputs, BLOCK=BLOCK, num_warps=1, enable_fp_fusion=True)
    log_mean, error, minimum, maximum = outputs
    return log_mean, error, minimum, maximum, segments.diff()
