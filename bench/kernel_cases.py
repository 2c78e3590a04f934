"""The cases of `bench.kernels`: shapes, implementations to compare, and the printed report."""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import LinearCrossEntropyOptions, functional

from bench.timing import exponential_rate, matrix_rate, peak_extra_bytes, ratio
from diffscore_fast import ops
from diffscore_fast.ops.extension import brgemm_unavailable
from diffscore_fast.ops.packed_weights import PackedWeights

Calls = dict[str, Callable[[], object]]
Seconds = dict[str, list[float]]

OURS = "cpu"
BRGEMM = "cpu, products by brgemm"
PLAIN = "linear + log_softmax + gather"
LARGE = 2048  # side of the square matrices whose matmul rate is the limit
# Options of torch's linear_cross_entropy. The chunked paths have no reduction "none", so they sum.
CHUNKED: dict[str, LinearCrossEntropyOptions | None] = {
    "linear_cross_entropy(options=None)": None,
    "linear_cross_entropy(chunking auto)": LinearCrossEntropyOptions(),
    "linear_cross_entropy(chunking aspect_ratio)": LinearCrossEntropyOptions(chunking_method="aspect_ratio"),
    **{
        f"linear_cross_entropy(batch_chunk_size={rows})": LinearCrossEntropyOptions(
            batch_chunk_size=rows, chunking_method=None
        )
        for rows in (128, 512)
    },
}


@dataclass(frozen=True)
class Case:
    """One kernel at one shape, and the implementations to compare there.

    names : the implementations, this project's among them
    turns : how often each of them is timed
    make : builds the inputs and returns a call for each name
    report : prints what the times mean
    """

    kernel: str
    shape: str
    dtype: torch.dtype
    turns: int
    names: tuple[str, ...]
    make: Callable[[], Calls]
    report: Callable[[Seconds], None]

    @property
    def title(self) -> str:
        return f"{self.kernel} {self.shape} {str(self.dtype).removeprefix('torch.')}"


def all_cases(small: bool) -> list[Case]:
    single, half = torch.float32, torch.bfloat16
    shapes = [
        (1000, 384, 30522, single, 7),
        (1000, 768, 50257, single, 5),
        (512, 4096, 126464, single, 3),
        (1000, 384, 30522, half, 3),
        (1000, 768, 50257, half, 3),
        (512, 4096, 126464, half, 2),
    ]
    rows: tuple[int, ...] = (500, 2000, 8000)
    if small:
        shapes, rows = [(30, 64, 500, single, 2), (30, 64, 500, half, 2)], (30,)
    found = [logprob_case(*shape) for shape in shapes]
    found += [
        attention_case(2 if small else 16, 3 if small else 20, dtype, 2 if small else 9) for dtype in (single, half)
    ]
    for width, dtype in itertools.product((384, 768), (single, half)):
        found += [case for count in rows for case in linear_cases(count, width, dtype, 2 if small else 9)]
    return found + segment_cases(100 if small else 1_000_000, 2 if small else 5)


@functools.cache
def rate(dtype: torch.dtype) -> float:
    return matrix_rate(dtype)


def logprob_case(rows: int, width: int, size: int, dtype: torch.dtype, turns: int) -> Case:
    """In bfloat16 and for the widest model torch's chunked paths are left out: one call takes minutes there."""
    brgemm = (BRGEMM,) if brgemm_unavailable(dtype) is None and width % 32 == 0 else ()
    chunked = tuple(CHUNKED) if dtype == torch.float32 and width < 4096 else tuple(CHUNKED)[:1]
    names = ("large matmul", OURS, *brgemm, PLAIN, *chunked)

    def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
        torch.manual_seed(0)
        hidden, weight = torch.randn(rows, width), torch.randn(size, width) / width**0.5
        return hidden.to(dtype), weight.to(dtype), torch.randn(size).to(dtype), torch.randint(size, (rows,))

    def make() -> Calls:
        hidden, weight, bias, targets = inputs()
        square = torch.randn(LARGE, LARGE).to(dtype)
        own = torch.ops.diffscore_fast.masked_logprob
        calls: Calls = {
            "large matmul": lambda: functional.linear(square, square),
            OURS: lambda: ops.masked_logprob(hidden, weight, bias, targets, implementation="cpu"),
            BRGEMM: lambda: own(hidden, weight, bias, targets, None, [], size, 1.0, None, None, "brgemm"),
            PLAIN: lambda: plain(hidden, weight, bias, targets),
        }
        for name in chunked:
            calls[name] = functools.partial(
                functional.linear_cross_entropy,
                hidden,
                weight,
                targets,
                linear_bias=bias,
                options=CHUNKED[name],
                reduction="none" if CHUNKED[name] is None else "sum",
            )
        return {name: calls[name] for name in names}

    def report(seconds: Seconds) -> None:
        hidden, weight, bias, targets = inputs()
        extra = peak_extra_bytes(lambda: ops.masked_logprob(hidden, weight, bias, targets, implementation="cpu"))
        few = (hidden[:64], weight, bias, targets[:64])
        exact = plain(*(item.double() if item.is_floating_point() else item for item in few))
        error = float((ops.masked_logprob(*few, implementation="cpu") - exact).abs().max())
        plain_error = float((plain(*few) - exact).abs().max())
        own = statistics.median(seconds[OURS])
        share = ratio(seconds, "large matmul", OURS) * rows * width * size / LARGE**3
        best = min(chunked, key=lambda name: statistics.median(seconds[name]))
        print(
            f"{case.title}: {own * 1e3:.0f} ms, {2.0 * rows * width * size / own / 1e9:.1f} GFLOP/s: {share:.2f} of "
            f"the rate of torch's own matmul of size {LARGE}"
        )
        if dtype == torch.bfloat16 and not brgemm:
            print(f"  bfloat16 is slow in torch on this processor ({brgemm_unavailable(dtype)}), hence large ratios")
        print(f"  of linear_cross_entropy, {best} is fastest here")
        print(
            f"  peak extra memory {extra / 2**20:.1f} MiB; error against float64 {error:.1e}, plain path "
            f"{plain_error:.1e}"
        )

    case = Case("masked_logprob", f"rows {rows} D {width} V {size}", dtype, turns, names, make, report)
    return case


