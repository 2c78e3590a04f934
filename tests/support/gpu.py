"""Where the tests of `tests/gpu` run, at which sizes, and the error that they allow.

They run on a GPU, or, with TRITON_INTERPRET=1 in the environment, in Triton's interpreter on the CPU: then at tiny
sizes, and without bfloat16, which the interpreter's dot product misreads.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DTYPES = [torch.float16, torch.float32] if INTERPRETED else [torch.bfloat16, torch.float16, torch.float32]
TENSOR_CORE_DEPTH = 16  # products that a matrix instruction adds before it rounds its accumulator

needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="torch finds no GPU"),
]


@dataclass(frozen=True)
class Sizes:
    """Shapes of the tests.

    logprob : (rows, width, vocabulary) of plain calls
    options : the same, of calls with every option
    beyond_int32 : the same, with more logits than an int32 counts; None to leave the test out
    heads : (query heads, key-value heads, head_dim) over a prefix of `prefix` tokens and `windows` windows, each of at
        most `max_window` tokens
    segments : segments of the reductions
    texts, characters, draws : rows to score whole, characters of each text, and mask draws
    packs : token budgets of the scorer
    """

    logprob: tuple[tuple[int, int, int], ...] = ((1024, 768, 50258), (1024, 4096, 126464), (8192, 4096, 126464))
    options: tuple[int, int, int] = (300, 768, 50258)
    beyond_int32: tuple[int, int, int] | None = (17_000, 64, 126464)
    heads: tuple[tuple[int, int, int], ...] = ((12, 12, 64), (32, 8, 128))
    prefix: int = 450
    windows: int = 320
    max_window: int = 127
    segments: int = 1_000_000
    texts: int = 48
    characters: int = 100_000
    draws: int = 64
    packs: tuple[int, ...] = (1 << 12, 1 << 14, 1 << 16)


SMALL = Sizes(
    logprob=((33, 64, 300),),
    options=(17, 64, 300),
    beyond_int32=None,
    heads=((4, 2, 32),),
    prefix=20,
    windows=6,
    max_window=12,
    segments=50,
    texts=1,
    characters=30,
    draws=1,
    packs=(64,),
)
SIZES = SMALL if INTERPRETED else Sizes()


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def integers(high: int, count: int) -> Tensor:
    """int64 [count], uniform in 0..high - 1."""
    return torch.randint(high, (count,), device=DEVICE)


def largest(difference: Tensor) -> float:
    """Largest absolute value; NaN if one is NaN, so that a comparison with a budget fails."""
    return float(difference.abs().max())


def budget_of(reference_error: float, dtype: torch.dtype, depth: int) -> float:
    """Twice the error of a reference that accumulates in float32; in 16-bit types at least that of a tensor core.

    A tensor core truncates its accumulator to float32 each time it adds a group of 16 products, where a CPU rounds: an
    error of at most one unit in the last place each time. `depth` is the number of products in a sum.
    """
    truncated = 0.0 if dtype == torch.float32 else depth / TENSOR_CORE_DEPTH * 2.0**-23
    return max(2 * reference_error + 1e-6, truncated)
