"""Log-softmax of the vocabulary projection, gathered at the target; the logits of a call are never all stored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from diffscore_fast.errors import ImplementationError
from diffscore_fast.ops.extension import cpu_unavailable
from diffscore_fast.ops.projection import Projection, checked_projection, logits_in_chunks
from diffscore_fast.ops.registry import AUTO, Implementation, Operation, anywhere, check_one_device
from diffscore_fast.ops.transfer import to_device
from diffscore_fast.ops.triton_kernels import kernels, on_its_device, triton_unavailable


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

    Differentiable in hidden, weight and bias. The reference alone has a gradient of weight_scale and a second
    derivative. A logit of +inf takes all the mass: the log-sum-exp is +inf, every other token's log-prob is -inf, its
    own log-prob and the entropy are NaN. A logit that is NaN makes the row's results NaN.

    Parameters
    ----------
    hidden : Tensor [N, D]
        Hidden states, in the model's dtype.
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
        gradient of weight_scale, and on a GPU hidden states and weight of different dtypes.

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
    projection = checked_projection(
        "masked_logprob",
        hidden,
        weight,
        bias,
        excluded_ids=excluded_ids,
        vocab_size=vocab_size,
        logit_scale=logit_scale,
        soft_cap=soft_cap,
        weight_scale=weight_scale,
    )
    targets = _checked_targets(hidden, targets, rows, projection.vocab_size)
    tracked = torch.is_grad_enabled() and weight_scale is not None and weight_scale.requires_grad
    wanted = _wanted(hidden, projection, implementation)
    chosen = MASKED_LOGPROB.resolve(hidden.device, "reference" if tracked and wanted == AUTO else wanted)
    if tracked and chosen.name != "reference":
        raise ImplementationError(
            f"masked_logprob: {chosen.name!r} has no gradient of weight_scale; ask for 'reference' or 'auto'"
        )
    return MASKED_LOGPROB.run(chosen, hidden, projection, targets, rows)


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
    """Log-prob, log-sum-exp, entropy and the target's rank, from one pass; arguments of `masked_logprob`.

    log_prob[n] = log p[n, targets[n]],  log_sum_exp[n] = log sum_v exp z[n, v],  entropy[n] = - sum_v p[n, v]
    log p[n, v],  rank[n] = number of v with z[n, v] > z[n, targets[n]].  Not differentiable.
    """
    projection = checked_projection(
        "masked_logprob",
        hidden,
        weight,
        bias,
        excluded_ids=excluded_ids,
        vocab_size=vocab_size,
        logit_scale=logit_scale,
        soft_cap=soft_cap,
        weight_scale=weight_scale,
    )
    targets = _checked_targets(hidden, targets, rows, projection.vocab_size)
    chosen = MASKED_LOGPROB_STATISTICS.resolve(hidden.device, _wanted(hidden, projection, implementation))
    with torch.no_grad():
        return LogitStatistics(*MASKED_LOGPROB_STATISTICS.run(chosen, hidden, projection, targets, rows))


def _checked_targets(hidden: Tensor, targets: Tensor, rows: Tensor | None, vocab_size: int) -> Tensor:
    """The targets on the device of the states. Refuses what a kernel would read beyond its tensors."""
    on_device = None if targets.device.type == "cpu" else targets
    check_one_device("masked_logprob", hidden=hidden, targets=on_device, rows=rows)
    if targets.dtype != torch.int64 or (rows is not None and rows.dtype != torch.int64):
        raise TypeError("masked_logprob: targets and rows must be int64")
    count = len(hidden) if rows is None else len(rows)
    if targets.shape != (count,):
        raise ValueError(f"masked_logprob: {list(targets.shape)} targets for {count} rows")
    if not torch.compiler.is_compiling():  # a graph cannot branch on values; the C++ operation checks them itself
        _check_values("targets", targets, vocab_size, "the vocabulary of")
        if rows is not None:
            _check_values("rows", rows, len(hidden), "the hidden states of")
    return to_device(targets, hidden.device) if targets.device.type == "cpu" else targets


def _check_values(name: str, values: Tensor, end: int, what: str) -> None:
    outside = (values < 0) | (values >= end)
    if bool(outside.any()):  # where they are on a GPU, the host waits for it here
        row = int(outside.nonzero()[0])
        raise IndexError(f"masked_logprob: {name}[{row}] is {int(values[row])}, outside {what} {end}")


def _wanted(hidden: Tensor, projection: Projection, implementation: str) -> str:
    """What to ask the registry for: "auto" goes to the reference where the kernels do not take the dtypes.

    Kernels accumulate in float32, and float64 asks for more; on a GPU they multiply one dtype with itself.
    """
    types = (hidden.dtype, projection.weight.dtype)
    mixed = projection.weight_scale is None and types[0] != types[1]
    beyond = torch.float64 in types or (mixed and hidden.device.type != "cpu")
    return "reference" if implementation == AUTO and beyond else implementation


# reference


def _reference_chunks(
    hidden: Tensor, projection: Projection, targets: Tensor, rows: Tensor | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits [n, V] and target logits [n] of some rows at a time."""
    # Low-precision logits would put every score on a coarse grid, so the product itself is made in float32.
    precision = torch.promote_types(hidden.dtype, torch.float32)
    if rows is not None:
        hidden = hidden[rows]
    for part, logits in logits_in_chunks(hidden, projection, precision):
        yield logits, logits.gather(1, targets[part, None]).squeeze(1)


