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

from bench import gpu_cases

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
TENSOR_CORE_DEPTH = 16  # products that a matrix instruction adds before it rounds its accumulator

needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="torch finds no GPU"),
]


@dataclass(frozen=True)
class Sizes(gpu_cases.Sizes):
    """Shapes of the tests: those of the timed cases, and

    options : (rows, width, vocabulary) of calls with every option
    beyond_int32 : the same, with more logits than an int32 counts; None to leave the test out
    segments : segments of the reductions
    """

    options: tuple[int, int, int] = (300, 768, 50258)
    beyond_int32: tuple[int, int, int] | None = (17_000, 64, 126464)
    segments: int = 1_000_000


SMALL = Sizes(
    **{**vars(gpu_cases.SMALL), "dtypes": (torch.float16, torch.float32)},
    options=(17, 64, 300),
    beyond_int32=None,
    segments=50,
)
SIZES = SMALL if INTERPRETED else Sizes()
DTYPES = list(SIZES.dtypes)


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
