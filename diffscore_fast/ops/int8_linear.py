"""Products of float32 rows with int8 weights, and the log-softmax over an int8 vocabulary: exact sums, float32 around.

A number of a row x is read as a whole number, round(127 x / r), times the row's step r / 127 (ties to even). The reach
r is the smaller of max|x| and three root mean squares of x: rows of a transformer have a few numbers that are far
larger than the others, and a step that follows from the largest would be too coarse for the rest. Numbers beyond the
reach have whole numbers beyond 127, whose high parts are multiplied apart, only where there are some. Weights are
codes times one scale per row. Sums of products of codes are exact int32 numbers, so that every implementation gets the
same ones. A row whose numbers are all below 2^-100 counts as zeros; a row with a NaN or an infinity gives NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from diffscore_fast.ops.extension import cpu_unavailable
from diffscore_fast.ops.linear import ResidualNorm
from diffscore_fast.ops.registry import AUTO, Implementation, Operation, anywhere, check_one_device

MAX_DEPTH = 1 << 17  # numbers in a row: 128 * 127 * depth stays below 2^31
REACH, FINE = 3.0, 16384.0  # of `quantised`
MIN_LARGEST = 2.0**-100  # below it, 127 / max|x| would be infinite
VNNI_LOOPS = "avx512_vnni"
ROWS_CHUNK = 256  # bounds the reference's numbers in float64


class Packed(NamedTuple):
    """A weight as the C++ loops read it: panels of 64 rows [panels, ceil(K / 4), 64, 4], and the codes' sums by row."""

    codes: Tensor
    sums: Tensor


class Int8Weight:
    """A matrix of int8 rows with one scale per row: row m is scale[m] * codes[m].

    It stands where a layer has its weight, and a slice of it is a matrix of those rows. It is packed for the C++ loops
    when it is first multiplied there, and so is each slice; both are kept.

    Parameters
    ----------
    codes : Tensor [M, K], int8
    scale : Tensor [M], float32
    """

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        if codes.dtype != torch.int8 or codes.dim() != 2 or scale.dtype != torch.float32:
            raise TypeError("Int8Weight: codes must be [M, K] int8, and scale [M] float32")
        if scale.shape != codes.shape[:1]:
            raise ValueError(f"Int8Weight: scale must be [{len(codes)}]; got {list(scale.shape)}")
        if not 0 < codes.shape[1] <= MAX_DEPTH:
            raise ValueError(f"Int8Weight: rows of {codes.shape[1]} numbers; 1 to {MAX_DEPTH:,} have sums in 32 bits")
        self.codes, self.scale = codes, scale.contiguous()
        self._packed: dict[int, Packed] = {}
        self._slices: dict[tuple[int, int], Int8Weight] = {}

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, rows: slice) -> Int8Weight:
        start, stop, step = rows.indices(len(self))
        if step != 1:
            raise IndexError("Int8Weight: only neighbouring rows can be taken")
        if (start, stop) == (0, len(self)):
            return self
        if (start, stop) not in self._slices:
            self._slices[start, stop] = Int8Weight(self.codes[start:stop], self.scale[start:stop])
        return self._slices[start, stop]

    def packed(self, groups: int = 1) -> Packed:
        """For the C++ loops; with two groups, each half of the rows begins at a panel of its own."""
        if groups not in self._packed:
            self._packed[groups] = Packed(*torch.ops.diffscore_fast.int8_pack(self.codes, groups))
        return self._packed[groups]


class Int8Layer(NamedTuple):
    """A layer of int8 weights with the float32 bias [M] that belongs to it."""

    weight: Int8Weight
    bias: Tensor | None


def int8_loops() -> list[str]:
    """Names of the C++ loops that run on this processor, the fastest first; empty without the extension."""
    return [] if cpu_unavailable(torch.device("cpu")) else list(torch.ops.diffscore_fast.int8_loops())


def int8_unavailable(device: torch.device) -> str | None:
    """None where int8 weights pay: a processor with VNNI and the C++ kernels; else one sentence that says why not."""
    if device.type != "cpu":
        return f"it is for CPUs, not for {device.type}"
    if (reason := cpu_unavailable(device)) is not None:
        return reason
    if VNNI_LOOPS not in int8_loops():
        return "this processor has no AVX-512 VNNI, and without it float32 is faster"
    return None


