"""A token drawn from the softmax over the vocabulary; the logits of a call are never all stored."""

from __future__ import annotations

import torch
from torch import Tensor

from diffscore_fast.ops.projection import Projection, checked_projection, logits_in_chunks
from diffscore_fast.ops.registry import AUTO, Implementation, Operation, anywhere, check_one_device
from diffscore_fast.ops.transfer import to_device


def sample_token(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    numbers: Tensor,
    *,
    excluded_ids: tuple[int, ...] = (),
    vocab_size: int | None = None,
    logit_scale: float = 1.0,
    soft_cap: float | None = None,
    weight_scale: Tensor | None = None,
    implementation: str = AUTO,
) -> Tensor:
    """The token at which the cumulative probability passes a given number: inverse transform sampling.

    token[n] = min {v : sum_{u <= v} softmax(z[n])[u] > numbers[n]}, z as in `masked_logprob`.

    Parameters
    ----------
    hidden : Tensor [N, D]
    weight : Tensor [V, D], bias : Tensor [V] or None
    numbers : Tensor [N], float64
        In [0, 1); uniform numbers give samples. On the device of `hidden`, or on the host.
    excluded_ids, vocab_size, logit_scale, soft_cap, weight_scale, implementation
        As for `masked_logprob`.

    Returns
    -------
    Tensor [N], int64
    """
    projection = checked_projection(
        "sample_token",
        hidden,
        weight,
        bias,
        excluded_ids=excluded_ids,
        vocab_size=vocab_size,
        logit_scale=logit_scale,
        soft_cap=soft_cap,
        weight_scale=weight_scale,
    )
    if numbers.shape != hidden.shape[:1]:
        raise ValueError(f"sample_token: numbers must be [{len(hidden)}]; got {list(numbers.shape)}")
    check_one_device("sample_token", hidden=hidden, numbers=None if numbers.device.type == "cpu" else numbers)
    outside = ~((numbers >= 0) & (numbers < 1))
    if bool(outside.any()):
        raise ValueError(f"sample_token: numbers must lie in [0, 1); got {float(numbers[outside][0])}")
    if numbers.device.type == "cpu":
        numbers = to_device(numbers, hidden.device)
    chosen = SAMPLE_TOKEN.resolve(hidden.device, implementation)
    return SAMPLE_TOKEN.run(chosen, hidden, projection, numbers)


def _reference(hidden: Tensor, projection: Projection, numbers: Tensor) -> Tensor:
    tokens = [torch.zeros(0, dtype=torch.int64, device=hidden.device)]
    for rows, logits in logits_in_chunks(hidden, projection, torch.float32):
        cumulative = logits.double().softmax(dim=1).cumsum(dim=1)
        # Rounding may leave the last sum a little below 1; scaled, the number always falls on a token that has weight.
        reached = numbers[rows, None] * cumulative[:, -1:]
        tokens.append(torch.searchsorted(cumulative, reached, right=True).squeeze(1))
    return torch.cat(tokens)


SAMPLE_TOKEN = Operation("sample_token", [Implementation("reference", _reference, anywhere)])
