"""What the commands' options say of how a model runs, as `DiffScorer` and `LikelihoodBounds` take it."""

from __future__ import annotations

from typing import Any

import torch

from diffscore_fast.backbones.loader import multiplies_bfloat16
from diffscore_fast.engine.memory import parse_size

# Measured on one processor with AVX-512 BF16 with `mini`: SummEval and SFRES, root mean square per row.
FASTER_TYPE = (
    "about 1.9 times as fast on this processor; moves scores by 0.002 to 0.004 nats per token (root mean square)"
)


def faster_type(options: dict[str, Any], dtype: str) -> list[tuple[str, str]]:
    """The summary's line about bfloat16: where a CPU that has units for it computed in float32, else nothing."""
    on_cpu = torch.device(options["device"]).type == "cpu"
    return [("--dtype bfloat16", FASTER_TYPE)] if on_cpu and dtype == "float32" and multiplies_bfloat16() else []


def model_arguments(options: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of a `ScoringModel`; options that the command lacks or that were not given are left out.

    Raises
    ------
    InputError
        For a memory size that is not understood.
    """
    found = {name: options.get(name) for name in ("device", "dtype", "implementation", "memory", "token_budget")}
    given = {name: value for name, value in found.items() if value is not None}
    if "dtype" in given:
        given["dtype"] = getattr(torch, given["dtype"])
    if "memory" in given:
        given["memory"] = parse_size(given["memory"])
    return given
