"""A matmul with its epilogue: bias, GELU or SwiGLU, residual and layer norm."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from diffscore_fast.errors import ImplementationError
from diffscore_fast.ops.extension import brgemm_unavailable, cpu_unavailable
from diffscore_fast.ops.packed_weights import PackedWeights, pack_weight
from diffscore_fast.ops.registry import AUTO, Implementation, Operation, anywhere, check_one_device

# Rows of every matmul of "tiles". On two AVX2 cores, tiles of 16 to 128 rows take within 10% of one whole bfloat16
# matmul (K 384 and 1536). A single row costs as much as a tile: 4 ms at 32 rows, 17 ms at 128 (K 384, M 1536).
TILE_ROWS = 32


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
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "none",
    residual_norm: ResidualNorm | None = None,
    packed_weights: PackedWeights | None = None,
    implementation: str = AUTO,
) -> Tensor:
    """A matmul with its epilogue: y = norm(activation(x @ weight.T + bias) + residual).

    Parameters
    ----------
    x : Tensor [N, K]
    weight : Tensor [M, K], bias : Tensor [M] or None
    activation : {"none", "gelu", "swiglu"}
        "gelu" is x Phi(x); "swiglu" is silu(first M / 2 columns) * (the others), which leaves M / 2 columns.
    residual_norm : ResidualNorm, optional
    packed_weights : PackedWeights, optional
        Keeps the weight as bfloat16 instructions read it, from one call to the next. It changes no number.
    implementation : str
        "auto", or a name; a named one runs or raises. On a CPU "auto" takes "cpu": products of bfloat16 by the
        processor's instructions where it has them, all else in float32 inside, and one rounding of the result. float64
        goes to "tiles", torch's matmul of 32 rows at a time. With both, a row's bits do not depend on the other rows.
        On a GPU, and where a gradient is wanted, it takes torch's separate operations ("reference"), whose matmul may
        round differently for another number of rows.

    Returns
    -------
    Tensor [N, M], in the dtype of `x`

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
    if implementation == AUTO and tracked:
        implementation = "reference"
    chosen = resolve_linear(x.device, x.dtype, implementation)
    if tracked and chosen.name != "reference":
        raise ImplementationError(f"linear: {chosen.name!r} has no gradient; ask for 'reference' or 'auto'")
    if chosen.name == "cpu":
        return LINEAR.run(chosen, x, weight, bias, activation, residual_norm, packed_weights)
    return LINEAR.run(chosen, x, weight, bias, activation, residual_norm)


def resolve_linear(device: torch.device, dtype: torch.dtype, wanted: str = AUTO) -> Implementation:
    """What runs where no gradient is wanted; "auto" depends on the dtype and the device only."""
    if wanted == AUTO and device.type != "cpu":
        wanted = "reference"
    elif wanted == AUTO and dtype not in (torch.float32, torch.float16, torch.bfloat16):
        wanted = "tiles"
    return LINEAR.resolve(device, wanted)


def _reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual_norm: ResidualNorm | None
) -> Tensor:
    return _epilogue(functional.linear(x, weight, bias), activation, residual_norm, functional.gelu, functional.silu)


def _tiles(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual_norm: ResidualNorm | None
) -> Tensor:
    """torch's matmul of a fixed number of rows at a time.

    torch and oneDNN choose the order of sums by the shape (a single row has its own kernel). torch also computes 16-bit
    activations by another function for the numbers after the last whole vector of a thread's share.
    """
    y = x.new_empty(len(x), len(weight))
    # Copied, so that layout and alignment are fixed as well. The last tile's unused rows keep earlier rows.
    tile = x.new_zeros(TILE_ROWS, x.shape[1])
    for start in range(0, len(x), TILE_ROWS):
        part = x[start : start + TILE_ROWS]
        tile[: len(part)] = part
        y[start : start + TILE_ROWS] = functional.linear(tile, weight, bias)[: len(part)]
    if x.dtype.itemsize != 2:
        return _epilogue(y, activation, residual_norm, functional.gelu, functional.silu)
    return _epilogue(y, activation, residual_norm, lambda z: _look_up("gelu", z), lambda z: _look_up("silu", z))


def _epilogue(
    y: Tensor,
    activation: str,
    residual_norm: ResidualNorm | None,
    gelu: Callable[[Tensor], Tensor],
    silu: Callable[[Tensor], Tensor],
) -> Tensor:
    if activation == "gelu":
        y = gelu(y)
    if activation == "swiglu":
        gate, up = y.chunk(2, dim=1)
        y = silu(gate) * up
    if residual_norm is not None:
        residual, gain, offset, epsilon = residual_norm
        y = functional.layer_norm(y + residual, gain.shape, gain, offset, epsilon)
    return y


def _look_up(name: str, values: Tensor) -> Tensor:
    """An activation of 16-bit numbers on the CPU, from a table of all 65,536."""
    places = values.contiguous().view(torch.int16).int() + (1 << 15)
    return _table(name, values.dtype).index_select(0, places.flatten()).view(values.shape)


@lru_cache(maxsize=4)
def _table(name: str, dtype: torch.dtype) -> Tensor:
    """An activation [65536] of every number of a 16-bit dtype, by its code as int16 + 32768; correctly rounded."""
    codes = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    activation = functional.gelu if name == "gelu" else functional.silu
    return activation(codes.view(dtype).double()).to(dtype)


def _cpu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    residual_norm: ResidualNorm | None,
    packed_weights: PackedWeights | None = None,
) -> Tensor:
    """In float32 inside, except for products of bfloat16 where the processor has instructions for them.

    Without these instructions 16-bit inputs are converted at each call, the weight too, and the result is rounded once:
    torch's own bfloat16 matmul takes six times as long there (AVX2, 512 rows).
    """
    residual, gain, offset, epsilon = residual_norm or (None, None, None, 0.0)
    tensors = [x, weight, bias, residual, gain, offset]
    products = _bfloat16_products() if _all_are(torch.bfloat16, tensors) else None
    if products is not None:
        gated = activation == "swiglu"
        packed = pack_weight(weight, gated) if packed_weights is None else packed_weights.of(weight, gated)
        return torch.ops.diffscore_fast.linear_packed(
            x, packed, len(weight), bias, activation, residual, gain, offset, epsilon, products
        )
    if x.dtype in (torch.bfloat16, torch.float16):
        tensors = [item if item is None else item.float() for item in tensors]
    y = torch.ops.diffscore_fast.linear(*tensors[:3], activation, *tensors[3:], epsilon)
    return y.to(x.dtype)


def _bfloat16_products() -> str | None:
    """How products of bfloat16 are made in blocks: "brgemm", or None where they are made in float32 instead.

    "plain" loops in the place of brgemm exist for tests on processors without such instructions.
    """
    return "brgemm" if brgemm_unavailable(torch.bfloat16) is None else None


def _all_are(dtype: torch.dtype, tensors: list[Tensor | None]) -> bool:
    return all(item is None or item.dtype == dtype for item in tensors)


def _tiles_unavailable(device: torch.device) -> str | None:
    return None if device.type == "cpu" else f"it runs on the CPU, not on {device.type}"


LINEAR = Operation(
    "linear",
    [
        Implementation("cpu", _cpu, cpu_unavailable),
        Implementation("tiles", _tiles, _tiles_unavailable),
        Implementation("reference", _reference, anywhere),
    ],
)
