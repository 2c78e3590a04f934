"""Triton kernel of evidence_bounds: one program per block of a text, float64."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

NUMBERS_CHUNK = 256  # of a [folds, draws] tile: two float64 per thread, which leaves room in the registers


def tile_sizes(folds: int) -> dict[str, int]:
    """FOLDS, `folds` rounded up to a power of 2, and BLOCK, the draws of each fold that are read together."""
    padded = triton.next_power_of_2(folds)
    return {"FOLDS": padded, "BLOCK": max(1, NUMBERS_CHUNK // padded)}


@triton.jit
def log_sum(values):
    """log sum exp of a vector; -inf where all are -inf."""
    highest = tl.max(values, axis=0)
    centre = tl.where(highest == float("-inf"), 0.0, highest)
    return centre + tl.log(tl.sum(tl.exp(values - centre), axis=0))


@triton.jit
def log_sum_rows(values):
    """log sum exp of each row of a matrix."""
    highest = tl.max(values, axis=1)
    centre = tl.where(highest == float("-inf"), 0.0, highest)
    return centre + tl.log(tl.sum(tl.exp(values - centre[:, None]), axis=1))


@triton.jit(do_not_specialize=["folds"])
def evidence_bounds_kernel(log_p, segments, lower, plain, upper, folds, FOLDS: tl.constexpr, BLOCK: tl.constexpr):
    """log_p [N] float64, segments [B + 1] int64; lower, plain, upper [B] float64; FOLDS as `tile_sizes` says."""
    block = tl.program_id(0).to(tl.int64)
    first = tl.load(segments + block)
    count = tl.load(segments + block + 1) - first
    each = count // folds
    fold = tl.arange(0, FOLDS)
    lane = tl.arange(0, BLOCK)
    sums = tl.full((FOLDS,), float("-inf"), dtype=tl.float64)
    for start in range(0, each, BLOCK):
        within = start + lane
        inside = (fold < folds)[:, None] & (within < each)[None, :]
        tile = tl.load(log_p + first + fold[:, None] * each + within[None, :], mask=inside, other=float("-inf"))
        part = log_sum_rows(tile)
        high = tl.maximum(sums, part)
        centre = tl.where(high == float("-inf"), 0.0, high)
        sums = centre + tl.log(tl.exp(sums - centre) + tl.exp(part - centre))
    # The other folds' sum is the total minus the fold itself: at most one bit is lost, since another fold is as large.
    # For the largest fold the others are summed again, because it may hide them in the total.
    top = tl.argmax(sums, axis=0)
    highest = tl.max(sums, axis=0)
    centre = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp(sums - centre)
    others = tl.sum(weights, axis=0) - weights
    beside_top = log_sum(tl.where(fold == top, float("-inf"), sums))
    size = each.to(tl.float64)
    rest = tl.where(fold == top, beside_top, centre + tl.log(tl.where(fold == top, 1.0, others)))
    log_psi = rest - tl.log(size * (folds - 1))
    log_hat = sums - tl.log(size)
    safe = tl.where(log_psi == float("-inf"), 0.0, log_psi)
    tangent = tl.where(log_psi == float("-inf"), float("inf"), safe + tl.exp(log_hat - safe) - 1.0)
    tangent = tl.where(fold < folds, tangent, 0.0)
    tl.store(lower + block, log_sum(sums) - tl.log(count.to(tl.float64)))
    tl.store(plain + block, tl.sum(tl.where(fold == 0, tangent, 0.0), axis=0))
    tl.store(upper + block, tl.sum(tangent, axis=0) / folds)


def run(log_p: Tensor, folds: int, segments: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(lower, plain upper, cross-fitted upper) of each block."""
    blocks = len(segments) - 1
    lower, plain, upper = (torch.empty(blocks, dtype=torch.float64, device=log_p.device) for _ in range(3))
    if blocks:
        evidence_bounds_kernel[(blocks,)](
            log_p, segments, lower, plain, upper, folds, **tile_sizes(folds), num_warps=4, enable_fp_fusion=True
        )
    return lower, plain, upper
