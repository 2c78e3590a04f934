"""Triton kernels of masked_logprob: log-softmax of the vocabulary projection, gathered at the target.

Programs form a grid of (row blocks, vocabulary splits). Each keeps a [BLOCK_N, BLOCK_V] tile of logits in registers
and takes it into an online softmax; a second kernel merges the splits in order. The number of splits is a constant of
the vocabulary's size, and nothing is added atomically, so a row's bits depend on no other row.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_SPLITS = 64
MIN_SPLIT = 1024  # vocabulary rows


class Config(NamedTuple):
    """Tile sizes and launch options; constants of the type, never tuned by timing."""

    BLOCK_N: int
    BLOCK_V: int
    BLOCK_D: int
    num_warps: int
    num_stages: int
    enable_fp_fusion: bool = True  # said, not left to Triton: its default changes between versions, and bits with it


def config_for(dtype: torch.dtype, eight_bit: bool) -> Config:
    # float32 products run on the plain cores, whose accumulators and operands take twice the registers; spreading out
    # an int8 weight takes more.
    if dtype == torch.float32:
        return Config(32, 64, 32, 8, 2) if eight_bit else Config(64, 64, 32, 4, 2)
    return Config(64, 128, 64, 8, 3)


@triton.jit
def logits_tile(
    hidden, weight, bias, weight_scale, row, row_ok, token, token_ok, width, hidden_stride, weight_stride, logit_scale,
    soft_cap, HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_CAP: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """z [BLOCK_N, BLOCK_V] = cap(scale * (hidden[row] . weight[token] + bias[token])).

    hidden [*, width], weight [*, width] with unit stride along `width`; `row` and `token` are int64, because row times
    stride passes 2^31 (LLaDA's vocabulary times 16,981 rows). Rows and tokens that are not `ok` are read as 0.
    With HAS_SCALE the weight is int8, each row times weight_scale [*]: bfloat16 and float16 hold its 255 numbers, so
    that the product is made of them, and the scale meets the sum.
    """
    total = tl.zeros((BLOCK_N, BLOCK_V), dtype=tl.float32)
    for start in range(0, width, BLOCK_D):
        column = start + tl.arange(0, BLOCK_D)
        inside = column < width
        states = tl.load(
            hidden + row[:, None] * hidden_stride + column[None, :], mask=row_ok[:, None] & inside[None, :], other=0.0
        )
        part = tl.load(
            weight + token[:, None] * weight_stride + column[None, :], mask=token_ok[:, None] & inside[None, :], other=0
        )
        total = tl.dot(states, tl.trans(part.to(states.dtype)), total, input_precision="ieee")
    if HAS_SCALE:
        total *= tl.load(weight_scale + token, mask=token_ok, other=0.0)[None, :]
    if HAS_BIAS:
        total += tl.load(bias + token, mask=token_ok, other=0.0).to(tl.float32)[None, :]
    total *= logit_scale
    if HAS_CAP:
        total = soft_cap * hyperbolic_tangent(total / soft_cap)
    return total


@triton.jit
def hyperbolic_tangent(x):
    """sign(x) (1 - e) / (1 + e), e = exp(-2 |x|); near 0 an odd polynomial, since 1 - e cancels there."""
    small = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - small) / (1.0 + small)
    square = x * x
    p = -6.0962997377e-3 * square + 2.0996894687e-2
    p = p * square - 5.3850848228e-2
    p = p * square + 1.3332769275e-1
    p = p * square - 3.3333328366e-1
    near = p * square * x + x
    return tl.where(tl.abs(x) < 0.625, near, tl.where(x < 0, -far, far))


@triton.jit
def not_excluded(token, excluded, EXCLUDED: tl.constexpr):
    """False where `token` is one of excluded[0 .. EXCLUDED]."""
    keep = token >= 0
    for index in range(EXCLUDED):
        keep &= token != tl.load(excluded + index)
    return keep


@triton.jit(do_not_specialize=["count"])
def target_logits_kernel(
    hidden, weight, bias, weight_scale, rows, targets, excluded, target_logit, count, width, hidden_stride,
    weight_stride, logit_scale, soft_cap, HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_CAP: tl.constexpr,
    EXCLUDED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """target_logit [N] before the pass that ranks it: the diagonal of the rows' tile with the rows' own targets.

    The tile has the forward pass's shape, so that the target's logit has the bits that the pass will compare it with.
    """
    place = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    ok = place < count
    row = tl.load(rows + place, mask=ok, other=0)
    other = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_V)
    other_ok = other < count
    token = tl.load(targets + other, mask=other_ok, other=0)
    z = logits_tile(
        hidden, weight, bias, weight_scale, row, ok, token, other_ok, width, hidden_stride, weight_stride, logit_scale,
        soft_cap, HAS_BIAS, HAS_SCALE, HAS_CAP, BLOCK_D, BLOCK_N, BLOCK_V,
    )  # fmt: skip
    own = tl.sum(tl.where(place[:, None] == other[None, :], z, 0.0), axis=1)
    target = tl.load(targets + place, mask=ok, other=0)
    own = tl.where(not_excluded(target, excluded, EXCLUDED), own, float("-inf"))
    tl.store(target_logit + place, own, mask=ok)


@triton.jit(do_not_specialize=["count"])
def forward_kernel(
    hidden, weight, bias, weight_scale, rows, targets, excluded, target_logit, maximum, total, weighted, above, count,
    width, vocabulary, split_size, hidden_stride, weight_stride, logit_scale, soft_cap, HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr, HAS_CAP: tl.constexpr, EXCLUDED: tl.constexpr, STATISTICS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One row block over one vocabulary split.

    rows, targets [N] int64; target_logit [N] (written without STATISTICS, read with it);
    maximum, total [splits, N]: max z and sum exp(z - max), with a max of +inf read as 0 there; with STATISTICS
    weighted [splits, N]: sum (z - max) exp(z - max), above [splits, N] int32: number of logits above the target's.
    """
    place = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1).to(tl.int64)
    ok = place < count
    row = tl.load(rows + place, mask=ok, other=0)
    target = tl.load(targets + place, mask=ok, other=-1)
    first = split * split_size
    last = tl.minimum(first + split_size, vocabulary)
    best = tl.full((BLOCK_N,), float("-inf"), dtype=tl.float32)
    mass = tl.zeros((BLOCK_N,), dtype=tl.float32)
    moment = tl.zeros((BLOCK_N,), dtype=tl.float32)
    higher = tl.zeros((BLOCK_N,), dtype=tl.int32)
    found = tl.zeros((BLOCK_N,), dtype=tl.float32)
    if STATISTICS:
        found = tl.load(target_logit + place, mask=ok, other=0.0)
    for start in range(first, last, BLOCK_V):
        token = start + tl.arange(0, BLOCK_V).to(tl.int64)
        inside = token < last
        z = logits_tile(
            hidden, weight, bias, weight_scale, row, ok, token, inside, width, hidden_stride, weight_stride,
            logit_scale, soft_cap, HAS_BIAS, HAS_SCALE, HAS_CAP, BLOCK_D, BLOCK_N, BLOCK_V,
        )  # fmt: skip
        # After the cap: capping a padded column's -inf would make it a finite logit.
        z = tl.where((inside & not_excluded(token, excluded, EXCLUDED))[None, :], z, float("-inf"))
        if STATISTICS:
            higher += tl.sum((z > found[:, None]).to(tl.int32), axis=1)
        else:
            hit = token[None, :] == target[:, None]
            found += tl.sum(tl.where(hit, z, 0.0), axis=1)
        new_best = tl.maximum(best, tl.max(z, axis=1))  # NaN is left out; it shows in the sums
        centre = tl.where(tl.abs(new_best) == float("inf"), 0.0, new_best)  # inf - inf would be NaN
        shifted = z - centre[:, None]
        power = tl.exp(shifted)
        factor = tl.exp(best - centre)
        if STATISTICS:
            moved = tl.where(factor > 0.0, best - centre, 0.0)
            terms = tl.where(power > 0.0, shifted * power, 0.0)
            moment = (moment + moved * mass) * factor + tl.sum(terms, axis=1)
        mass = mass * factor + tl.sum(power, axis=1)
        best = new_best
    at = split * count + place
    tl.store(maximum + at, best, mask=ok)
    tl.store(total + at, mass, mask=ok)
    if STATISTICS:
        tl.store(weighted + at, moment, mask=ok)
        tl.store(above + at, higher, mask=ok)
    else:
        # The target lies in one split alone, so one program stores it.
        tl.store(target_logit + place, found, mask=ok & (target >= first) & (target < last))


