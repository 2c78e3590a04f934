"""`python -m bench.gpu`: on a machine with a GPU, checks every Triton kernel against float64 with all its options and
whole scores against the CPU's; times masked_logprob and prefix_attention beside torch and, where they are installed,
Liger-Kernel, cut-cross-entropy and flash-attn, and scoring by pack size. Appends to bench/results/gpu.csv; exit code 1
where a check fails.

It has not been run on a GPU. `TRITON_INTERPRET=1 python -m bench.gpu --device cpu --small` runs the same code in
Triton's interpreter, to see that it runs (without bfloat16, which the interpreter's products misread).
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import click
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from bench.records import RESULTS, append_rows
from bench.tiny_model import tiny_model
from diffscore_fast import DiffScorer, ops

EXAMPLES = Path(__file__).parents[1] / "examples" / "summaries.jsonl"
# Nats a token between a GPU's score and the CPU's in float32: rounding of hidden states in the type.
SCORE_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
TENSOR_CORE_DEPTH = 16  # products that a matrix instruction adds up before it rounds its accumulator
Call = Callable[[], Tensor]


@dataclass(frozen=True)
class Sizes:
    """Shapes: (rows, width, vocabulary); (query heads, key heads, head size) with a prefix and windows; segments; rows
    to score whole, with texts cut to that many characters."""

    logprob: tuple[tuple[int, int, int], ...] = ((1024, 768, 50258), (1024, 4096, 126464), (8192, 4096, 126464))
    options: tuple[int, int, int] = (300, 768, 50258)
    beyond_int32: tuple[int, int, int] | None = (17_000, 64, 126464)
    heads: tuple[tuple[int, int, int], ...] = ((12, 12, 64), (32, 8, 128))
    prefix: int = 450
    windows: int = 320
    longest: int = 127
    segments: int = 1_000_000
    texts: int = 48
    characters: int = 100_000
    draws: int = 64
    packs: tuple[int, ...] = (1 << 12, 1 << 14, 1 << 16)
    rounds: int = 20
    types: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16, torch.float32)


SMALL = Sizes(
    logprob=((33, 64, 300),),
    options=(17, 64, 300),
    beyond_int32=None,
    heads=((4, 2, 32),),
    prefix=20,
    windows=6,
    longest=12,
    segments=50,
    texts=1,
    characters=30,
    draws=1,
    packs=(64,),
    rounds=1,
)


@dataclass
class Bench:
    """Where it runs, and what failed so far."""

    device: torch.device
    sizes: Sizes
    failed: list[str] = field(default_factory=list)

    def verdict(self, what: str, error: float, budget: float, same: bool = True) -> None:
        """`same`: bit for bit alone and in a batch. A NaN error fails."""
        fine = error <= budget and same
        if not fine:
            self.failed.append(what)
        bits = "" if same else "; other bits alone than in a batch"
        print(f"{what}: {'ok' if fine else 'FAILED'}; error {error:.1e}, budget {budget:.1e}{bits}", flush=True)

    def time(
        self, kernel: str, shape: str, dtype: torch.dtype, rivals: dict[str, Call], exact: Tensor, allowed: float
    ) -> None:
        """Check each rival against `exact` and time it; one that cannot run is named and passed over."""
        for name, call in rivals.items():
            try:
                error = float((call()[: len(exact)] - exact).abs().max())
                seconds = self.median_seconds(call)
            except Exception as reason:  # noqa: BLE001 - other projects' code, on hardware it may not know
                print(f"  {name} cannot run here: {type(reason).__name__}: {str(reason)[:200]}", flush=True)
                continue
            other = "" if error <= allowed else f"; its numbers are off by {error:.1e}"
            print(f"  {kernel} {name} {shape} {dtype}: {seconds * 1e6:.0f} us{other}", flush=True)
            if self.device.type == "cuda":
                append_rows(
                    RESULTS / "gpu.csv",
                    [
                        {
                            "kernel": kernel,
                            "implementation": name,
                            "shape": shape,
                            "dtype": _name(dtype),
                            "median_s": f"{seconds:.7f}",
                            "error": f"{error:.2e}",
                            "device": torch.cuda.get_device_name(self.device),
                        }
                    ],
                )

    def median_seconds(self, function: Call) -> float:
        """Median time of one call, after three calls that compile and warm up."""
        if self.device.type == "cpu":
            begin = time.perf_counter()
            function()
            return time.perf_counter() - begin
        for _ in range(3):
            function()
        seconds = []
        for _ in range(self.sizes.rounds):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            function()
            end.record()
            torch.cuda.synchronize(self.device)
            seconds.append(begin.elapsed_time(end) / 1e3)
        return statistics.median(seconds)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, device=self.device).to(dtype)

    def integers(self, high: int, count: int) -> Tensor:
        return torch.randint(high, (count,), device=self.device)


def budget_of(reference_error: float, dtype: torch.dtype, depth: int) -> float:
    """Twice the error of a float32-accumulating reference; in 16-bit types at least that of a tensor core.

    Its accumulator is truncated to float32, not rounded, each time it takes up a product of 16: one unit in the last
    place each at most.
    """
    truncated = 0.0 if dtype == torch.float32 else depth / TENSOR_CORE_DEPTH * 2.0**-23
    return max(2 * reference_error + 1e-6, truncated)


def largest(difference: Tensor) -> float:
    return float(difference.abs().max())


def check_masked_logprob(bench: Bench) -> None:
    """Plain calls at the shapes of real models, and who else computes them in what time."""
    for rows, width, size in bench.sizes.logprob:
        for dtype in bench.sizes.types:
            hidden = bench.normal(rows, width, dtype=dtype)
            weight = (bench.normal(size, width) / width**0.5).to(dtype)
            targets, some = bench.integers(size, rows), min(64, rows)
            logits = hidden[:some].double() @ weight.double().T
            exact = logits.log_softmax(1).gather(1, targets[:some, None]).squeeze(1)
            reference, got = (
                ops.masked_logprob(hidden, weight, None, targets, implementation=name)
                for name in ("reference", "triton")
            )
            alone = ops.masked_logprob(hidden[:1], weight, None, targets[:1], implementation="triton")
            budget = budget_of(largest(reference[:some] - exact), dtype, width)
            shape = f"rows {rows} D {width} V {size}"
            bench.verdict(
                f"masked_logprob {shape} {_name(dtype)}",
                largest(got[:some] - exact),
                budget,
                torch.equal(got[:1], alone),
            )
            bench.time("masked_logprob", shape, dtype, logprob_rivals(hidden, weight, targets), exact, 0.1)


def logprob_rivals(hidden: Tensor, weight: Tensor, targets: Tensor) -> dict[str, Call]:
    """Log-prob of each row by everything that is installed."""
    rivals: dict[str, Call] = {
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


def check_logprob_options(bench: Bench) -> None:
    """Every option, the statistics and the gradients, in each type, against float64."""
    rows, width, size = bench.sizes.options
    for dtype in bench.sizes.types:
        hidden = bench.normal(rows, width, dtype=dtype)
        weight, bias = (bench.normal(size, width) / width**0.5).to(dtype), bench.normal(size, dtype=dtype)
        targets, index = bench.integers(size - 20, rows), bench.integers(rows, rows)
        stored = torch.randint(-127, 128, (size, width), device=bench.device, dtype=torch.int8)
        scale = bench.normal(size).abs() / 127 / width**0.5
        cases: dict[str, tuple[Tensor, Tensor | None, dict]] = {
            "bias, rows": (weight, bias, {"rows": index}),
            "excluded ids, padding": (weight, None, {"excluded_ids": (3, 4, size - 30), "vocab_size": size - 10}),
            "scale, soft-cap": (weight, bias, {"logit_scale": 0.5, "soft_cap": 30.0}),
            "int8 weight": (stored, None, {"weight_scale": scale}),
        }
        for name, (matrix, shift, options) in cases.items():
            both = [
                ops.masked_logprob(hidden, matrix, shift, targets, implementation=which, **options)
                for which in ("reference", "triton")
            ]
            wide = {key: item.double() if key == "weight_scale" else item for key, item in options.items()}
            exact = ops.masked_logprob(
                hidden.double(),
                matrix if "weight_scale" in wide else matrix.double(),
                None if shift is None else shift.double(),
                targets,
                implementation="reference",
                **wide,
            )
            finite = exact.isfinite()
            errors = [largest((item - exact)[finite]) for item in both]
            same = torch.equal(both[1].isfinite(), finite)
            bench.verdict(f"masked_logprob {name} {_name(dtype)}", errors[1], budget_of(errors[0], dtype, width), same)
        check_statistics(bench, hidden, weight, targets)
        check_gradients(bench, hidden, weight, bias, targets)
    if bench.sizes.beyond_int32 is not None:
        check_far_index(bench, *bench.sizes.beyond_int32)


def check_statistics(bench: Bench, hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    exact = ops.masked_logprob_statistics(hidden.double(), weight.double(), None, targets, implementation="reference")
    reference, got = (
        ops.masked_logprob_statistics(hidden, weight, None, targets, implementation=name)
        for name in ("reference", "triton")
    )
    for name in ("log_prob", "log_sum_exp", "entropy"):
        errors = [largest(getattr(item, name) - getattr(exact, name)) for item in (reference, got)]
        budget = budget_of(errors[0], hidden.dtype, weight.shape[1]) * (10 if name == "entropy" else 1)  # a sum of p z
        bench.verdict(f"masked_logprob_statistics {name} {_name(hidden.dtype)}", errors[1], budget)
    # Neighbours in rank may change places where their logits differ by less than rounding.
    bench.verdict(f"masked_logprob_statistics rank {_name(hidden.dtype)}", largest((got.rank - exact.rank).double()), 2)


def check_gradients(bench: Bench, hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> None:
    found = {}
    for name in ("exact", "reference", "triton"):
        inputs = [
            item.detach().to(torch.float64 if name == "exact" else item.dtype).requires_grad_()
            for item in (hidden, weight, bias)
        ]
        which = "reference" if name == "exact" else name
        ops.masked_logprob(*inputs, targets, soft_cap=30.0, implementation=which).mean().backward()
        found[name] = [item.grad for item in inputs]
    for index, what in enumerate(("hidden", "weight", "bias")):
        exact = found["exact"][index]
        errors = [largest(found[name][index] - exact) / largest(exact) for name in ("reference", "triton")]
        unit = torch.finfo(hidden.dtype).eps
        bench.verdict(f"gradient of {what} {_name(hidden.dtype)}, relative", errors[1], 2 * errors[0] + 2 * unit)


def check_far_index(bench: Bench, rows: int, width: int, size: int) -> None:
    """More logits than an int32 counts: the gradient writes them all where memory allows it."""
    hidden = bench.normal(rows, width, dtype=torch.bfloat16).requires_grad_()
    weight = bench.normal(size, width, dtype=torch.bfloat16) / 8
    targets = bench.integers(size, rows)
    log_prob = ops.masked_logprob(hidden, weight, None, targets, implementation="triton")
    log_prob.sum().backward()
    last = hidden.detach()[-4:].double()
    softmax = (last @ weight.double().T).softmax(1)
    exact = weight.double()[targets[-4:]] - softmax @ weight.double()
    error = largest(hidden.grad[-4:] - exact) / largest(exact)
    bench.verdict(f"{rows} x {size} logits, gradient of the last rows, relative", error, 0.02)


def check_prefix_attention(bench: Bench) -> None:
    """Candidates x draws over one prefix; flash-attn's varlen function sees the prefix copied per window."""
    sizes, generator = bench.sizes, np.random.default_rng(0)
    lengths = generator.integers(1, sizes.longest + 1, sizes.windows)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    count, rows = sizes.windows, int(offsets[-1])
    seen = np.where(np.arange(count) % 7 == 3, 0, sizes.prefix)
    for heads, key_heads, width in sizes.heads:
        for dtype in bench.sizes.types:
            query = bench.normal(rows, heads, width, dtype=dtype)
            key, value = (bench.normal(rows, key_heads, width, dtype=dtype) for _ in range(2))
            prefix = tuple(bench.normal(sizes.prefix, key_heads, width, dtype=dtype) for _ in range(2))
            inputs = (query, key, value, *prefix)
            for name, visible, block in (
                ("shared prefix", np.full(count, sizes.prefix), 0),
                ("some without prefix", seen, 0),
                ("block-causal", np.full(count, sizes.prefix), 8),
            ):
                layout = ops.AttentionLayout(offsets, offsets, np.zeros(count, np.int64), visible, block=block)
                exact = ops.prefix_attention(*(item.double() for item in inputs), layout, implementation="reference")
                reference, got = (
                    ops.prefix_attention(*inputs, layout, implementation=which) for which in ("reference", "triton")
                )
                last = int(offsets[1])
                first = ops.AttentionLayout(offsets[:2], offsets[:2], np.zeros(1, np.int64), visible[:1], block=block)
                alone = ops.prefix_attention(
                    query[:last], key[:last], value[:last], *prefix, first, implementation="triton"
                )
                unit = torch.finfo(dtype).eps if dtype != torch.float32 else 0.0
                budget = budget_of(largest(reference - exact), dtype, width) + unit * largest(exact)
                shape = f"{count} windows, prefix {sizes.prefix}, {heads}/{key_heads} heads of {width}"
                bench.verdict(
                    f"prefix_attention {name}, {shape} {_name(dtype)}",
                    largest(got - exact),
                    budget,
                    torch.equal(got[:last], alone),
                )
                if name == "shared prefix":
                    rivals = attention_rivals(inputs, layout)
                    bench.time("prefix_attention", shape, dtype, rivals, exact, max(0.05, budget))


