"""`python -m bench.kernels`: CPU kernels against what a user would otherwise call, in one run.

Rivals take turns within a round; figures are medians over rounds, ratios medians of a round's own ratio. Rows go to
bench/results/kernels.csv. Words after the command keep the kernels that hold one of them.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from bench.timing import exponential_rate, interleaved, machine, matrix_rate, peak_extra_bytes, ratio, record
from diffscore_fast import ops

LARGE = 2048  # side of the square product whose rate is the yardstick
LOGPROB_SHAPES = ((1000, 384, 30522, 7), (1000, 768, 50257, 5), (512, 4096, 126464, 3))
# Row chunks of linear_cross_entropy that are tried besides its plain path. Its own choice ("auto") is left out: at the
# smallest shape it took 15 s a call where the others took 2 s.
CHUNKS = (128, 512)


def masked_logprob(bf16_rate: float) -> None:
    for rows, width, size, rounds in LOGPROB_SHAPES:
        torch.manual_seed(0)
        hidden, weight = torch.randn(rows, width), torch.randn(size, width) / width**0.5
        bias, targets = torch.randn(size), torch.randint(size, (rows,))

        def plain() -> Tensor:
            logits = functional.linear(hidden, weight, bias)  # noqa: B023 - called within this turn of the loop
            return torch.log_softmax(logits, dim=1).gather(1, targets[:, None])  # noqa: B023

        square = torch.randn(LARGE, LARGE)
        rivals: dict[str, Callable[[], object]] = {
            "large product": lambda: functional.linear(square, square),  # noqa: B023
            "cpu": lambda: ops.masked_logprob(hidden, weight, bias, targets, implementation="cpu"),  # noqa: B023
            "linear + log_softmax + gather": plain,
            **{name: call for name, call in cross_entropies(hidden, weight, bias, targets)},
        }
        with torch.no_grad():
            seconds = interleaved(rivals, rounds)
            extra = peak_extra_bytes(rivals["cpu"])
            some = slice(0, 64)
            exact = functional.linear(hidden[some].double(), weight.double(), bias.double()).log_softmax(1)
            exact = exact.gather(1, targets[some, None]).squeeze(1)
            errors = [
                float((call(hidden[some], weight, bias, targets[some]) - exact).abs().max())
                for call in (
                    lambda *inputs: ops.masked_logprob(*inputs, implementation="cpu"),
                    lambda h, w, b, t: functional.linear(h, w, b).log_softmax(1).gather(1, t[:, None]).squeeze(1),
                )
            ]
        shape = f"rows {rows} D {width} V {size}"
        record("masked_logprob", shape, torch.float32, seconds)
        reached = 2.0 * rows * width * size / statistics.median(seconds["cpu"])
        share = ratio(seconds, "large product", "cpu") * rows * width * size / LARGE**3
        best = min((name for name in seconds if name.startswith("linear_cross")), key=lambda n: sum(seconds[n]))
        print(f"masked_logprob {shape} float32: {statistics.median(seconds['cpu']) * 1e3:.0f} ms")
        print(f"  {reached / 1e9:.1f} GFLOP/s: {share:.2f} of the rate of torch's float32 product of {LARGE}, "
              f"{reached / bf16_rate:.2f} of its bfloat16 product's")  # fmt: skip
        print(f"  {ratio(seconds, 'linear + log_softmax + gather', 'cpu'):.2f} times the plain path, "
              f"{ratio(seconds, best, 'cpu'):.2f} times {best} (its best here)")  # fmt: skip
        print(f"  peak extra memory {extra / 2**20:.1f} MiB; error against float64 {errors[0]:.1e}, "
              f"plain float32 path {errors[1]:.1e}")  # fmt: skip


def cross_entropies(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor):  # type: ignore[no-untyped-def]
    """torch's linear_cross_entropy at each option tried; its chunked path has no reduction "none", so it sums."""

    def make(options: torch.nn.LinearCrossEntropyOptions | None) -> Callable[[], Tensor]:
        reduction = "none" if options is None else "sum"
        return lambda: functional.linear_cross_entropy(
            hidden, weight, targets, linear_bias=bias, reduction=reduction, options=options
        )

    yield "linear_cross_entropy(options=None)", make(None)
    if hidden.shape[1] >= 4096:
        return  # the plain path is the rival there; each option would add minutes
    for chunk in CHUNKS:
        options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=chunk, chunking_method=None)
        yield f"linear_cross_entropy(batch_chunk_size={chunk})", make(options)


