"""The most probable token; the logits of a call are never all stored."""

from __future__ import annotations

import torch
from torch import Tensor

from diffscore_fast.ops.projection import Projection, checked_projection, logits_in_chunks
from diffscore_fast.ops.registry import AUTO, Implementation, Operation, anywhere


def best_token(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    excluded_ids: tuple[int, ...] = (),
    vocab_size: int | None = None,
    logit_scale: float = 1.0,
    soft_cap: float | None = None,
    weight_scale: Tensor | None = None,
    implementation: str = AUTO,
) -> Tensor:
    """token[n] = argmax_v z[n, v], z as in `masked_logprob`; among equal logits any of them.

    Parameters
    ----------
    hidden : Tensor [N, D]
    weight : Tensor [V, D], bias : Tensor [V] or None
    excluded_ids, vocab_size, logit_scale, soft_cap, weight_scale, implementation
        As for `masked_logprob`.

    Returns
    -------
    Tensor [N], int64
    """
    projection = checked_projection(
        "best_token",
        hidden,
        weight,
        bias,
        excluded_ids=excluded_ids,
        vocab_size=vocab_size,
        logit_scale=logit_scale,
        soft_cap=soft_cap,
        weight_scale=weight_scale,
    )
    return BEST_TOKEN.run(BEST_TOKEN.resolve(hidden.device, implementation), hidden, projection)


def _reference(hidden: Tensor, projection: Projection) -> Tensor:
    tokens = [torch.zeros(0, dtype=torch.int64, device=hidden.device)]
    tokens += [logits.argmax(dim=1) for _, logits in logits_in_chunks(hidden, projection, torch.float32)]
    return torch.cat(tokens)


BEST_TOKEN = Operation("best_token", [Implementation("reference", _reference, anywhere)])