def int8_linear(
    x: Tensor,
    weight: Int8Weight,
    bias: Tensor | None = None,
    *,
    activation: str = "none",
    residual_norm: ResidualNorm | None = None,
    implementation: str = AUTO,
) -> Tensor:
    """A matmul of quantised rows with its epilogue: y = norm(activation(x @ weight.T + bias) + residual).

    No gradient. The bits of a row do not depend on the other rows, and those of `cpu` not on the processor.

    Parameters
    ----------
    x : Tensor [N, K], float32
        Quantised here, row by row.
    weight : Int8Weight [M, K], bias : Tensor [M] or None
    activation : {"none", "gelu", "swiglu"}
    residual_norm : ResidualNorm, optional
        As in `linear`.
    implementation : str
        "auto", "cpu" or "reference"; a named one runs or raises.

    Returns
    -------
    Tensor [N, M], float32; [N, M / 2] with "swiglu"

    Raises
    ------
    ImplementationError
        If the named implementation cannot run here.
    """
    _check_layers("int8_linear", x, {"weight": Int8Layer(weight, bias)}, residual_norm)
    chosen = INT8_LINEAR.resolve(x.device, implementation)
    return INT8_LINEAR.run(chosen, x, Int8Layer(weight, bias), activation, residual_norm)


def int8_feed_forward(
    x: Tensor,
    up: Int8Layer,
    down: Int8Layer,
    *,
    activation: str = "none",
    residual_norm: ResidualNorm | None = None,
    implementation: str = AUTO,
) -> Tensor:
    """Two layers: y = int8_linear(int8_linear(x, up, activation), down, residual_norm), bit for bit.

    `cpu` keeps what lies between them in cache.
    """
    _check_layers("int8_feed_forward", x, {"up": up, "down": down}, residual_norm)
    chosen = INT8_FEED_FORWARD.resolve(x.device, implementation)
    return INT8_FEED_FORWARD.run(chosen, x, up, down, activation, residual_norm)


def int8_logprob(
    hidden: Tensor,
    codes: Int8Weight,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    excluded_ids: tuple[int, ...] = (),
    vocab_size: int | None = None,
    logit_scale: float = 1.0,
    soft_cap: float | None = None,
    implementation: str = AUTO,
) -> Tensor:
    """Log-probability of each target, with an int8 vocabulary for the log-sum-exp. Arguments as for `masked_logprob`.

    log p[n] = g[n] - log(exp g[n] + sum over v except targets[n] of exp z[n, v])

    with the target's logit g from `weight` in float32 and all others z from `codes`. The target's logit is thus as
    exact as in float32, and no log-prob exceeds 0. Probabilities of all tokens do not add to 1 exactly.

    Parameters
    ----------
    codes : Int8Weight [V, D]
        The vocabulary projection as int8 rows.
    weight : Tensor [V, D], float32
        The same projection, for the targets' logits.

    Raises
    ------
    ValueError
        With a soft cap, or a logit scale of 0 or less: such a projection is multiplied in float32.
    """
    check_one_device(
        "int8_logprob", hidden=hidden, codes=codes.codes, scale=codes.scale, weight=weight, bias=bias, targets=targets
    )
    if soft_cap is not None or not logit_scale > 0:
        raise ValueError("int8_logprob: takes no soft cap, and only a logit scale above 0; use masked_logprob")
    size = len(codes) if vocab_size is None else vocab_size
    excluded = tuple(token for token in excluded_ids if token < size)
    chosen = INT8_LOGPROB.resolve(hidden.device, implementation)
    offset = None if bias is None else bias[:size]
    return INT8_LOGPROB.run(chosen, hidden, codes[:size], weight[:size], offset, targets, excluded, logit_scale)


def _check_layers(operation: str, x: Tensor, layers: dict[str, Int8Layer], residual_norm: ResidualNorm | None) -> None:
    """Refuse tensors on more than one device."""
    tensors: dict[str, Tensor | None] = {"x": x}
    for name, (weight, bias) in layers.items():
        tensors |= {f"{name}.codes": weight.codes, f"{name}.scale": weight.scale, f"bias of {name}": bias}
    if residual_norm is not None:
        tensors |= {"residual": residual_norm.residual, "gain": residual_norm.gain, "offset": residual_norm.offset}
    check_one_device(operation, **tensors)


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers float32 [N, K], and the steps [N] that they count; see the top of this file."""
    largest = x.abs().amax(dim=1)
    finite = x.isfinite().all(dim=1)
    readable = finite & (largest >= MIN_LARGEST)
    x = torch.where(readable[:, None], x, 0.0)
    largest = torch.where(readable, largest, 1.0)
    # As multiples of max|x| / 2^14, so that the sum of squares is exact.
    squares = torch.round(x * (FINE / largest)[:, None]).long().square().sum(dim=1)
    share = (squares.double() / x.shape[1]).sqrt() * (REACH / FINE)
    reach = torch.where(share < 1.0, largest * share.float(), largest)
    reach = torch.where(readable, reach, 1.0)
    codes = torch.round(x * (127.0 / reach)[:, None])
    step = torch.where(readable, reach / 127.0, 0.0)
    return codes, torch.where(finite, step, torch.nan)


def _products(x: Tensor, weight: Int8Weight, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias with quantised rows; sums of whole numbers below 2^31 are exact in float64."""
    codes, step = quantised(x)
    y = (codes.double() @ weight.codes.double().T).float() * (step[:, None] * weight.scale)
    return y if bias is None else y + bias


