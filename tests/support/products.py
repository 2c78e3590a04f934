"""Products that only some processors can make: marks for tests, and a choice for a whole run of them.

`pytest --products on` makes every product that fits in blocks, as on a processor with units for bfloat16, and `off`
none. Where those units are missing, plain loops stand in for oneDNN's brgemm. `other` is the one of the two that the
processor does not take by itself for bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from diffscore_fast import ops
from diffscore_fast.ops.extension import brgemm_unavailable, cpu_unavailable
from diffscore_fast.ops.projection import Projection

needs_extension = pytest.mark.skipif(
    cpu_unavailable(torch.device("cpu")) is not None, reason="the C++ extension is not built"
)


def runs_brgemm(dtype: torch.dtype) -> pytest.MarkDecorator:
    """Skips, with the reason, where oneDNN's brgemm cannot multiply `dtype` here."""
    reason = brgemm_unavailable(dtype)
    return pytest.mark.skipif(reason is not None, reason=str(reason))


def in_blocks() -> bool:
    """Whether this run multiplies bfloat16 in blocks: by its own choice, or the processor's."""
    return import_module("diffscore_fast.ops.linear")._bfloat16_products() is not None


def stands_in() -> bool:
    """Whether this run makes bfloat16 products in the slow ways that stand in for units of the processor."""
    return in_blocks() and brgemm_unavailable(torch.bfloat16) is not None


def force_products(choice: str) -> None:
    """For the whole process: "on", "off", "other", or "auto", which changes nothing."""
    if choice == "auto":
        return
    if choice == "other":
        choice = "on" if brgemm_unavailable(torch.bfloat16) is not None else "off"
    on = choice == "on"
    # Asked before any test: torch.compile does not trace the question.
    by = {
        kind: ("brgemm" if brgemm_unavailable(kind) is None else "plain") if on else "inner"
        for kind in (torch.float32, torch.bfloat16)
    }
    body: Any = import_module("diffscore_fast.ops.linear")
    body._bfloat16_products = lambda: by[torch.bfloat16] if on else None
    for operation in (ops.MASKED_LOGPROB, ops.MASKED_LOGPROB_STATISTICS, ops.PREFIX_ATTENTION):
        own = operation.implementations["cpu"]
        operation.implementations["cpu"] = replace(own, function=partial(_made, own.function, by))


def _made(
    function: Callable[..., Any], by: dict[torch.dtype, str], first: Tensor, second: Projection | Tensor, *others: Any
) -> Any:
    """The C++ operation's result; its first two arguments, hidden and projection or query and key, say what fits."""
    kind = first.dtype
    matrix = second.weight if isinstance(second, Projection) else second
    fits = kind == matrix.dtype and kind in by
    if isinstance(second, Projection):  # heads may have any size
        span = 64 * matrix.stride(0) * matrix.element_size()  # of a tile's rows, which oneDNN counts in 32 bits
        fits = fits and first.shape[1] % 32 == 0 and span < 1 << 31
    return function(first, second, *others, products=by[kind] if fits else "inner")
