"""`python -m bench.gpu`: on a machine with a GPU, checks the Triton kernels of masked_logprob and prefix_attention
against float64 and times them; exit code 1 where one fails.

It has not been run on a GPU. It compares with torch and, where
they are installed, Liger-Kernel, cut-cross-entropy and flash-attn, and appends to bench/results/gpu.csv.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable

import click
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from bench.records import RESULTS, append_rows
from diffscore_fast import ops

SHAPES = ((1024, 768, 50258), (1024, 4096, 126464), (8192, 4096, 126464))


def median_seconds(function: Callable[[], object], rounds: int = 20) -> float:
    """Median time of one call by CUDA events, after three calls that compile and warm up."""
    for _ in range(3):
        function()
    seconds = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        torch.cuda.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(seconds)


def logprob_rivals(hidden: Tensor, weight: Tensor, targets: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Log-prob of each row, or its negative, by everything that is installed."""
    rivals: dict[str, Callable[[], Tensor]] = {
        "triton": lambda: ops.masked_logprob(hidden, weight, None, targets, implementation="triton"),
        "linear + cross_entropy": lambda: (
            -functional.cross_entropy(functional.linear(hidden, weight).float(), targets, reduction="none")
        ),
    }
    try:
        from cut_cross_entropy import linear_cross_entropy

        rivals["cut-cross-entropy"] = lambda: -linear_cross_entropy(hidden, weight, targets, reduction="none")
    except ImportError:
        print("cut-cross-entropy is not installed")
    try:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        rivals["Liger-Kernel"] = lambda: -liger_fused_linear_cross_entropy(hidden, weight, targets, reduction="none")
    except ImportError:
        print("Liger-Kernel is not installed")
    return rivals


def check_masked_logprob() -> None:
    for rows, width, size in SHAPES:
        for dtype in (torch.bfloat16, torch.float32):
            torch.manual_seed(0)
            hidden = torch.randn(rows, width, device="cuda", dtype=dtype)
            weight = (torch.randn(size, width, device="cuda") / width**0.5).to(dtype)
            targets = torch.randint(size, (rows,), device="cuda")
            some = slice(0, 64)
            logits = hidden[some].double() @ weight.double().T
            exact = logits.log_softmax(1).gather(1, targets[some, None]).squeeze(1)
            reference, got = (
                ops.masked_logprob(hidden, weight, None, targets, implementation=name)[some]
                for name in ("reference", "triton")
            )
            error, budget = float((got - exact).abs().max()), 2 * float((reference - exact).abs().max()) + 1e-6
            whole = ops.masked_logprob(hidden, weight, None, targets, implementation="triton")
            alone = ops.masked_logprob(hidden[:1], weight, None, targets[:1], implementation="triton")
            same = torch.equal(whole[:1], alone)
            for name, call in logprob_rivals(hidden, weight, targets).items():
                record("masked_logprob", name, f"rows {rows} D {width} V {size}", dtype, median_seconds(call))
            verdict("masked_logprob", dtype, error, budget, same)