def attention_rivals(inputs: tuple[Tensor, ...], layout: ops.AttentionLayout) -> dict[str, Call]:
    rivals: dict[str, Call] = {
        name: (lambda name=name: ops.prefix_attention(*inputs, layout, implementation=name))
        for name in ("triton", "flash_attn", "reference")
    }
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        print("flash-attn is not installed")
        return rivals
    query, key, value, shared_key, shared_value = inputs
    offsets, prefix = layout.key_offsets, len(shared_key)
    keys, values = (
        torch.cat([part for w in range(len(offsets) - 1) for part in (shared, own[offsets[w] : offsets[w + 1]])])
        for shared, own in ((shared_key, key), (shared_value, value))
    )
    edges = torch.from_numpy(offsets).to(query.device, torch.int32)
    key_edges = edges + prefix * torch.arange(len(offsets), device=query.device, dtype=torch.int32)
    longest = int(np.diff(offsets).max())
    rivals["flash-attn varlen, prefix copied"] = lambda: flash_attn_varlen_func(
        query, keys, values, edges, key_edges, longest, longest + prefix
    )
    return rivals


def check_segments(bench: Bench) -> None:
    """The reductions over draws: float64, so that the reference is itself the truth but for the order of its sums."""
    count, draws = bench.sizes.segments, 8
    log_p = torch.randn(count * draws, dtype=torch.float64, device=bench.device) * 3 - 100
    log_p[:draws] = -torch.inf
    segments = torch.arange(count + 1, device=bench.device) * draws
    one, other = (ops.log_mean_exp(log_p, segments, implementation=name) for name in ("reference", "triton"))
    two, bounds = (ops.evidence_bounds(log_p, draws, segments, implementation=name) for name in ("reference", "triton"))
    for name, exact, got in (
        ("log_mean_exp", one.log_mean, other.log_mean),
        ("log_mean_exp, standard error", one.standard_error, other.standard_error),
        ("evidence_bounds, lower", two.lower, bounds.lower),
        ("evidence_bounds, plain upper", two.upper_plain, bounds.upper_plain),
        ("evidence_bounds, upper", two.upper, bounds.upper),
    ):
        finite = exact.isfinite()
        alike = torch.equal(exact[~finite].nan_to_num(7.0), got[~finite].nan_to_num(7.0))
        relative = (got - exact)[finite] / exact[finite].abs().clamp(min=1.0)
        bench.verdict(f"{name}, {count} segments of {draws}", largest(relative), 1e-10, alike)


