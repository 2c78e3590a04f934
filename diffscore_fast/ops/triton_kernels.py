"""Whether the Triton kernels can run. They are imported at their first use, since Triton takes a second to load."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


def triton_unavailable(device: torch.device) -> str | None:
    """Availability of the `triton` implementations: None, or one sentence that says why not.

    On the CPU they run only in Triton's interpreter, which is for tests and which TRITON_INTERPRET=1 turns on.
    """
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "it runs on a GPU, not on cpu (in Triton's interpreter with TRITON_INTERPRET=1)"
    return None if device.type in ("cpu", "cuda") else f"it runs on CUDA and ROCm devices, not on {device.type}"


def kernels(name: str) -> ModuleType:
    """The module `diffscore_fast.kernels.<name>`."""
    return import_module(f"diffscore_fast.kernels.{name}")


def on_its_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, run with its first argument's device as the current one, on which Triton launches."""

    @functools.wraps(function)
    def run(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        with torch.cuda.device_of(tensor):  # nothing on a CPU
            return function(tensor, *arguments, **options)

    return run
