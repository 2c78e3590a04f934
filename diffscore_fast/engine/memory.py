"""A stated memory budget, divided among what grows with the work: prefix cache, packs, and planned windows."""

from __future__ import annotations

import re
from dataclasses import dataclass

from diffscore_fast.backbones.spec import Backbone
from diffscore_fast.errors import InputError

DEFAULT_TOKEN_BUDGET = 4096
DEFAULT_CACHE_BYTES = 512 << 20
DEFAULT_PLAN_TOKENS = 1 << 18
MIN_MEMORY = 64 << 20
# Numbers per token of a pack that are held at once, in units of the hidden size: residual, queries, keys, values,
# attended, and twice a feed-forward of four hidden sizes, with room for copies.
ACTIVATIONS = 24
# Peak bytes of index arrays per planned window token, from its mask to its pack.
PLAN_BYTES = 256
# Packs are larger on a GPU, where a launch costs as much for few tokens as for many (an estimate, not a measurement).
# On a CPU, products beyond the default size are no faster.
DEVICE_TOKEN_BUDGET = 1 << 14
MAX_TOKEN_BUDGET = 1 << 16
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True)
class MemoryPlan:
    """What a runner may hold at once.

    Parameters
    ----------
    token_budget : int
        Maximum number of window tokens of a pack.
    cache_bytes : int
        Size of the prefix cache: keys and values.
    plan_tokens : int
        Maximum number of window tokens laid out at once.
    """

    token_budget: int = DEFAULT_TOKEN_BUDGET
    cache_bytes: int = DEFAULT_CACHE_BYTES
    plan_tokens: int = DEFAULT_PLAN_TOKENS


def divide_memory(budget: int | None, backbone: Backbone) -> MemoryPlan:
    """Divide a budget: half for prefixes, a quarter for a pack's hidden states, a quarter for rows and their windows.

    Parameters
    ----------
    budget : int or None
        Bytes beside the loaded model and libraries; None gives the defaults.

    Raises
    ------
    InputError
        If the budget is below 64 MiB, or is not enough for packs of this model.
    """
    on_cpu = backbone.device.type == "cpu"
    if budget is None:
        return MemoryPlan(DEFAULT_TOKEN_BUDGET if on_cpu else DEVICE_TOKEN_BUDGET)
    if budget < MIN_MEMORY:
        raise InputError(f"memory of {budget} bytes is too little; give at least {MIN_MEMORY >> 20}M")
    spec = backbone.spec
    token_bytes = ACTIVATIONS * spec.hidden_size * backbone.dtype.itemsize
    pack = budget // 4 // token_bytes
    if pack < 1:
        raise InputError(f"memory of {budget} bytes is too little for {spec.name!r}; give at least {4 * token_bytes}")
    return MemoryPlan(
        min(pack, DEFAULT_TOKEN_BUDGET if on_cpu else MAX_TOKEN_BUDGET),
        budget // 2,
        min(budget // 4 // PLAN_BYTES, DEFAULT_PLAN_TOKENS),
    )


def parse_size(text: str) -> int:
    """Bytes of "800M", "1.5G" or "2GiB" (powers of 1,024), or of a plain number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:iB|B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise InputError(f"memory size {text!r} is not understood; write 800M or 2G")
    return int(float(match[1]) * _UNITS[match[2].upper()])
