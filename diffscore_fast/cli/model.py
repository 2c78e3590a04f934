"""From the options about the model to the arguments of `DiffScorer` and `LikelihoodBounds`."""

from __future__ import annotations

from typing import Any

import torch

from diffscore_fast.backbones.loader import multiplies_bfloat16
from diffscore_fast.engine.memory import parse_size

# Measured with `mini` on one processor with AVX-512 BF16, on SummEval and SFRES: root mean square over rows.
FASTER_TYPE = (
    "about 3 times as fast where it was measured; moves scores by 0.002 to 0.005 nats per token (root mean square)"
)


def faster_type(options: dict[str, Any], dtype: str) -> list[tuple[str, str]]:
    """A line of the summary that recommends bfloat16, if a CPU with units for it computed in float32; else none."""
    on_cpu = torch.device(options["device"]).type == "cpu"
    return [("--dtype bfloat16", FASTER_TYPE)] if on_cpu and dtype == "float32" and multiplies_bfloat16() else []


def model_arguments(options: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of a `ScoringModel`, for those options that the command has and that were given.

    Raises
    ------
    InputError
        If the memory size cannot be read.
    """
    found = {
        name: options.get(name) for name in ("device", "dtype", "implementation", "memory", "token_budget", "adapter")
    }
    given = {name: value for name, value in found.items() if value is not None}
    if "dtype" in given:
        given["dtype"] = getattr(torch, given["dtype"])
    if "memory" in given:
        given["memory"] = parse_size(given["memory"])
    return given
