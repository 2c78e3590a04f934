"""What the commands' options say of how a model runs, as `DiffScorer` and `LikelihoodBounds` take it."""

from __future__ import annotations

from typing import Any

import torch

from diffscore_fast.engine.memory import parse_size


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
