"""A product with its epilogue: bias, GELU or SwiGLU, residual and layer norm."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from diffscore_fast.errors import ImplementationError
from diffscore_fast.ops.extension import cpu_unavailable
from diffscore_fast.ops.registry import AUTO, Implementation, Operation, anywhere, check_one_device


class ResidualNorm(NamedTuple):
    """Layer norm of the product plus a residual: gain * (y - mean) / sqrt(variance + epsilon) + offset, per row.

    Parameters
    ----------
    residual : Tensor [N, M]
    gain, offset : Tensor [M]
    epsilon : float
    """

    residual: Tensor
    gain: Tensor
    offset: Tensor
    epsilon: float


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str = "none",
    residual_norm: ResidualNorm | None = None, implementation: str = AUTO,
) -> Tensor:  # fmt: skip
    """norm(activation(x @ weight.T + bias) + residual).

    Parameters
    ----------
    x : Tensor [N, K]
    weight : Tensor [M, K], bias : Tensor [M] or None
    activation : {"none", "gelu", "swiglu"}
        "gelu" is x Phi(x); "swiglu" is silu(first M / 2 columns) * (the others), which leaves M / 2 columns.
    residual_norm : ResidualNorm, optional
    implementation : str
        "auto", or a name; a named one runs or raises. "auto" takes torch's separate operations (the reference) for
        other types than float32 and where a gradient is wanted. The number of rows plays no part: it would let a
        row's bits depend on its batch.

    Returns
    -------
    Tensor [N, M], in the type of `x`

    Raises
    ------
    ImplementationError
        If the named implementation cannot run here, or has no gradient where one is wanted.
    """
    if activation not in ("none", "gelu", "swiglu"):
        raise ValueError(f"linear: activation must be none, gelu or swiglu; got {activation!r}")
    inputs = (x, weight, bias, *(residual_norm or ())[:3])
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"linear: bias must be [{len(weight)}]; got {list(bias.shape)}")
    named = zip(("x", "weight", "bias", "residual", "gain", "offset"), inputs, strict=False)
    check_one_device("linear", **dict(named))
    tracked = torch.is_grad_enabled() and any(item is not None and item.requires_grad for item in inputs)
    if implementation == AUTO and (tracked or x.dtype != torch.float32):
        implementation = "reference"
    chosen = LINEAR.resolve(x.device, implementation)
    if tracked and chosen.name != "reference":
        raise ImplementationError(f"linear: {chosen.name!r} has no gradient; ask for 'reference' or 'auto'")
    return chosen.function(x, weight, bias, activation, residual_norm)


def _reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual_norm: ResidualNorm | None
) -> Tensor:
    y = functional.linear(x, weight, bias)
    if activation == "gelu":
        y = functional.gelu(y)
    if activation == "swiglu":
        gate, up = y.chunk(2, dim=1)
        y = functional.silu(gate) * up
    if residual_norm is not None:
        residual, gain, offset, epsilon = residual_norm
        y = functional.layer_norm(y + residual, gain.shape, gain, offset, epsilon)
    return y


def _cpu(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual_norm: ResidualNorm | None) -> Tensor:
    residual, gain, offset, epsilon = residual_norm or (None, None, None, 0.0)
    return torch.ops.diffscore_fast.linear(x, weight, bias, activation, residual, gain, offset, epsilon)


LINEAR = Operation(
    "linear", [Implementation("cpu", _cpu, cpu_unavailable), Implementation("reference", _reference, anywhere)]
)
