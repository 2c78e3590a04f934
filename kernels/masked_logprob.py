"""Triton kernels of masked_logprob: log-softmax of the vocabulary projection, gathered at the target.

Programs form a grid of (row blocks, vocabulary splits). Each keeps a [BLOCK_N, BLOCK_V] tile of logits in registers
and takes it into an online softmax; a second kernel merges the splits in order. The number of splits is a constant of
the vocabulary's size, and nothing is added atomically, so a row's bits depend on no other row.

Names: N rows, V vocabulary, D hidden size; m_i is the running maximum of the logits, l_i the running sum of exp.
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
    """Tile sizes and launch options; constants of the dtype, never tuned by timing."""

    BLOCK_N: int
    BLOCK_V: int
    BLOCK_D: int
    num_warps: int
    num_stages: int
    enable_fp_fusion: bool = (
        True  # stated, since Triton's default changes between versions, and the results' bits with it
    )


def config_for(dtype: torch.dtype, eight_bit: bool) -> Config:
    # float32 products run on the plain cores, where accumulators and operands take twice the registers; converting an
    # int8 weight takes more still.
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
    With HAS_SCALE the weight is int8, each row times weight_scale [*]. bfloat16 and float16 hold every int8 value, so
    the product is made in the dtype of `hidden`, and the sum is multiplied by the scale.
    """
    acc = tl.zeros((BLOCK_N, BLOCK_V), dtype=tl.float32)
    for start in range(0, width, BLOCK_D):
        column = start + tl.arange(0, BLOCK_D)
        inside = column < width
        states = tl.load(
            hidden + row[:, None] * hidden_stride + column[None, :], mask=row_ok[:, None] & inside[None, :], other=0.0
        )
        part = tl.load(
            weight + token[:, None] * weight_stride + column[None, :], mask=token_ok[:, None] & inside[None, :], other=0
        )
        acc = tl.dot(states, tl.trans(part.to(states.dtype)), acc, input_precision="ieee")
    if HAS_SCALE:
        acc *= tl.load(weight_scale + token, mask=token_ok, other=0.0)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias + token, mask=token_ok, other=0.0).to(tl.float32)[None, :]
    acc *= logit_scale
    if HAS_CAP:
        acc = soft_cap * hyperbolic_tangent(acc / soft_cap)
    return acc


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
def masked_logprob_target_kernel(
    hidden, weight, bias, weight_scale, rows, targets, excluded, target_logit, count, width, hidden_stride,
    weight_stride, logit_scale, soft_cap, HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_CAP: tl.constexpr,
    EXCLUDED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """target_logit [N], for the pass that ranks it: the diagonal of the tile of rows with their own targets.

    The tile has the shape of that pass's tiles, so that the target's logit has the same bits in both.
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
def masked_logprob_kernel(
    hidden, weight, bias, weight_scale, rows, targets, excluded, target_logit, m_splits, l_splits, moment_splits,
    above_splits, count, width, vocabulary, split_size, hidden_stride, weight_stride, logit_scale, soft_cap,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_CAP: tl.constexpr, EXCLUDED: tl.constexpr,
    STATISTICS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One row block over one vocabulary split: an online softmax with the running maximum m_i and sum l_i.

    rows, targets [N] int64; target_logit [N], written without STATISTICS, read with it.
    m_splits, l_splits [splits, N]: max z and sum exp(z - max); where max is +inf, the exponent is z itself.
    With STATISTICS, moment_splits [splits, N]: sum (z - max) exp(z - max); above_splits [splits, N] int32: number of
    logits above the target's.
    """
    place = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1).to(tl.int64)
    ok = place < count
    row = tl.load(rows + place, mask=ok, other=0)
    target = tl.load(targets + place, mask=ok, other=-1)
    first = split * split_size
    last = tl.minimum(first + split_size, vocabulary)
    m_i = tl.full((BLOCK_N,), float("-inf"), dtype=tl.float32)
    l_i = tl.zeros((BLOCK_N,), dtype=tl.float32)
    moment = tl.zeros((BLOCK_N,), dtype=tl.float32)
    above = tl.zeros((BLOCK_N,), dtype=tl.int32)
    z_target = tl.zeros((BLOCK_N,), dtype=tl.float32)
    if STATISTICS:
        z_target = tl.load(target_logit + place, mask=ok, other=0.0)
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
            above += tl.sum((z > z_target[:, None]).to(tl.int32), axis=1)
        else:
            hit = token[None, :] == target[:, None]
            z_target += tl.sum(tl.where(hit, z, 0.0), axis=1)
        m_new = tl.maximum(m_i, tl.max(z, axis=1))  # NaN is left out; it shows in the sums
        centre = tl.where(tl.abs(m_new) == float("inf"), 0.0, m_new)  # inf - inf would be NaN
        shifted = z - centre[:, None]
        p = tl.exp(shifted)
        alpha = tl.exp(m_i - centre)
        if STATISTICS:
            moved = tl.where(alpha > 0.0, m_i - centre, 0.0)
            terms = tl.where(p > 0.0, shifted * p, 0.0)
            moment = (moment + moved * l_i) * alpha + tl.sum(terms, axis=1)
        l_i = l_i * alpha + tl.sum(p, axis=1)
        m_i = m_new
    at = split * count + place
    tl.store(m_splits + at, m_i, mask=ok)
    tl.store(l_splits + at, l_i, mask=ok)
    if STATISTICS:
        tl.store(moment_splits + at, moment, mask=ok)
        tl.store(above_splits + at, above, mask=ok)
    else:
        # The target lies in one split alone, so one program stores it.
        tl.store(target_logit + place, z_target, mask=ok & (target >= first) & (target < last))