def check_scoring(bench: Bench) -> None:
    """Whole rows through tokenizer, packs and kernels, in packs of several sizes."""
    sizes, interpreted = bench.sizes, bench.device.type == "cpu"
    rows = [json.loads(line) for line in EXAMPLES.read_text(encoding="utf-8").splitlines()[: sizes.texts]]
    columns = [[row[name][: sizes.characters] for row in rows] for name in ("source", "candidate")]
    with tempfile.TemporaryDirectory() as folder:
        # The interpreter would take hours for the embedded model.
        model = tiny_model(Path(folder)) if interpreted else "mini"
        on_cpu = DiffScorer(model, dtype=torch.float32, implementation="reference")
        exact = torch.from_numpy(on_cpu.score(*columns, draws=sizes.draws).scores)
        for dtype in (torch.float32,) if interpreted else sizes.types:
            rivals: dict[str, Call] = {}
            for size in sizes.packs:
                scorer = DiffScorer(model, device=bench.device, dtype=dtype, token_budget=size, implementation="triton")

                def score(scorer: DiffScorer = scorer) -> Tensor:
                    return torch.from_numpy(scorer.score(*columns, draws=sizes.draws).scores)

                rivals[f"packs of {size}"] = score
                error = largest(score() - exact)
                bench.verdict(f"scores, packs of {size} {_name(dtype)}", error, SCORE_TOLERANCE[dtype])
            bench.time("score", f"{len(rows)} rows, {sizes.draws} draws", dtype, rivals, exact, SCORE_TOLERANCE[dtype])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@click.command()
@click.option("--device", default="cuda", show_default=True, help="A CUDA or ROCm device, or cpu in the interpreter.")
@click.option("--small", is_flag=True, help="Tiny shapes, to see that it runs.")
def main(device: str, small: bool) -> None:
    """Check Triton kernels against float64 and scores against the CPU's, and time them, on a GPU. Exit code 1 where one
    fails."""
    if device != "cpu" and not torch.cuda.is_available():
        print("bench.gpu needs a GPU that torch can use", file=sys.stderr)
        sys.exit(1)
    torch.manual_seed(0)
    sizes = SMALL if small else Sizes()
    if device == "cpu":
        sizes = replace(sizes, types=(torch.float16, torch.float32))
    bench = Bench(torch.device(device), sizes)
    with torch.cuda.device_of(torch.empty(0, device=device)):  # events are recorded on the current device
        run_checks(bench)
    if bench.failed:
        print(f"failed: {', '.join(bench.failed)}", file=sys.stderr)
    sys.exit(1 if bench.failed else 0)


def run_checks(bench: Bench) -> None:
    for check in (check_segments, check_logprob_options, check_masked_logprob, check_prefix_attention, check_scoring):
        check(bench)


if __name__ == "__main__":
    main()
