"""Gradients of masked_logprob in plain PyTorch: logits are recomputed a slice of the vocabulary at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from diffscore_fast.ops.projection import Projection

LOGITS_CHUNK = 1 << 22  # recomputed logits per slice of the vocabulary; a slice depends on the number of rows only


def logit_gradients(
    hidden: Tensor,
    projection: Projection,
    targets: Tensor,
    rows: Tensor | None,
    *,
    log_sum_exp: Tensor,
    grad_log_prob: Tensor,
    grad_log_sum_exp: Tensor | None = None,
    wanted: Sequence[bool] = (True, True, True),
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of (hidden, weight, bias) from those of the log-probs and of the log-sum-exps.

    With p = exp(z - log_sum_exp), g the gradient of the log-prob and h that of the log-sum-exp:

        dL/dz[n, v] = g[n] ([v = target] - p[n, v]) + h[n] p[n, v],   dz/d(logit) = logit_scale (1 - (z / soft_cap)^2)

    Parameters as in `masked_logprob`; `log_sum_exp` [N] is the forward pass's. Entries not `wanted` are None.
    """
    weight, bias, weight_scale = projection.tensors()
    excluded_ids, vocab_size, logit_scale, soft_cap = projection.options()
    states = (hidden if rows is None else hidden[rows]).float()  # [N, D]
    count, width = states.shape
    grad_states = torch.zeros_like(states) if wanted[0] else None
    grad_weight = weight.new_zeros(weight.shape, dtype=torch.float32) if wanted[1] else None
    grad_bias = torch.zeros_like(bias, dtype=torch.float32) if wanted[2] and bias is not None else None
    log_prob_part = grad_log_prob.float()[:, None]
    sum_part = -log_prob_part if grad_log_sum_exp is None else grad_log_sum_exp.float()[:, None] - log_prob_part
    step = max(64, LOGITS_CHUNK // max(count, 1))
    for first in range(0, vocab_size, step):
        ids = slice(first, min(first + step, vocab_size))
        part = weight[ids].float()
        if weight_scale is not None:
            part = part * weight_scale[ids, None].float()
        logits = states @ part.T
        if bias is not None:
            logits += bias[ids].float()
        logits *= logit_scale
        if soft_cap is not None:
            logits = soft_cap * torch.tanh(logits / soft_cap)
        excluded = [item - first for item in excluded_ids if ids.start <= item < ids.stop]
        # -inf logits have probability 0 and no gradient; so has a target that is one of them.
        probabilities = torch.exp(logits - log_sum_exp[:, None])
        grad = probabilities.mul_(sum_part)
        hit = ((targets >= ids.start) & (targets < ids.stop)).nonzero().squeeze(1)
        grad[hit, targets[hit] - first] += log_prob_part[hit, 0]
        if excluded:
            grad[:, excluded] = 0.0
        grad *= logit_scale
        if soft_cap is not None:
            grad *= 1.0 - (logits / soft_cap) ** 2
        if grad_states is not None:
            grad_states.addmm_(grad, part)
        if grad_weight is not None:
            torch.mm(grad.T, states, out=grad_weight[ids])
        if grad_bias is not None:
            grad_bias[ids] = grad.sum(dim=0)
    grad_hidden = grad_states
    if grad_states is not None and rows is not None:
        grad_hidden = states.new_zeros(hidden.shape).index_add_(0, rows, grad_states)
    return (
        None if grad_hidden is None else grad_hidden.to(hidden.dtype),
        None if grad_weight is None else grad_weight.to(weight.dtype),
        None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
    )