def check_prefix_attention() -> None:
    """16 candidates x 20 draws over one prefix; flash-attn's varlen function sees the prefix copied per window."""
    prefix, draws = 450, 20
    lengths = np.repeat(np.random.default_rng(0).integers(20, 127, 16), draws)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    windows, rows = len(lengths), int(offsets[-1])
    layout = ops.AttentionLayout(offsets, offsets, np.zeros(windows, np.int64), np.full(windows, prefix))
    for heads, width in ((12, 64), (32, 128)):
        for dtype in (torch.bfloat16, torch.float32):
            torch.manual_seed(0)
            query, key, value = torch.randn(rows, 3 * heads, width, device="cuda", dtype=dtype).split(heads, 1)
            shared_key, shared_value = torch.randn(prefix, 2 * heads, width, device="cuda", dtype=dtype).split(heads, 1)
            inputs = (query, key, value, shared_key, shared_value)
            got = ops.prefix_attention(*inputs, layout, implementation="triton")
            reference = ops.prefix_attention(*inputs, layout, implementation="reference")
            exact = ops.prefix_attention(*(item.double() for item in inputs), layout, implementation="reference")
            error, budget = float((got - exact).abs().max()), 2 * float((reference - exact).abs().max()) + 1e-6
            last = int(offsets[1])
            one = ops.AttentionLayout(offsets[:2], offsets[:2], np.zeros(1, np.int64), np.full(1, prefix))
            alone = ops.prefix_attention(
                query[:last], key[:last], value[:last], shared_key, shared_value, one, implementation="triton"
            )
            rivals = {
                name: (lambda name=name, inputs=inputs: ops.prefix_attention(*inputs, layout, implementation=name))
                for name in ("triton", "flash_attn", "reference")
                if name != "flash_attn" or runs_flash_attention(dtype)
            }
            rivals.update(varlen_rival(*inputs, offsets, prefix))
            shape = f"{windows} windows, prefix {prefix}, {heads} heads of {width}"
            for name, call in rivals.items():
                record("prefix_attention", name, shape, dtype, median_seconds(call, 5))
            verdict("prefix_attention", dtype, error, budget, torch.equal(got[:last], alone))


def runs_flash_attention(dtype: torch.dtype) -> bool:
    unavailable = ops.PREFIX_ATTENTION.reasons(torch.device("cuda"))["flash_attn"]
    return dtype != torch.float32 and unavailable is None


def varlen_rival(query: Tensor, key: Tensor, value: Tensor, shared_key: Tensor, shared_value: Tensor,
                 offsets: np.ndarray, prefix: int) -> dict[str, Callable[[], Tensor]]:  # fmt: skip
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        print("flash-attn is not installed")
        return {}
    if query.dtype == torch.float32:
        return {}
    keys, values = (
        torch.cat([part for w in range(len(offsets) - 1) for part in (shared, own[offsets[w] : offsets[w + 1]])])
        for shared, own in ((shared_key, key), (shared_value, value))
    )
    edges = torch.from_numpy(offsets).to("cuda", torch.int32)
    key_edges = edges + prefix * torch.arange(len(offsets), device="cuda", dtype=torch.int32)
    longest = int(np.diff(offsets).max())
    queries = query.contiguous()
    return {
        "flash-attn varlen, prefix copied": lambda: flash_attn_varlen_func(
            queries, keys, values, edges, key_edges, longest, longest + prefix
        )
    }


def record(kernel: str, name: str, shape: str, dtype: torch.dtype, seconds: float) -> None:
    """Append a row to gpu.csv, and print it."""
    append_rows(RESULTS / "gpu.csv", [
        {"kernel": kernel, "implementation": name, "shape": shape, "dtype": str(dtype).removeprefix("torch."),
         "median_s": f"{seconds:.7f}", "device": torch.cuda.get_device_name()}
    ])  # fmt: skip
    print(f"  {kernel} {name} {shape} {dtype}: {seconds * 1e6:.0f} us", flush=True)


FAILED: list[str] = []


def verdict(kernel: str, dtype: torch.dtype, error: float, budget: float, same: bool) -> None:
    state = "ok" if error <= budget and same else "FAILED"
    if state == "FAILED":
        FAILED.append(f"{kernel} {dtype}")
    print(f"{kernel} {dtype}: {state}; error {error:.1e}, budget {budget:.1e}; bitwise alone and in a batch: {same}")


@click.command()
def main() -> None:
    """Check the Triton kernels against float64 and time them, on a GPU. Exit code 1 where one fails."""
    if not torch.cuda.is_available():
        print("bench.gpu needs a GPU that torch can use", file=sys.stderr)
        sys.exit(1)
    check_masked_logprob()
    check_prefix_attention()
    if FAILED:
        print(f"failed: {', '.join(FAILED)}", file=sys.stderr)
    sys.exit(1 if FAILED else 0)


if __name__ == "__main__":
    main()
