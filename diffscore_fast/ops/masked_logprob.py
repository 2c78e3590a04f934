"""Log-softmax of the vocabulary projection, gathered at the target; the logits of a call are never all stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from diffscore_fast.errors import ImplementationError
from diffscore_fast.ops.extension import cpu_unavailable
from diffscore_fast.ops.registry import (
    AUTO,
    Implementation,
    Operation,
    anywhere,
    check_one_device,
    check_real,
    check_row_count,
)
from diffscore_fast.ops.transfer import to_device
from diffscore_fast.ops.triton_kernels import kernels, on_its_device, triton_unavailable

ROWS_CHUNK = 256  # bounds the reference's logits to 256 x V


@dataclass(frozen=True)
class LogitStatistics:
    """What one pass over the vocabulary tells about each row, [N] each.

    Parameters
    ----------
    log_prob : float32
        As `masked_logprob` returns it.
    log_sum_exp : float32
        log sum_v exp z[n, v].
    entropy : float32
        - sum_v p[n, v] log p[n, v], in nats.
    rank : int64
        Number of tokens whose logit is above the target's; 0 where the target is the most probable.
    """

    log_prob: Tensor
    log_sum_exp: Tensor
    entropy: Tensor
    rank: Tensor


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
    weight_scale: Tensor | None = None,
    implementation: str = AUTO,
) -> Tensor:
    """Log-probability of each target under the softmax over the vocabulary.

    log p[n] = z[n, targets[n]] - log sum_v exp z[n, v],  z = cap(logit_scale * (hidden @ weight.T + bias)),
    cap(z) = soft_cap * tanh(z / soft_cap), with v over the first `vocab_size` rows less `excluded_ids`.
    Differentiable in hidden, weight and bias; a gradient of weight_scale and a second derivative are the reference's
    alone. A logit of +inf takes all the mass: the log-sum-exp is +inf, every other
    token's log-prob -inf, its own and the entropy NaN. A logit that is NaN makes the row's results NaN.

    Parameters
    ----------
    hidden : Tensor [N, D]
        Hidden states, in the model's type.
    weight : Tensor [V, D], bias : Tensor [V] or None
        The vocabulary projection.
    targets : Tensor [N], int64
        The token whose log-probability is wanted. On the device of `hidden`, or on the host, where they are checked
        without waiting for a GPU.
    rows : Tensor [N], int64, optional
        Rows of `hidden` to read, in place of its rows in order; `hidden` may then have any number of rows.
    excluded_ids : tuple of int
        Tokens whose logit is -inf (a mask token that the model never emits). As a target they have log-prob -inf.
    vocab_size : int, optional
        Number of real vocabulary rows; rows beyond are padding. All rows if not given.
    logit_scale, soft_cap : float
        As in the formula; soft_cap above 0, or None for no cap.
    weight_scale : Tensor [V], optional
        With an int8 `weight`: row v of the projection is weight_scale[v] * weight[v].
    implementation : str
        "auto", or a name; a named one runs or raises. "auto" takes the reference for what kernels leave out: float64, a
        gradient of weight_scale, and on a GPU hidden states and weight of different types.

    Returns
    -------
    Tensor [N], float32 (float64 for float64 hidden states, which the reference alone takes)
        Natural log-probabilities.

    Raises
    ------
    IndexError
        If a target is outside the real vocabulary.
    ImplementationError
        If the named implementation cannot run here, or has no gradient of weight_scale where one is wanted.
    """
    size, excluded_ids, targets = _checked(
        hidden, weight, bias, targets, rows, excluded_ids, vocab_size, soft_cap, weight_scale
    )
    tracked = torch.is_grad_enabled() and weight_scale is not None and weight_scale.requires_grad
    wanted = _wanted(hidden, weight, weight_scale, implementation)
    chosen = MASKED_LOGPROB.resolve(hidden.device, "reference" if tracked and wanted == AUTO else wanted)
    if tracked and chosen.name != "reference":
        raise ImplementationError(
            f"masked_logprob: {chosen.name!r} has no gradient of weight_scale; ask for 'reference' or 'auto'"
        )
    return chosen.function(hidden, weight, bias, targets, rows, excluded_ids, size, logit_scale, soft_cap, weight_scale)


def masked_logprob_statistics(
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
    weight_scale: Tensor | None = None,
    implementation: str = AUTO,
) -> LogitStatistics:
    """Log-prob with log-sum-exp, entropy and the target's rank, from the same pass; arguments of `masked_logprob`.

    Not differentiable.
    """
    size, excluded_ids, targets = _checked(
        hidden, weight, bias, targets, rows, excluded_ids, vocab_size, soft_cap, weight_scale
    )
    wanted = _wanted(hidden, weight, weight_scale, implementation)
    chosen = MASKED_LOGPROB_STATISTICS.resolve(hidden.device, wanted)
    with torch.no_grad():
        return LogitStatistics(
            *chosen.function(
                hidden, weight, bias, targets, rows, excluded_ids, size, logit_scale, soft_cap, weight_scale
            )
        )


def _checked(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    rows: Tensor | None,
    excluded_ids: tuple[int, ...],
    vocab_size: int | None,
    soft_cap: float | None,
    weight_scale: Tensor | None,
) -> tuple[int, tuple[int, ...], Tensor]:
    """Number of real vocabulary rows, the excluded ids among them, and the targets where the states are; refuses what
    a kernel would read beyond."""
    size, excluded_ids = check_projection("masked_logprob", hidden, weight, bias, excluded_ids, vocab_size, soft_cap)
    check_one_device(
        "masked_logprob",
        hidden=hidden,
        targets=None if targets.device.type == "cpu" else targets,
        rows=rows,
        weight_scale=weight_scale,
    )
    check_real("masked_logprob", weight_scale=weight_scale)
    if weight_scale is not None and weight_scale.shape != weight.shape[:1]:
        raise ValueError(f"masked_logprob: weight_scale must be [{len(weight)}]; got {list(weight_scale.shape)}")
    if targets.dtype != torch.int64 or (rows is not None and rows.dtype != torch.int64):
        raise TypeError("masked_logprob: targets and rows must be int64")
    count = len(hidden) if rows is None else len(rows)
    if targets.shape != (count,):
        raise ValueError(f"masked_logprob: {list(targets.shape)} targets for {count} rows")
    if not torch.compiler.is_compiling():  # a graph cannot branch on values; the C++ operation checks them itself
        _check_values("targets", targets, size, "the vocabulary of")
        if rows is not None:
            _check_values("rows", rows, len(hidden), "the hidden states of")
    if targets.device.type == "cpu":
        targets = to_device(targets, hidden.device)
    return size, excluded_ids, targets


def check_projection(
    operation: str,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    excluded_ids: tuple[int, ...],
    vocab_size: int | None,
    soft_cap: float | None,
) -> tuple[int, tuple[int, ...]]:
    """Number of real vocabulary rows, and the excluded ids among them; refuses shapes and options that do not fit."""
    check_one_device(operation, hidden=hidden, weight=weight, bias=bias)
    check_real(operation, hidden=hidden, weight=weight, bias=bias)
    size = weight.shape[0] if vocab_size is None else vocab_size
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"{operation}: hidden must be [rows, D] and weight [V, D]; got {list(hidden.shape)} and "
            f"{list(weight.shape)}"
        )
    if not 0 < size <= weight.shape[0]:
        raise ValueError(f"{operation}: vocab_size {size} is not in 1 .. {weight.shape[0]}, the rows of the weight")
    check_row_count(operation, "the projection", size)
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{operation}: bias must be [{weight.shape[0]}]; got {list(bias.shape)}")
    if soft_cap is not None and not 0 < soft_cap < float("inf"):
        raise ValueError(f"{operation}: soft_cap must be above 0 and finite, or None for no cap; got {soft_cap}")
    if any(token < 0 for token in excluded_ids):
        raise ValueError(f"{operation}: excluded ids {excluded_ids} must not be negative")
    # A family's mask token may lie among the padded rows; it is outside the normaliser already.
    return size, tuple(token for token in excluded_ids if token < size)


def _check_values(name: str, values: Tensor, end: int, what: str) -> None:
    outside = (values < 0) | (values >= end)
    if bool(outside.any()):  # where they are on a GPU, the host waits for it here
        row = int(outside.nonzero()[0])
        raise IndexError(f"masked_logprob: {name}[{row}] is {int(values[row])}, outside {what} {end}")


def _wanted(hidden: Tensor, weight: Tensor, weight_scale: Tensor | None, implementation: str) -> str:
    """What to ask the registry for: "auto" goes to the reference where the types are not the kernels'.

    They accumulate in float32, and float64 asks for more; on a GPU they multiply one type with itself.
    """
    mixed = weight_scale is None and hidden.dtype != weight.dtype
    beyond = torch.float64 in (hidden.dtype, weight.dtype) or (mixed and hidden.device.type != "cpu")
    return "reference" if implementation == AUTO and beyond else implementation


def reference_logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    excluded_ids: tuple[int, ...],
    logit_scale: float,
    soft_cap: float | None,
) -> Tensor:
    """Logits [n, V] of states [n, D], in their type: scale, then soft-cap, then -inf for what is excluded."""
    logits = torch.nn.functional.linear(hidden, weight)
    if bias is not None:
        logits = logits + bias
    logits = logits * logit_scale
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    if excluded_ids:
        logits[:, list(excluded_ids)] = -torch.inf
    return logits


def _reference_pieces(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    rows: Tensor | None,
    excluded_ids: tuple[int, ...],
    vocab_size: int,
    logit_scale: float,
    soft_cap: float | None,
    weight_scale: Tensor | None,
) -> Any:
    """Logits [n, V], targets [n, 1] and target logits [n] of at most ROWS_CHUNK rows at a time."""
    # Low-precision logits would put every score on a coarse grid, so the product itself is made in float32.
    precision = torch.promote_types(hidden.dtype, torch.float32)
    weight = weight[:vocab_size].to(precision)
    if weight_scale is not None:
        weight = weight * weight_scale[:vocab_size, None].to(precision)
    bias = None if bias is None else bias[:vocab_size].to(precision)
    if rows is not None:
        hidden = hidden[rows]
    for start in range(0, len(targets), ROWS_CHUNK):
        states = hidden[start : start + ROWS_CHUNK].to(precision)
        logits = reference_logits(states, weight, bias, excluded_ids, logit_scale, soft_cap)
        yield logits, logits.gather(1, targets[start : start + ROWS_CHUNK, None]).squeeze(1)


def _reference(hidden: Tensor, *arguments: Any) -> Tensor:
    pieces = [target - logits.logsumexp(dim=1) for logits, target in _reference_pieces(hidden, *arguments)]
    precision = torch.promote_types(hidden.dtype, torch.float32)
    return torch.cat(pieces) if pieces else torch.zeros(0, dtype=precision, device=hidden.device)


def _reference_statistics(hidden: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    precision = torch.promote_types(hidden.dtype, torch.float32)
    columns: list[list[Tensor]] = [
        [torch.zeros(0, dtype=kind, device=hidden.device)] for kind in (precision, precision, precision, torch.int64)
    ]
    for logits, target in _reference_pieces(hidden, *arguments):
        log_sum_exp = logits.logsumexp(dim=1)
        log_probs = logits - log_sum_exp[:, None]
        # A token of probability 0 adds nothing, as p log p goes to 0 with p; beside a logit of +inf all is undefined.
        entropy = -torch.where(log_probs == -torch.inf, 0.0, log_probs.exp() * log_probs).sum(dim=1)
        rank = (logits > target[:, None]).sum(dim=1)
        for column, item in zip(columns, (target - log_sum_exp, log_sum_exp, entropy, rank), strict=True):
            column.append(item)
    log_prob, log_sum_exp, entropy, rank = (torch.cat(column) for column in columns)
    return log_prob, log_sum_exp, entropy, rank


def _cpu(*arguments: Any, products: str = AUTO) -> Tensor:
    return torch.ops.diffscore_fast.masked_logprob(*arguments, products)[0]


def _cpu_statistics(*arguments: Any, products: str = AUTO) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.ops.diffscore_fast.masked_logprob_statistics(*arguments, products)


def _one_type(hidden: Tensor, weight: Tensor, weight_scale: Tensor | None) -> None:
    if weight_scale is None and weight.dtype != hidden.dtype:
        raise ImplementationError(f"masked_logprob: 'triton' needs one type; got {hidden.dtype} and {weight.dtype}")


@on_its_device
def _triton(hidden: Tensor, weight: Tensor, *arguments: Any) -> Tensor:
    _one_type(hidden, weight, arguments[-1])
    return kernels("logit_gradients").MaskedLogprob.apply(hidden, weight, *arguments)


@on_its_device
def _triton_statistics(hidden: Tensor, weight: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _one_type(hidden, weight, arguments[-1])
    return kernels("masked_logprob").run(hidden, weight, *arguments, statistics=True)


MASKED_LOGPROB = Operation(
    "masked_logprob",
    [
        Implementation("cpu", _cpu, cpu_unavailable),
        Implementation("triton", _triton, triton_unavailable),
        Implementation("reference", _reference, anywhere),
    ],
)
MASKED_LOGPROB_STATISTICS = Operation(
    "masked_logprob_statistics",
    [
        Implementation("cpu", _cpu_statistics, cpu_unavailable),
        Implementation("triton", _triton_statistics, triton_unavailable),
        Implementation("reference", _reference_statistics, anywhere),
    ],
)