@triton.jit(do_not_specialize=["count"])
def masked_logprob_merge_kernel(
    m_splits, l_splits, moment_splits, above_splits, target_logit, log_prob, log_sum_exp, entropy, rank, count, splits,
    STATISTICS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Merges the splits in their order.

    log_prob = (target logit - max) - log sum, in this order, so that a common offset of the logits costs no digits.
    """
    place = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    ok = place < count
    m_i = tl.full((BLOCK_N,), float("-inf"), dtype=tl.float32)
    at = place
    for _ in range(splits):
        m_i = tl.maximum(m_i, tl.load(m_splits + at, mask=ok, other=0.0))
        at += count
    centre = tl.where(tl.abs(m_i) == float("inf"), 0.0, m_i)
    l_i = tl.zeros((BLOCK_N,), dtype=tl.float32)
    moment = tl.zeros((BLOCK_N,), dtype=tl.float32)
    above = tl.zeros((BLOCK_N,), dtype=tl.int64)
    at = place
    for _ in range(splits):
        m_part = tl.load(m_splits + at, mask=ok, other=0.0)
        l_part = tl.load(l_splits + at, mask=ok, other=0.0)
        seen = m_part > float("-inf")
        moved = tl.where(seen, m_part - centre, 0.0)
        alpha = tl.where(seen, tl.exp(moved), 0.0)
        l_i += l_part * alpha
        if STATISTICS:
            moment += (tl.load(moment_splits + at, mask=ok, other=0.0) + moved * l_part) * alpha
            above += tl.load(above_splits + at, mask=ok, other=0)
        at += count
    target = tl.load(target_logit + place, mask=ok, other=0.0)
    # l_i is +inf where a logit is +inf, and NaN where one is NaN, whatever the other logits are.
    log_l = tl.log(l_i)
    impossible = (target == float("-inf")) & (l_i == l_i)
    value = tl.where(impossible, float("-inf"), (target - m_i) - log_l)
    tl.store(log_prob + place, value, mask=ok)
    tl.store(log_sum_exp + place, m_i + log_l, mask=ok)
    if STATISTICS:
        tl.store(entropy + place, log_l - moment / l_i, mask=ok)
        tl.store(rank + place, above, mask=ok)


class Launch(NamedTuple):
    """What the kernels of one call take, in the order of their arguments."""

    inputs: tuple[Tensor, ...]  # hidden, weight, bias, weight_scale, rows, targets, excluded
    numbers: tuple[int | float, ...]  # hidden_stride, weight_stride, logit_scale, soft_cap
    flags: dict[str, int | bool]  # compile-time constants
    config: Config
    vocab_size: int


def prepare(
    hidden: Tensor, targets: Tensor, rows: Tensor | None, *, weight: Tensor, bias: Tensor | None,
    weight_scale: Tensor | None, excluded_ids: Sequence[int], vocab_size: int, logit_scale: float,
    soft_cap: float | None,
) -> Launch:  # fmt: skip
    """Arguments of `ops.masked_logprob`, keywords the fields of `ops.Projection`: dtypes checked, rows contiguous.

    Absent tensors have `hidden` as a stand-in pointer that no kernel reads.
    """
    stored = hidden.dtype if weight_scale is None else torch.int8
    if weight.dtype != stored or hidden.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(
            f"masked_logprob: hidden {hidden.dtype} and weight {weight.dtype} must be one of float32, bfloat16, "
            "float16, or the weight int8 with weight_scale"
        )
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
    return Launch(inputs, numbers, flags, config_for(hidden.dtype, weight_scale is not None), vocab_size)


def run(launch: Launch, *, statistics: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(log_prob, log_sum_exp, entropy, rank), [N] each; the last two hold nothing of use without `statistics`."""
    hidden, *_, rows, _, _ = launch.inputs
    count, width, config, options = len(rows), hidden.shape[1], launch.config, launch.config._asdict()
    share = -(-launch.vocab_size // MAX_SPLITS)
    split_size = max(MIN_SPLIT, triton.cdiv(share, config.BLOCK_V) * config.BLOCK_V)
    splits = triton.cdiv(launch.vocab_size, split_size)

    def floats(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=hidden.device)

    log_prob, log_sum_exp, target_logit = floats(count), floats(count), floats(count)
    m_splits, l_splits = floats(splits, count), floats(splits, count)
    entropy = floats(count) if statistics else log_prob
    rank = torch.empty(count, dtype=torch.int64, device=hidden.device)
    moment_splits = floats(splits, count) if statistics else m_splits
    above_splits = torch.empty(m_splits.shape if statistics else (1,), dtype=torch.int32, device=hidden.device)
    if count == 0:
        return log_prob, log_sum_exp, entropy, rank
    row_blocks = triton.cdiv(count, config.BLOCK_N)
    if statistics:
        masked_logprob_target_kernel[(row_blocks,)](
            *launch.inputs, target_logit, count, width, *launch.numbers, **launch.flags, **options
        )
    masked_logprob_kernel[(row_blocks, splits)](
        *launch.inputs, target_logit, m_splits, l_splits, moment_splits, above_splits, count, width,
        launch.vocab_size, split_size, *launch.numbers, STATISTICS=statistics, **launch.flags, **options,
    )  # fmt: skip
    masked_logprob_merge_kernel[(triton.cdiv(count, 128),)](
        m_splits, l_splits, moment_splits, above_splits, target_logit, log_prob, log_sum_exp, entropy, rank, count,
        splits, STATISTICS=statistics, BLOCK_N=128, num_warps=4, enable_fp_fusion=config.enable_fp_fusion,
    )  # fmt: skip
    return log_prob, log_sum_exp, entropy, rank


@functools.lru_cache(maxsize=64)
def _ids_on(device: torch.device, ids: tuple[int, ...]) -> Tensor:
    """Kept for a model's next calls, since the host waits for a copy to a GPU."""
    return torch.tensor(ids, dtype=torch.int64, device=device)