def prefix_attention(rate: float) -> None:
    """16 candidates x 20 draws x 20 to 130 tokens, one 450-token prefix, 12 heads of 32."""
    heads, width, prefix, draws = 12, 32, 450, 20
    lengths = np.random.default_rng(0).integers(20, 127, 16)
    offsets = np.concatenate([[0], np.cumsum(np.repeat(lengths, draws))]).astype(np.int64)
    windows = len(offsets) - 1
    layout = ops.AttentionLayout(offsets, offsets, np.zeros(windows, np.int64), np.full(windows, prefix))
    torch.manual_seed(0)
    rows = int(offsets[-1])
    query, key, value = torch.randn(rows, 3 * heads, width).split(heads, dim=1)
    prefix_key, prefix_value = torch.randn(prefix, 2 * heads, width).split(heads, dim=1)
    groups = [(slice(int(offsets[i]), int(offsets[i + draws])), int(offsets[i + 1] - offsets[i]))
              for i in range(0, windows, draws)]  # fmt: skip

    def stacked(x: Tensor, length: int) -> Tensor:
        return x.view(draws, length, heads, width).transpose(1, 2)

    def expanded() -> Tensor:
        """SDPA by length groups, the prefix copied in front of every draw's own keys and values."""
        out = torch.empty_like(query)
        for part, length in groups:
            keys, values = (
                torch.cat([shared.expand(draws, prefix, heads, width), own[part].view(draws, length, heads, width)], 1)
                for shared, own in ((prefix_key, key), (prefix_value, value))
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
            shared, shared_lse = attend(all_draws, prefix_key.transpose(0, 1)[None], prefix_value.transpose(0, 1)[None])
            own, own_lse = attend(*(stacked(x[part], length) for x in (query, key, value)))
            shared = shared[0].transpose(0, 1)
            own = own.transpose(1, 2).reshape(-1, heads, width)
            shared_lse, own_lse = lse_rows(shared_lse, draws * length), lse_rows(own_lse, draws * length)
            share = torch.sigmoid(shared_lse - own_lse)[..., None]
            out[part] = own + share * (shared - own)
        return out

    def lse_rows(lse: Tensor, count: int) -> Tensor:
        """[draws, heads, length] or [1, heads, all] to [rows, heads]."""
        return lse.transpose(1, 2).reshape(count, heads)

    inputs = (query, key, value, prefix_key, prefix_value, layout)
    rivals: dict[str, Callable[[], object]] = {
        "cpu": lambda: ops.prefix_attention(*inputs, implementation="cpu"),
        "reference": lambda: ops.prefix_attention(*inputs, implementation="reference"),
        "SDPA, prefix expanded": expanded,
        "SDPA twice, merged": merged,
    }
    with torch.no_grad():
        got = ops.prefix_attention(*inputs, implementation="cpu")
        for rival in (expanded, merged):
            torch.testing.assert_close(rival(), got, rtol=0, atol=1e-5)
        seconds = interleaved(rivals, 9)
    shape = f"{windows} windows, {rows} queries, prefix {prefix}, {heads} heads of {width}"
    record("prefix_attention", shape, torch.float32, seconds)
    scores = heads * float(np.sum(np.diff(offsets) * (np.diff(offsets) + prefix)))
    products, exponentials = 4.0 * scores * width / rate, scores / exponential_rate()
    floor = products + exponentials
    print(f"prefix_attention {shape} float32: {statistics.median(seconds['cpu']) * 1e3:.0f} ms")
    for rival in list(rivals)[1:]:
        print(f"  {ratio(seconds, rival, 'cpu'):.2f} times {rival}")
    print(
        f"  floor {floor * 1e3:.0f} ms from torch's product and exp rates, the exponentials {exponentials / floor:.0%}"
    )


def linear() -> None:
    """The body's products at the embedded model's shapes and at a 768-wide body's, against torch's separate calls."""
    for width in (384, 768):
        for rows in (32, 500, 2000, 8000):
            torch.manual_seed(0)
            for name, depth, size, activation, normed in (
                ("qkv", width, 3 * width, "none", False),
                ("out + residual + norm", width, width, "none", True),
                ("up + gelu", width, 4 * width, "gelu", False),
                ("down + residual + norm", 4 * width, width, "none", True),
            ):
                x, weight, bias = torch.randn(rows, depth), torch.randn(size, depth) / depth**0.5, torch.randn(size)
                norm = None
                if normed:
                    norm = ops.ResidualNorm(torch.randn(rows, size), torch.ones(size), torch.zeros(size), 1e-12)
                rivals: dict[str, Callable[[], object]] = {
                    kind: (lambda kind=kind, x=x, w=weight, b=bias, a=activation, n=norm: ops.linear(
                        x, w, b, activation=a, residual_norm=n, implementation=kind
                    ))
                    for kind in ("cpu", "reference")
                }  # fmt: skip
                with torch.no_grad():
                    seconds = interleaved(rivals, 9 if rows <= 2000 else 5)
                record("linear", f"{name}, rows {rows} width {width}", torch.float32, seconds)
                reached = 2.0 * rows * depth * size / statistics.median(seconds["cpu"])
                print(f"linear {name}, rows {rows} width {width}: {statistics.median(seconds['cpu']) * 1e3:.2f} ms, "
                      f"{reached / 1e9:.1f} GFLOP/s, {ratio(seconds, 'reference', 'cpu'):.2f} times torch")  # fmt: skip


def segments() -> None:
    count, draws = 1_000_000, 8
    values = torch.randn(count * draws, dtype=torch.float64) * 5 - 100
    edges = torch.arange(0, count * draws + 1, draws)
    for kernel, call in (
        ("log_mean_exp", lambda name: ops.log_mean_exp(values, edges, implementation=name)),
        ("evidence_bounds", lambda name: ops.evidence_bounds(values, 4, edges, implementation=name)),
    ):
        rivals = {name: (lambda name=name, call=call: call(name)) for name in ("cpu", "reference")}
        seconds = interleaved(rivals, 5)
        record(kernel, f"{count} segments of {draws}", torch.float64, seconds)
        print(f"{kernel} {count} segments of {draws}: {statistics.median(seconds['cpu']) * 1e3:.0f} ms, "
              f"{ratio(seconds, 'reference', 'cpu'):.1f} times the reference")  # fmt: skip


def main(words: list[str]) -> None:
    def wanted(kernel: str) -> bool:
        return not words or any(word in kernel for word in words)

    rate, bf16_rate = matrix_rate(torch.float32), matrix_rate(torch.bfloat16)
    print(f"{machine()}; torch {torch.__version__}, {torch.get_num_threads()} threads; large product "
          f"{rate / 1e9:.1f} GFLOP/s float32, {bf16_rate / 1e9:.1f} bfloat16")  # fmt: skip
    if wanted("masked_logprob"):
        masked_logprob(bf16_rate)
    if wanted("prefix_attention"):
        prefix_attention(rate)
    if wanted("linear"):
        linear()
    if wanted("log_mean_exp evidence_bounds"):
        segments()


if __name__ == "__main__":
    main(sys.argv[1:])