@triton.jit(do_not_specialize=["count"])
def merge_kernel(
    maximum, total, weighted, above, target_logit, log_prob, log_sum_exp, entropy, rank, count, splits,
    STATISTICS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Splits in their order: log_prob = (target logit - max) - log sum, so that a common offset costs no digits."""
    place = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    ok = place < count
    best = tl.full((BLOCK_N,), float("-inf"), dtype=tl.float32)
    at = place
    for _ in range(splits):
        best = tl.maximum(best, tl.load(maximum + at, mask=ok, other=0.0))
        at += count
    centre = tl.where(tl.abs(best) == float("inf"), 0.0, best)
    mass = tl.zeros((BLOCK_N,), dtype=tl.float32)
    moment = tl.zeros((BLOCK_N,), dtype=tl.float32)
    higher = tl.zeros((BLOCK_N,), dtype=tl.int64)
    at = place
    for _ in range(splits):
        peak = tl.load(maximum + at, mask=ok, other=0.0)
        part = tl.load(total + at, mask=ok, other=0.0)
        seen = peak > float("-inf")
        moved = tl.where(seen, peak - centre, 0.0)
        factor = tl.where(seen, tl.exp(moved), 0.0)
        mass += part * factor
        if STATISTICS:
            moment += (tl.load(weighted + at, mask=ok, other=0.0) + moved * part) * factor
            higher += tl.load(above + at, mask=ok, other=0)
        at += count
    target = tl.load(target_logit + place, mask=ok, other=0.0)
    # The mass is +inf where a logit is, and NaN where one is NaN, whatever the others are.
    log_mass = tl.log(mass)
    impossible = (target == float("-inf")) & (mass == mass)
    value = tl.where(impossible, float("-inf"), (target - best) - log_mass)
    tl.store(log_prob + place, value, mask=ok)
    tl.store(log_sum_exp + place, best + log_mass, mask=ok)
    if STATISTICS:
        tl.store(entropy + place, log_mass - moment / mass, mask=ok)
        tl.store(rank + place, higher, mask=ok)


class Launch(NamedTuple):
    """What the kernels of one call take, in the order of their arguments."""

    inputs: tuple[Tensor, ...]  # hidden, weight, bias, weight_scale, rows, targets, excluded
    numbers: tuple[int | float, ...]  # hidden_stride, weight_stride, logit_scale, soft_cap
    options: dict[str, int | bool]  # compile-time flags and the configuration


def run(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, rows: Tensor | None,
    excluded_ids: Sequence[int], vocab_size: int, logit_scale: float, soft_cap: float | None,
    weight_scale: Tensor | None, *, statistics: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(log_prob, log_sum_exp, entropy, rank), [N] each; the last two hold nothing of use without `statistics`."""
    call = prepare(hidden, weight, bias, targets, rows, excluded_ids, logit_scale, soft_cap, weight_scale)
    count, width, config = len(targets), hidden.shape[1], config_for(hidden.dtype, weight_scale is not None)
    share = -(-vocab_size // MAX_SPLITS)
    split_size = max(MIN_SPLIT, triton.cdiv(share, config.BLOCK_V) * config.BLOCK_V)
    splits = triton.cdiv(vocab_size, split_size)

    def floats(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=hidden.device)

    log_prob, log_sum_exp, target_logit = floats(count), floats(count), floats(count)
    maximum, total = floats(splits, count), floats(splits, count)
    entropy = floats(count) if statistics else log_prob
    rank = torch.empty(count, dtype=torch.int64, device=hidden.device)
    weighted = floats(splits, count) if statistics else maximum
    above = torch.empty(weighted.shape if statistics else (1,), dtype=torch.int32, device=hidden.device)
    if count == 0:
        return log_prob, log_sum_exp, entropy, rank
    row_blocks = triton.cdiv(count, config.BLOCK_N)
    if statistics:
        target_logits_kernel[(row_blocks,)](*call.inputs, target_logit, count, width, *call.numbers, **call.options)
    forward_kernel[(row_blocks, splits)](
        *call.inputs, target_logit, maximum, total, weighted, above, count, width, vocab_size, split_size,
        *call.numbers, STATISTICS=statistics, **call.options,
    )  # fmt: skip
    merge_kernel[(triton.cdiv(count, 128),)](
        maximum, total, weighted, above, target_logit, log_prob, log_sum_exp, entropy, rank, count, splits,
        STATISTICS=statistics, BLOCK_N=128, num_warps=4, enable_fp_fusion=config.enable_fp_fusion,
    )  # fmt: skip
    return log_prob, log_sum_exp, entropy, rank


def prepare(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, rows: Tensor | None,
    excluded_ids: Sequence[int], logit_scale: float, soft_cap: float | None, weight_scale: Tensor | None,
) -> Launch:  # fmt: skip
    """Types checked, rows contiguous, a stand-in pointer for what is absent."""
    stored = hidden.dtype if weight_scale is None else torch.int8
    if weight.dtype != stored or hidden.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(
            f"masked_logprob: hidden {hidden.dtype} and weight {weight.dtype} must be one of float32, bfloat16, "
            "float16, or the weight int8 with weight_scale"
        )
    if hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"masked_logprob: weight must be [V, {hidden.shape[1]}]; got {list(weight.shape)}")
    hidden = hidden if hidden.stride(1) == 1 else hidden.contiguous()
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    rows = torch.arange(len(targets), device=hidden.device) if rows is None else rows.contiguous()
    excluded = _ids_on(hidden.device, tuple(excluded_ids) or (0,))
    inputs = (
        hidden, weight, hidden if bias is None else bias.contiguous(),
        hidden if weight_scale is None else weight_scale.float().contiguous(), rows, targets.contiguous(), excluded,
    )  # fmt: skip
    flags = {
        "HAS_BIAS": bias is not None, "HAS_SCALE": weight_scale is not None, "HAS_CAP": soft_cap is not None,
        "EXCLUDED": len(excluded_ids),
    }  # fmt: skip
    numbers = (hidden.stride(0), weight.stride(0), float(logit_scale), float(soft_cap or 0.0))
    return Launch(inputs, numbers, {**flags, **config_for(hidden.dtype, weight_scale is not None)._asdict()})


@functools.lru_cache(maxsize=64)
def _ids_on(device: torch.device, ids: tuple[int, ...]) -> Tensor:
    """Kept for a model's next calls: a copy to a GPU waits for it."""
    return torch.tensor(ids, dtype=torch.int64, device=device)