def _reference(x: Tensor, layer: Int8Layer, activation: str, residual_norm: ResidualNorm | None) -> Tensor:
    y = _products(x, *layer)
    if activation == "gelu":
        y = functional.gelu(y)
    if activation == "swiglu":
        gate, up = y.chunk(2, dim=1)
        y = functional.silu(gate) * up
    if residual_norm is not None:
        residual, gain, offset, epsilon = residual_norm
        y = functional.layer_norm(y + residual, gain.shape, gain, offset, epsilon)
    return y


def _cpu(x: Tensor, layer: Int8Layer, activation: str, residual_norm: ResidualNorm | None, loops: str = AUTO) -> Tensor:
    residual, gain, offset, epsilon = residual_norm or (None, None, None, 0.0)
    first = _tensors(layer, activation)
    return torch.ops.diffscore_fast.int8_linear(x, *first, activation, residual, gain, offset, epsilon, loops)


def _tensors(layer: Int8Layer, activation: str = "none") -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """A layer as the C++ operations take it."""
    return *layer.weight.packed(2 if activation == "swiglu" else 1), layer.weight.scale, layer.bias


def _reference_feed_forward(
    x: Tensor, up: Int8Layer, down: Int8Layer, activation: str, residual_norm: ResidualNorm | None
) -> Tensor:
    return _reference(_reference(x, up, activation, None), down, "none", residual_norm)


def _cpu_feed_forward(
    x: Tensor,
    up: Int8Layer,
    down: Int8Layer,
    activation: str,
    residual_norm: ResidualNorm | None,
    loops: str = AUTO,
) -> Tensor:
    residual, gain, offset, epsilon = residual_norm or (None, None, None, 0.0)
    return torch.ops.diffscore_fast.int8_feed_forward(
        x, *_tensors(up, activation), activation, *_tensors(down), residual, gain, offset, epsilon, loops
    )


def _reference_logprob(
    hidden: Tensor,
    codes: Int8Weight,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    excluded_ids: tuple[int, ...],
    logit_scale: float,
) -> Tensor:
    values = [hidden.new_zeros(0)]
    for start in range(0, len(targets), ROWS_CHUNK):
        part, wanted = hidden[start : start + ROWS_CHUNK], targets[start : start + ROWS_CHUNK]
        gold = (part * weight[wanted]).sum(dim=1)
        gold = (gold if bias is None else gold + bias[wanted]) * logit_scale
        logits = _products(part, codes, bias) * logit_scale
        logits.scatter_(1, wanted[:, None], gold[:, None])
        if excluded_ids:
            logits[:, list(excluded_ids)] = -torch.inf
        values.append(logits.gather(1, wanted[:, None]).squeeze(1) - logits.logsumexp(dim=1))
    return torch.cat(values)


def _cpu_logprob(
    hidden: Tensor,
    codes: Int8Weight,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    excluded_ids: tuple[int, ...],
    logit_scale: float,
    loops: str = AUTO,
) -> Tensor:
    return torch.ops.diffscore_fast.int8_logprob(
        hidden, *codes.packed(), codes.scale, bias, weight, targets, excluded_ids, logit_scale, loops
    )


INT8_LINEAR = Operation(
    "int8_linear",
    [Implementation("cpu", _cpu, cpu_unavailable), Implementation("reference", _reference, anywhere)],
)
INT8_FEED_FORWARD = Operation(
    "int8_feed_forward",
    [
        Implementation("cpu", _cpu_feed_forward, cpu_unavailable),
        Implementation("reference", _reference_feed_forward, anywhere),
    ],
)
INT8_LOGPROB = Operation(
    "int8_logprob",
    [Implementation("cpu", _cpu_logprob, cpu_unavailable), Implementation("reference", _reference_logprob, anywhere)],
)
