"""Log-softmax of the vocabulary projection, gathered at the target; the logits of a call are never all stored."""

from __future__ import annotations

import torch
from torch import Tensor

from diffscore_fast.ops.registry import AUTO, Implementation, Operation, anywhere

ROWS_AT_ONCE = 256  # bounds the reference's logits to 256 x V


def masked_logprob(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    rows: Tensor | None = None,
    excluded_ids: tuple[int, ...] = (),
    vocab_size: int | None = None,
    logit_scale: float = 1.0,
    soft_cap: float | None = None,
    implementation: str = AUTO,
) -> Tensor:
    """Log-probability of each target under the softmax over the vocabulary.

    log p[n] = z[n, targets[n]] - log sum_v exp z[n, v],  z = cap(logit_scale * (hidden @ weight.T + bias)),
    cap(z) = soft_cap * tanh(z / soft_cap), with v over the first `vocab_size` rows less `excluded_ids`.

    Parameters
    ----------
    hidden : Tensor [N, D]
        Hidden states, in the model's type.
    weight : Tensor [V, D], bias : Tensor [V] or None
        The vocabulary projection.
    targets : Tensor [N], int64
        The token whose log-probability is wanted.
    rows : Tensor [N], int64, optional
        Rows of `hidden` to read, in place of its rows in order; `hidden` may then have any number of rows.
    excluded_ids : tuple of int
        Tokens whose logit is -inf (a mask token that the model never emits). As a target they have log-prob -inf.
    vocab_size : int, optional
        Number of real vocabulary rows; rows beyond are padding. All rows if not given.
    logit_scale, soft_cap : float
        As in the formula.
    implementation : str
        "auto", or a name; a named one runs or raises.

    Returns
    -------
    Tensor [N], float32
        Natural log-probabilities.

    Raises
    ------
    IndexError
        If a target is outside the real vocabulary.
    """
    size = weight.shape[0] if vocab_size is None else vocab_size
    outside = (targets < 0) | (targets >= size)
    if bool(outside.any()):
        row = int(outside.nonzero()[0, 0])
        raise IndexError(f"masked_logprob: targets[{row}] is {int(targets[row])}, outside the vocabulary of {size}")
    chosen = MASKED_LOGPROB.resolve(hidden.device, implementation)
    return chosen.function(hidden, weight, bias, targets, rows, excluded_ids, size, logit_scale, soft_cap)


def _reference(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, rows: Tensor | None,
    excluded_ids: tuple[int, ...], vocab_size: int, logit_scale: float, soft_cap: float | None,
) -> Tensor:  # fmt: skip
    # Low-precision logits would put every score on a coarse grid, so the product itself is made in float32.
    weight = weight[:vocab_size].float()
    if rows is not None:
        hidden = hidden[rows]
    pieces = []
    for start in range(0, len(targets), ROWS_AT_ONCE):
        logits = torch.nn.functional.linear(hidden[start : start + ROWS_AT_ONCE].float(), weight)
        if bias is not None:
            logits = logits + bias[:vocab_size].float()
        logits = logits * logit_scale
        if soft_cap is not None:
            logits = soft_cap * torch.tanh(logits / soft_cap)
        if excluded_ids:
            logits[:, list(excluded_ids)] = -torch.inf
        target_logits = logits.gather(1, targets[start : start + ROWS_AT_ONCE, None]).squeeze(1)
        pieces.append(target_logits - logits.logsumexp(dim=1))
    return torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.float32, device=hidden.device)


MASKED_LOGPROB = Operation("masked_logprob", [Implementation("reference", _reference, anywhere)])