def _reference(hidden: Tensor, projection: Projection, targets: Tensor, rows: Tensor | None) -> Tensor:
    chunks = _reference_chunks(hidden, projection, targets, rows)
    values = [target - logits.logsumexp(dim=1) for logits, target in chunks]
    precision = torch.promote_types(hidden.dtype, torch.float32)
    return torch.cat(values) if values else torch.zeros(0, dtype=precision, device=hidden.device)


def _reference_statistics(
    hidden: Tensor, projection: Projection, targets: Tensor, rows: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    precision = torch.promote_types(hidden.dtype, torch.float32)
    columns: list[list[Tensor]] = [
        [torch.zeros(0, dtype=kind, device=hidden.device)] for kind in (precision, precision, precision, torch.int64)
    ]
    for logits, target in _reference_chunks(hidden, projection, targets, rows):
        log_sum_exp = logits.logsumexp(dim=1)
        log_probs = logits - log_sum_exp[:, None]
        # A token of probability 0 adds nothing, as p log p goes to 0 with p; beside a logit of +inf all is undefined.
        entropy = -torch.where(log_probs == -torch.inf, 0.0, log_probs.exp() * log_probs).sum(dim=1)
        rank = (logits > target[:, None]).sum(dim=1)
        for column, item in zip(columns, (target - log_sum_exp, log_sum_exp, entropy, rank), strict=True):
            column.append(item)
    log_prob, log_sum_exp, entropy, rank = (torch.cat(column) for column in columns)
    return log_prob, log_sum_exp, entropy, rank


# cpu: csrc/masked_logprob.cpp; its gradient is registered in `ops.extension`


def _cpu(hidden: Tensor, projection: Projection, targets: Tensor, rows: Tensor | None, products: str = AUTO) -> Tensor:
    arguments = _in_schema_order(hidden, projection, targets, rows)
    return torch.ops.diffscore_fast.masked_logprob(*arguments, products)[0]


def _cpu_statistics(
    hidden: Tensor, projection: Projection, targets: Tensor, rows: Tensor | None, products: str = AUTO
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    arguments = _in_schema_order(hidden, projection, targets, rows)
    return torch.ops.diffscore_fast.masked_logprob_statistics(*arguments, products)


def _in_schema_order(hidden: Tensor, projection: Projection, targets: Tensor, rows: Tensor | None) -> tuple[Any, ...]:
    """Arguments of the C++ operations as csrc/register.cpp declares them."""
    weight, bias, weight_scale = projection.tensors()
    return hidden, weight, bias, targets, rows, *projection.options(), weight_scale


# triton: kernels/masked_logprob.py, kernels/logit_gradients.py


@on_its_device
def _triton(hidden: Tensor, projection: Projection, targets: Tensor, rows: Tensor | None) -> Tensor:
    return _TritonLogprob.apply(hidden, *projection.tensors(), targets, rows, projection.options())


@on_its_device
def _triton_statistics(
    hidden: Tensor, projection: Projection, targets: Tensor, rows: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return kernels("masked_logprob").run(_launch(hidden, projection, targets, rows), statistics=True)


def _launch(hidden: Tensor, projection: Projection, targets: Tensor, rows: Tensor | None) -> Any:
    """The kernels' own table of a call."""
    if projection.weight_scale is None and projection.weight.dtype != hidden.dtype:
        types = f"{hidden.dtype} and {projection.weight.dtype}"
        raise ImplementationError(f"masked_logprob: 'triton' needs one dtype; got {types}")
    return kernels("masked_logprob").prepare(hidden, targets, rows, **vars(projection))


class _TritonLogprob(torch.autograd.Function):
    """log_prob [N] by the Triton kernels, with gradients of hidden, weight and bias."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, weight_scale, targets, rows, options):  # type: ignore[no-untyped-def]
        launch = _launch(hidden, Projection(weight, bias, weight_scale, *options), targets, rows)
        log_prob, log_sum_exp, _, _ = kernels("masked_logprob").run(launch, statistics=False)
        ctx.save_for_backward(hidden, weight, bias, weight_scale, targets, rows, log_sum_exp)
        ctx.options = options
        return log_prob

    @staticmethod
    def backward(ctx, grad_log_prob):  # type: ignore[no-untyped-def]
        # once_differentiable would let a gradient without a graph of its own pass, a sum's for instance.
        if torch.is_grad_enabled():  # create_graph=True; the gradients would come without their graph
            raise ImplementationError("masked_logprob: 'triton' has no second derivative; ask for 'reference'")
        hidden, weight, bias, weight_scale, targets, rows, log_sum_exp = ctx.saved_tensors
        with torch.cuda.device_of(hidden):  # Triton launches on the current device
            launch = _launch(hidden, Projection(weight, bias, weight_scale, *ctx.options), targets, rows)
            grads = kernels("logit_gradients").gradients(
                launch, log_sum_exp, grad_log_prob, ctx.needs_input_grad[:3], gathered=rows is not None
            )
        return (*grads, None, None, None, None)


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