def plain(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
    logits = functional.linear(hidden, weight, bias)
    return torch.log_softmax(logits, dim=1).gather(1, targets[:, None]).squeeze(1)


def attention_case(candidates: int, draws: int, dtype: torch.dtype, turns: int) -> Case:
    """Candidates of 20 to 130 tokens, each with its draws, over one 450-token prefix, 12 heads of 32."""
    heads, width, prefix = 12, 32, 450
    lengths = np.random.default_rng(0).integers(20, 127, candidates)
    offsets = np.concatenate([[0], np.cumsum(np.repeat(lengths, draws))]).astype(np.int64)
    windows, rows = len(offsets) - 1, int(offsets[-1])
    layout = ops.AttentionLayout(offsets, offsets, np.zeros(windows, np.int64), np.full(windows, prefix))
    groups = [
        (slice(int(offsets[i]), int(offsets[i + draws])), int(offsets[i + 1] - offsets[i]))
        for i in range(0, windows, draws)
    ]
    brgemm = (BRGEMM,) if brgemm_unavailable(dtype) is None else ()
    names = (OURS, *brgemm, "reference", "SDPA, prefix expanded", "SDPA twice, merged")

    def make() -> Calls:
        torch.manual_seed(0)
        query, key, value = torch.randn(rows, 3 * heads, width).to(dtype).split(heads, dim=1)
        prefix_key, prefix_value = torch.randn(prefix, 2 * heads, width).to(dtype).split(heads, dim=1)

        def stacked(x: Tensor, length: int) -> Tensor:
            return x.view(draws, length, heads, width).transpose(1, 2)

        def expanded() -> Tensor:
            """SDPA by length groups, the prefix copied in front of every draw's own keys and values."""
            out = torch.empty_like(query)
            for part, length in groups:
                keys, values = (
                    torch.cat(
                        [item.expand(draws, prefix, heads, width), own[part].view(draws, length, heads, width)], 1
                    )
                    for item, own in ((prefix_key, key), (prefix_value, value))
                )
                result = functional.scaled_dot_product_attention(
                    stacked(query[part], length), keys.transpose(1, 2), values.transpose(1, 2)
                )
                out[part] = result.transpose(1, 2).reshape(-1, heads, width)
            return out

        def merged() -> Tensor:
            """Two SDPA calls by length groups, prefix (all draws as one) and own, merged by log-sum-exp."""
            out = torch.empty_like(query)
            attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
            for part, length in groups:
                all_draws = query[part].transpose(0, 1)[None]
                shared, shared_lse = attend(
                    all_draws, prefix_key.transpose(0, 1)[None], prefix_value.transpose(0, 1)[None]
                )
                own, own_lse = attend(*(stacked(x[part], length) for x in (query, key, value)))
                shared = shared[0].transpose(0, 1)
                own = own.transpose(1, 2).reshape(-1, heads, width)
                # [draws, heads, length] or [1, heads, all] to [rows, heads]
                shared_lse, own_lse = (
                    lse.transpose(1, 2).reshape(draws * length, heads) for lse in (shared_lse, own_lse)
                )
                share = torch.sigmoid(shared_lse - own_lse)[..., None].to(dtype)
                out[part] = own + share * (shared - own)
            return out

        inputs = (query, key, value, prefix_key, prefix_value, layout)
        own = functools.partial(ops.prefix_attention, *inputs)
        arrays = (layout.key_offsets, layout.query_offsets, layout.prefix_starts, layout.prefix_lengths)
        calls: Calls = {
            OURS: functools.partial(own, implementation="cpu"),
            BRGEMM: functools.partial(
                torch.ops.diffscore_fast.prefix_attention,
                *inputs[:-1],
                *map(torch.from_numpy, arrays),
                None,
                0,
                "brgemm",
            ),
            "reference": functools.partial(own, implementation="reference"),
            "SDPA, prefix expanded": expanded,
            "SDPA twice, merged": merged,
        }
        got = calls[OURS]()
        for name in names:
            tolerance = 1e-5 if dtype == torch.float32 else 0.1  # several roundings to 8 bits
            torch.testing.assert_close(calls[name](), got, rtol=0, atol=tolerance)
        return {name: calls[name] for name in names}

    def report(seconds: Seconds) -> None:
        scores = heads * float(np.sum(np.diff(offsets) * (np.diff(offsets) + prefix)))
        fastest = max(rate(torch.float32), rate(dtype))
        products, exponentials = 4.0 * scores * width / fastest, scores / exponential_rate()
        floor = products + exponentials
        print(f"{case.title}: {statistics.median(seconds[OURS]) * 1e3:.0f} ms")
        print(
            f"  floor {floor * 1e3:.0f} ms from torch's matmul and exp rates; exponentials are "
            f"{exponentials / floor:.0%}"
        )

    shape = f"{windows} windows, {rows} queries, prefix {prefix}, {heads} heads of {width}"
    case = Case("prefix_attention", shape, dtype, turns, names, make, report)
    return case


def linear_cases(rows: int, width: int, dtype: torch.dtype, turns: int) -> list[Case]:
    """The body's products at widths 384 and 768 (the embedded model's), against torch's separate calls."""
    return [
        linear_case(name, rows, width, *shape, dtype, turns)
        for name, shape in {
            "qkv": (width, 3 * width, "none", False),
            "out + residual + norm": (width, width, "none", True),
            "up + gelu": (width, 4 * width, "gelu", False),
            "down + residual + norm": (4 * width, width, "none", True),
        }.items()
    ]


def linear_case(
    name: str,
    rows: int,
    width: int,
    depth: int,
    size: int,
    activation: str,
    normed: bool,
    dtype: torch.dtype,
    turns: int,
) -> Case:
    """In bfloat16 a network's weights are packed once, so the timed calls find theirs packed."""
    names = ("large matmul", OURS, "reference")

    def make() -> Calls:
        torch.manual_seed(0)
        x, weight, bias = (
            item.to(dtype)
            for item in (torch.randn(rows, depth), torch.randn(size, depth) / depth**0.5, torch.randn(size))
        )
        residual, gain, offset = (
            item.to(dtype) for item in (torch.randn(rows, size), torch.ones(size), torch.zeros(size))
        )
        norm = ops.ResidualNorm(residual, gain, offset, 1e-12) if normed else None
        kept, square = PackedWeights(), torch.randn(LARGE, LARGE).to(dtype)
        call = functools.partial(ops.linear, x, weight, bias, activation=activation, residual_norm=norm)
        return {
            "large matmul": lambda: functional.linear(square, square),
            OURS: functools.partial(call, packed_weights=kept, implementation=OURS),
            "reference": functools.partial(call, implementation="reference"),
        }

    def report(seconds: Seconds) -> None:
        own = statistics.median(seconds[OURS])
        share = ratio(seconds, "large matmul", OURS) * rows * depth * size / LARGE**3
        print(
            f"{case.title}: {own * 1e3:.2f} ms, {2.0 * rows * depth * size / own / 1e9:.1f} GFLOP/s: {share:.2f} of "
            f"the rate of torch's own matmul of size {LARGE}"
        )

    case = Case("linear", f"{name}, rows {rows} width {width}", dtype, turns, names, make, report)
    return case


def segment_cases(count: int, turns: int) -> list[Case]:
    draws = 8
    return [
        segment_case(kernel, call, count, draws, turns)
        for kernel, call in (
            ("log_mean_exp", lambda values, edges, name: ops.log_mean_exp(values, edges, implementation=name)),
            ("evidence_bounds", lambda values, edges, name: ops.evidence_bounds(values, 4, edges, implementation=name)),
        )
    ]


def segment_case(
    kernel: str, call: Callable[[Tensor, Tensor, str], object], count: int, draws: int, turns: int
) -> Case:
    names = (OURS, "reference")

    def make() -> Calls:
        torch.manual_seed(0)
        values = torch.randn(count * draws, dtype=torch.float64) * 5 - 100
        edges = torch.arange(0, count * draws + 1, draws)
        return {name: functools.partial(call, values, edges, name) for name in names}

    def report(seconds: Seconds) -> None:
        print(f"{case.title}: {statistics.median(seconds[OURS]) * 1e3:.1f} ms")

    case = Case(kernel, f"{count} segments of {draws}", torch.float64, turns, names, make, report)
    return case
