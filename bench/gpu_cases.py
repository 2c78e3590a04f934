"""The cases of `bench.gpu`: inputs at the shapes of real models, and every implementation that is installed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from bench.tiny_model import tiny_model
from diffscore_fast import DiffScorer, ops

EXAMPLES = Path(__file__).parents[1] / "examples" / "summaries.jsonl"
Call = Callable[[], Tensor]


@dataclass(frozen=True)
class Sizes:
    """Shapes of the cases.

    logprob : (rows, width, vocabulary)
    heads : (query heads, key-value heads, head_dim) over a prefix of `prefix` tokens and `windows` windows, each of at
        most `max_window` tokens
    texts, characters, draws : rows to score whole, characters of each text, and mask draws
    packs : token budgets of the scorer
    """

    logprob: tuple[tuple[int, int, int], ...] = ((1024, 768, 50258), (1024, 4096, 126464), (8192, 4096, 126464))
    heads: tuple[tuple[int, int, int], ...] = ((12, 12, 64), (32, 8, 128))
    prefix: int = 450
    windows: int = 320
    max_window: int = 127
    texts: int = 48
    characters: int = 100_000
    draws: int = 64
    packs: tuple[int, ...] = (1 << 12, 1 << 14, 1 << 16)
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16, torch.float32)


SMALL = Sizes(
    logprob=((33, 64, 300),),
    heads=((4, 2, 32),),
    prefix=20,
    windows=6,
    max_window=12,
    texts=1,
    characters=30,
    draws=1,
    packs=(64,),
    dtypes=(torch.float32,),
)


@dataclass(frozen=True)
class Case:
    """One operation at one shape in one dtype.

    calls : one call per implementation; each returns what the operation returns
    exact : the result of another computation, of the first rows at least: the error of every call is recorded with it
    """

    operation: str
    shape: str
    dtype: torch.dtype
    calls: dict[str, Call]
    exact: Tensor


def all_cases(device: torch.device, sizes: Sizes, scratch: Path) -> Iterator[Case]:
    """The cases, one at a time: the tensors of the largest fill much of a GPU. `scratch` is a folder for a model."""
    for dtype in sizes.dtypes:
        yield from (logprob_case(device, dtype, *shape) for shape in sizes.logprob)
        yield from (attention_case(device, dtype, sizes, *heads) for heads in sizes.heads)
        yield score_case(device, dtype, sizes, scratch)


def logprob_case(device: torch.device, dtype: torch.dtype, rows: int, width: int, size: int) -> Case:
    """Log-prob of each row by everything that is installed; the exact values of the first rows in float64."""
    hidden = torch.randn(rows, width, device=device).to(dtype)
    weight = (torch.randn(size, width, device=device) / width**0.5).to(dtype)
    targets, some = torch.randint(size, (rows,), device=device), min(64, rows)
    exact = (hidden[:some].double() @ weight.double().T).log_softmax(1).gather(1, targets[:some, None]).squeeze(1)
    calls: dict[str, Call] = {
        "triton": lambda: ops.masked_logprob(hidden, weight, None, targets, implementation="triton"),
        "linear + cross_entropy": lambda: (
            -functional.cross_entropy(functional.linear(hidden, weight).float(), targets, reduction="none")
        ),
    }
    try:
        from cut_cross_entropy import linear_cross_entropy

        calls["cut-cross-entropy"] = lambda: -linear_cross_entropy(hidden, weight, targets, reduction="none")
    except ImportError:
        print("cut-cross-entropy is not installed")
    try:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        calls["Liger-Kernel"] = lambda: -liger_fused_linear_cross_entropy(hidden, weight, targets, reduction="none")
    except ImportError:
        print("Liger-Kernel is not installed")
    return Case("masked_logprob", f"rows {rows} D {width} V {size}", dtype, calls, exact)


def attention_case(
    device: torch.device, dtype: torch.dtype, sizes: Sizes, heads: int, key_heads: int, width: int
) -> Case:
    """Windows over one shared prefix; flash-attn's varlen function reads a copy of the prefix in front of each."""
    lengths = np.random.default_rng(0).integers(1, sizes.max_window + 1, sizes.windows)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    rows, windows, prefix = int(offsets[-1]), sizes.windows, sizes.prefix

    def normal(count: int, heads: int) -> Tensor:
        return torch.randn(count, heads, width, device=device).to(dtype)

    query, key, value = normal(rows, heads), normal(rows, key_heads), normal(rows, key_heads)
    prefix_key, prefix_value = normal(prefix, key_heads), normal(prefix, key_heads)
    inputs = (query, key, value, prefix_key, prefix_value)
    layout = ops.AttentionLayout(offsets, offsets, np.zeros(windows, np.int64), np.full(windows, prefix))
    calls: dict[str, Call] = {
        name: partial(ops.prefix_attention, *inputs, layout, implementation=name)
        for name in ("triton", "flash_attn", "reference")
    }
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        print("flash-attn is not installed")
    else:
        own = list(zip(offsets[:-1], offsets[1:], strict=True))
        keys = torch.cat([part for first, last in own for part in (prefix_key, key[first:last])])
        values = torch.cat([part for first, last in own for part in (prefix_value, value[first:last])])
        edges = torch.from_numpy(offsets).to(device, torch.int32)
        key_edges = edges + prefix * torch.arange(len(offsets), device=device, dtype=torch.int32)
        max_window = int(lengths.max())
        calls["flash-attn varlen, prefix copied"] = lambda: flash_attn_varlen_func(
            query, keys, values, edges, key_edges, max_window, max_window + prefix
        )
    wide = [item.double() for item in inputs]
    exact = ops.prefix_attention(wide[0], wide[1], wide[2], wide[3], wide[4], layout, implementation="reference")
    shape = f"{windows} windows, prefix {prefix}, {heads}/{key_heads} heads of {width}"
    return Case("prefix_attention", shape, dtype, calls, exact)


def score_case(device: torch.device, dtype: torch.dtype, sizes: Sizes, scratch: Path) -> Case:
    """Whole example rows through tokenizer, packs and kernels, in packs of several sizes; exact: the CPU's scores."""
    columns = example_columns(sizes)
    # In the interpreter the embedded model would take hours.
    model = tiny_model(scratch / "tiny") if device.type == "cpu" else "mini"

    def score(scorer: DiffScorer) -> Tensor:
        return torch.from_numpy(scorer.score(*columns, draws=sizes.draws).scores)

    calls: dict[str, Call] = {}
    for pack in sizes.packs:
        scorer = DiffScorer(model, device=device, dtype=dtype, token_budget=pack, implementation="triton")
        calls[f"packs of {pack}"] = partial(score, scorer)
    exact = score(DiffScorer(model, dtype=torch.float32, implementation="reference"))
    return Case("score", f"{len(columns[0])} rows, {sizes.draws} draws", dtype, calls, exact)


def example_columns(sizes: Sizes) -> list[list[str]]:
    """Sources and candidates of example rows."""
    rows = [json.loads(line) for line in EXAMPLES.read_text(encoding="utf-8").splitlines()[: sizes.texts]]
    return [[row[name][: sizes.characters] for row in rows] for name in ("source", "candidate")]
