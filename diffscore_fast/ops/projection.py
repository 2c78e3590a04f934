"""The vocabulary projection: one table of its tensors and options, and its logits in plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from diffscore_fast.ops.registry import check_one_device, check_real, check_row_count

ROWS_CHUNK = 256  # bounds the logits that the references store at once to 256 x V


@dataclass(frozen=True)
class Projection:
    """What turns hidden states into logits: z = cap(logit_scale * (hidden @ weight.T + bias)).

    cap(z) = soft_cap * tanh(z / soft_cap). The logit of an excluded id is -inf. Operations make a projection with
    `checked_projection` from the options that their callers name, and give it to their implementations.

    Parameters
    ----------
    weight : Tensor [V, D]
    bias : Tensor [V] or None
    weight_scale : Tensor [V] or None
        With an int8 weight: row v of the projection is weight_scale[v] * weight[v].
    excluded_ids : tuple of int
        Below `vocab_size`.
    vocab_size : int
        Number of real vocabulary rows; the rows beyond are padding and are not read.
    logit_scale : float
    soft_cap : float or None
        None: no cap.
    """

    weight: Tensor
    bias: Tensor | None
    weight_scale: Tensor | None
    excluded_ids: tuple[int, ...]
    vocab_size: int
    logit_scale: float
    soft_cap: float | None

    def tensors(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The first three fields; autograd keeps them apart from the others."""
        return self.weight, self.bias, self.weight_scale

    def options(self) -> tuple[tuple[int, ...], int, float, float | None]:
        """The other four: Projection(*tensors, *options) is the projection again."""
        return self.excluded_ids, self.vocab_size, self.logit_scale, self.soft_cap


def checked_projection(
    operation: str,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    excluded_ids: tuple[int, ...],
    vocab_size: int | None,
    logit_scale: float,
    soft_cap: float | None,
    weight_scale: Tensor | None,
) -> Projection:
    """The projection of hidden states [rows, D]; `vocab_size` None stands for all rows of the weight.

    Raises
    ------
    ValueError, TypeError
        If shapes, devices, types or options do not fit each other; the message starts with `operation`.
    """
    check_one_device(operation, hidden=hidden, weight=weight, bias=bias, weight_scale=weight_scale)
    check_real(operation, hidden=hidden, weight=weight, bias=bias, weight_scale=weight_scale)
    size = weight.shape[0] if vocab_size is None else vocab_size
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"{operation}: hidden must be [rows, D] and weight [V, D]; got {list(hidden.shape)} and "
            f"{list(weight.shape)}"
        )
    if not 0 < size <= weight.shape[0]:
        raise ValueError(f"{operation}: vocab_size {size} is not in 1 .. {weight.shape[0]}, the rows of the weight")
    check_row_count(operation, "the projection", size)
    for name, vector in (("bias", bias), ("weight_scale", weight_scale)):
        if vector is not None and vector.shape != weight.shape[:1]:
            raise ValueError(f"{operation}: {name} must be [{weight.shape[0]}]; got {list(vector.shape)}")
    if soft_cap is not None and not 0 < soft_cap < float("inf"):
        raise ValueError(f"{operation}: soft_cap must be above 0 and finite, or None for no cap; got {soft_cap}")
    if any(token < 0 for token in excluded_ids):
        raise ValueError(f"{operation}: excluded ids {excluded_ids} must not be negative")
    # A family's mask token may lie among the padded rows, which are outside the normaliser already.
    excluded = tuple(token for token in excluded_ids if token < size)
    return Projection(weight, bias, weight_scale, excluded, size, logit_scale, soft_cap)


def real_rows(projection: Projection, dtype: torch.dtype) -> Projection:
    """The same projection in `dtype`: its real vocabulary rows alone, the weight's scales multiplied in."""
    size = projection.vocab_size
    weight = projection.weight[:size].to(dtype)
    if projection.weight_scale is not None:
        weight = weight * projection.weight_scale[:size, None].to(dtype)
    bias = None if projection.bias is None else projection.bias[:size].to(dtype)
    return replace(projection, weight=weight, bias=bias, weight_scale=None)


def logits_in_chunks(hidden: Tensor, projection: Projection, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Rows of hidden states [N, D], some at a time, and their logits [n, vocab_size], computed in `dtype`."""
    projection = real_rows(projection, dtype)
    for start in range(0, len(hidden), ROWS_CHUNK):
        rows = slice(start, start + ROWS_CHUNK)
        yield rows, reference_logits(hidden[rows].to(dtype), projection)


def reference_logits(hidden: Tensor, projection: Projection) -> Tensor:
    """Logits [n, vocab_size] of hidden states [n, D]; the projection is what `real_rows` returns, in their dtype."""
    logits = torch.nn.functional.linear(hidden, projection.weight)
    if projection.bias is not None:
        logits = logits + projection.bias
    logits = logits * projection.logit_scale
    if projection.soft_cap is not None:
        logits = projection.soft_cap * torch.tanh(logits / projection.soft_cap)
    if projection.excluded_ids:
        logits[:, list(projection.excluded_ids)] = -torch.inf
    return logits
