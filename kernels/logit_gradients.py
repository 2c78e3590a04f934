"""Triton kernel of masked_logprob's backward: logit gradients, a slice of the vocabulary at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from diffscore_fast.kernels.masked_logprob import config_for, logits_tile, not_excluded, prepare, run
from torch import Tensor

GRADIENTS_AT_ONCE = 1 << 26  # bounds a slice of logit gradients, in numbers


@triton.jit
def logit_gradient_kernel(
    hidden,
    weight,
    bias,
    rows,
    targets,
    excluded,
    log_sum_exp,
    grad_log_prob,
    gradient,
    count,
    width,
    first,
    last,
    hidden_stride,
    weight_stride,
    logit_scale,
    soft_cap,
    HAS_BIAS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    EXCLUDED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """gradient [N, last - first] = dL / d(hidden . weight) for vocabulary rows first .. last; logits are recomputed.

    dL/dz = g ([v = target] - exp(z - log_sum_exp)) with g = grad_log_prob [N].
    """
    place = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = first + tl.program_id(1).to(tl.int64) * BLOCK_V + tl.arange(0, BLOCK_V)
    ok, inside = place < count, token < last
    row = tl.load(rows + place, mask=ok, other=0)
    target = tl.load(targets + place, mask=ok, other=-1)
    z = logits_tile(
        hidden,
        weight,
        bias,
        row,
        ok,
        token,
        inside,
        width,
        hidden_stride,
        weight_stride,
        logit_scale,
        soft_cap,
        HAS_BIAS,
        HAS_CAP,
        BLOCK_D,
        BLOCK_N,
        BLOCK_V,
    )
    upstream = tl.load(grad_log_prob + place, mask=ok, other=0.0)
    normaliser = tl.load(log_sum_exp + place, mask=ok, other=0.0)
    hit = (token[None, :] == target[:, None]).to(tl.float32)
    slope = upstream[:, None] * (hit - tl.exp(z - normaliser[:, None])) * logit_scale
    if HAS_CAP:
        ratio = z / soft_cap
        slope *= 1.0 - ratio * ratio
    slope = tl.where(not_excluded(token, excluded, EXCLUDED)[None, :], slope, 0.0)
    to = gradient + place[:, None] * (last - first) + (token - first)[None, :]
    tl.store(to, slope.to(gradient.dtype.element_ty), mask=ok[:, None] & inside[None, :])


class MaskedLogprob(torch.autograd.Function):
    """log_prob [N] with gradients of hidden, weight and bias."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, rows, excluded_ids, vocab_size, logit_scale, soft_cap):  # type: ignore[no-untyped-def]
        log_prob, log_sum_exp, _, _ = run(
            hidden, weight, bias, targets, rows, excluded_ids, vocab_size, logit_scale, soft_cap, statistics=False
        )
        ctx.save_for_backward(hidden, weight, bias, targets, rows, log_sum_exp)
        ctx.options = (excluded_ids, vocab_size, logit_scale, soft_cap)
        return log_prob

    @staticmethod
    def backward(ctx, grad_log_prob):  # type: ignore[no-untyped-def]
        hidden, weight, bias, targets, rows, log_sum_exp = ctx.saved_tensors
        grads = gradients(hidden, weight, bias, targets, rows, *ctx.options, log_sum_exp, grad_log_prob)
        return (*grads, None, None, None, None, None, None)


def gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, rows: Tensor | None,
    excluded_ids: Sequence[int], vocab_size: int, logit_scale: float, soft_cap: float | None, log_sum_exp: Tensor,
    grad_log_prob: Tensor,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Gradients of hidden, weight and bias: logit gradients a slice of the vocabulary at a time, then two products."""
    source = hidden
    hidden, weight, rows, excluded = prepare(hidden, weight, targets, rows, excluded_ids)
    bias = None if bias is None else bias.contiguous()
    count, config = len(targets), config_for(hidden.dtype)
    states = hidden[rows]
    grad_states = torch.zeros(states.shape, dtype=torch.float32, device=hidden.device)
    grad_weight = torch.zeros_like(weight)
    grad_bias = None if bias is None else torch.zeros_like(bias)
    step = max(config.BLOCK_V, GRADIENTS_AT_ONCE // max(count, 1) // config.BLOCK_V * config.BLOCK_V)
    for first in range(0, vocab_size if count else 0, step):
        last = min(first + step, vocab_size)
        slope = torch.empty(count, last - first, dtype=hidden.dtype, device=hidden.device)
        logit_gradient_kernel[(triton.cdiv(count, config.BLOCK_N), triton.cdiv(last - first, config.BLOCK_V))](
            hidden, weight, weight if bias is None else bias, rows, targets.contiguous(), excluded, log_sum_exp,
            grad_log_prob.float().contiguous(), slope, count, hidden.shape[1], first, last, hidden.stride(0),
            weight.stride(0), float(logit_scale), float(soft_cap or 0.0), HAS_BIAS=bias is not None,
            HAS_CAP=soft_cap is not None, EXCLUDED=len(excluded_ids), **config._asdict(),
        )  # fmt: skip
        grad_states += slope @ weight[first:last]
        grad_weight[first:last] = slope.T @ states
        if grad_bias is not None:
            grad_bias[first:last] = slope.sum(dim=0, dtype=torch.float32).to(grad_bias.dtype)
    grad_hidden = torch.zeros(source.shape, dtype=torch.float32, device=hidden.device)
    grad_hidden.index_add_(0, rows, grad_states)
    return grad_hidden.to(source.dtype), grad_weight, grad_bias
