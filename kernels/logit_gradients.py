"""Triton kernel of masked_logprob's backward: logit gradients, a slice of the vocabulary at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffscore_fast.kernels.masked_logprob import Launch, logits_tile, not_excluded

GRADIENTS_CHUNK = 1 << 26  # logit gradients per slice of the vocabulary, about


@triton.jit(do_not_specialize=["count", "first", "last"])
def masked_logprob_gradient_kernel(
    hidden, weight, bias, weight_scale, rows, targets, excluded, log_sum_exp, grad_log_prob, gradient, count, width,
    first, last, hidden_stride, weight_stride, logit_scale, soft_cap, HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr,
    HAS_CAP: tl.constexpr, EXCLUDED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """gradient [N, last - first] = dL / d(hidden . weight) for vocabulary rows first .. last, from recomputed logits.

    dL/dz = g ([v = target] - exp(z - log_sum_exp)) with g = grad_log_prob [N].
    """
    place = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = first + tl.program_id(1).to(tl.int64) * BLOCK_V + tl.arange(0, BLOCK_V)
    ok, inside = place < count, token < last
    row = tl.load(rows + place, mask=ok, other=0)
    target = tl.load(targets + place, mask=ok, other=-1)
    z = logits_tile(
        hidden, weight, bias, weight_scale, row, ok, token, inside, width, hidden_stride, weight_stride, logit_scale,
        soft_cap, HAS_BIAS, HAS_SCALE, HAS_CAP, BLOCK_D, BLOCK_N, BLOCK_V,
    )  # fmt: skip
    upstream = tl.load(grad_log_prob + place, mask=ok, other=0.0)
    normaliser = tl.load(log_sum_exp + place, mask=ok, other=0.0)
    hit = (token[None, :] == target[:, None]).to(tl.float32)
    slope = upstream[:, None] * (hit - tl.exp(z - normaliser[:, None])) * logit_scale
    if HAS_CAP:
        ratio = z * (1.0 / soft_cap)  # a division of the whole tile spills registers (float32, sm_100)
        slope *= 1.0 - ratio * ratio
    slope = tl.where(not_excluded(token, excluded, EXCLUDED)[None, :], slope, 0.0)
    to = gradient + place[:, None] * (last - first) + (token - first)[None, :]
    tl.store(to, slope.to(gradient.dtype.element_ty), mask=ok[:, None] & inside[None, :])


def gradients(
    launch: Launch, log_sum_exp: Tensor, grad_log_prob: Tensor, wanted: Sequence[bool], *, gathered: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden, weight and bias, None where not `wanted`: logit gradients, then their products.

    `gathered`: the rows of `launch` are an index into hidden, not all of it in order.
    """
    hidden, weight, bias, weight_scale, rows, *_ = launch.inputs
    count, config = len(rows), launch.config
    states = hidden[rows] if gathered and wanted[1] else hidden
    grad_states = hidden.new_zeros((count, hidden.shape[1]), dtype=torch.float32) if wanted[0] else None
    grad_weight = torch.zeros_like(weight) if wanted[1] else None
    grad_bias = torch.zeros_like(bias) if wanted[2] else None
    step = max(config.BLOCK_V, GRADIENTS_CHUNK // max(count, 1) // config.BLOCK_V * config.BLOCK_V)
    for first in range(0, launch.vocab_size if count else 0, step):
        last = min(first + step, launch.vocab_size)
        slope = torch.empty(count, last - first, dtype=hidden.dtype, device=hidden.device)
        masked_logprob_gradient_kernel[(triton.cdiv(count, config.BLOCK_N), triton.cdiv(last - first, config.BLOCK_V))](
            *launch.inputs, log_sum_exp, grad_log_prob.float().contiguous(), slope, count, hidden.shape[1], first, last,
            *launch.numbers, **launch.flags, **config._asdict(),
        )  # fmt: skip
        if grad_states is not None:
            part = weight[first:last]
            if launch.flags["HAS_SCALE"]:
                part = (part * weight_scale[first:last, None]).to(hidden.dtype)
            grad_states += slope @ part
        if grad_weight is not None:
            torch.mm(slope.T, states, out=grad_weight[first:last])
        if grad_bias is not None:
            grad_bias[first:last] = slope.sum(dim=0, dtype=torch.float32).to(grad_bias.dtype)
    grad_hidden = grad_states
    if grad_states is not None and gathered:
        grad_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        grad_hidden.index_add_(0, rows, grad_states)
    return None if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_weight, grad_bias
