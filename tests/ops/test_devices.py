"""Tensors on more than one device are refused by every operation, before anything is read or returned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from diffscore_fast import ops
from tests.support.products import needs_extension

LAYOUT = ops.AttentionLayout(np.array([0, 3]), np.array([0, 3]), np.array([0]), np.array([2]))
TARGETS = torch.tensor([0, 1, 2])
ATTENTION = tuple(torch.zeros(3, 2, 32) for _ in range(5))
NORM = (torch.zeros(3, 8), torch.zeros(8), torch.zeros(8))


def logprob(function: Callable, given: list[Tensor], implementation: str) -> Any:
    hidden, weight, bias, targets, rows, scale = given
    options = {"rows": rows, "weight_scale": scale, "implementation": implementation}
    return function(hidden, weight, bias, targets, **options)


def linear(given: list[Tensor], implementation: str) -> Tensor:
    norm = ops.ResidualNorm(*given[3:], 1e-5)
    return ops.linear(*given[:3], residual_norm=norm, implementation=implementation)


def int8_feed_forward(given: list[Tensor], implementation: str) -> Tensor:
    x, *layers = given
    up, down = (ops.Int8Layer(ops.Int8Weight(*layers[at : at + 2]), layers[at + 2]) for at in (0, 3))
    return ops.int8_feed_forward(x, up, down, activation="gelu", implementation=implementation)


INT8 = (torch.zeros(8, 32, dtype=torch.int8), torch.ones(8))
LOGPROB = (torch.zeros(3, 32), torch.zeros(8, 32, dtype=torch.int8), torch.zeros(8), TARGETS, TARGETS, torch.ones(8))
CALLS = {  # by operation: its tensors, the call
    "masked_logprob": (LOGPROB, lambda given, name: logprob(ops.masked_logprob, given, name)),
    "masked_logprob_statistics": (LOGPROB, lambda given, name: logprob(ops.masked_logprob_statistics, given, name)),
    "prefix_attention": (ATTENTION, lambda given, name: ops.prefix_attention(*given, LAYOUT, implementation=name)),
    "linear": ((torch.zeros(3, 32), torch.zeros(8, 32), torch.zeros(8), *NORM), linear),
    "int8_linear": (
        (torch.zeros(3, 32), *INT8, torch.zeros(8)),
        lambda given, name: ops.int8_linear(given[0], ops.Int8Weight(*given[1:3]), given[3], implementation=name),
    ),
    "int8_feed_forward": (
        (
            torch.zeros(3, 32),
            *INT8,
            torch.zeros(8),
            torch.zeros(32, 8, dtype=torch.int8),
            torch.ones(32),
            torch.zeros(32),
        ),
        int8_feed_forward,
    ),
    "int8_logprob": (
        (torch.zeros(3, 32), *INT8, torch.zeros(8, 32), torch.zeros(8), TARGETS),
        lambda given, name: ops.int8_logprob(given[0], ops.Int8Weight(*given[1:3]), *given[3:], implementation=name),
    ),
    "log_mean_exp": (
        (torch.zeros(4), torch.tensor([0, 4])),
        lambda given, name: ops.log_mean_exp(*given, implementation=name),
    ),
    "evidence_bounds": (
        (torch.zeros(4), torch.tensor([0, 4])),
        lambda given, name: ops.evidence_bounds(given[0], 2, given[1], implementation=name),
    ),
    "sample_token": (
        (torch.zeros(3, 32), torch.zeros(8, 32), torch.zeros(8), torch.rand(3, dtype=torch.float64)),
        lambda given, name: ops.sample_token(*given, implementation=name),
    ),
    "best_token": (
        (torch.zeros(3, 32), torch.zeros(8, 32), torch.zeros(8)),
        lambda given, name: ops.best_token(*given, implementation=name),
    ),
}
REFERENCE_ONLY = ("sample_token", "best_token")


@pytest.mark.parametrize("implementation", ["auto", "reference", pytest.param("cpu", marks=needs_extension)])
@pytest.mark.parametrize("operation", [item.name for item in ops.OPERATIONS])
def test_a_tensor_on_another_device_is_named(operation, implementation):
    tensors, call = CALLS[operation]
    if implementation == "cpu" and operation in REFERENCE_ONLY:
        implementation = "auto"
    call(list(tensors), implementation)  # all on the CPU: runs
    for place in range(1, len(tensors)):
        given = [item.to("meta") if place == at else item for at, item in enumerate(tensors)]
        with pytest.raises(ValueError, match=f"{operation.removesuffix('_statistics')}: .* on meta"):
            call(given, implementation)


def raw_calls() -> dict[str, tuple]:
    """Arguments of each C++ operation, called without the Python checks."""
    edges, one = torch.tensor([0, 3]), torch.tensor([0])
    projection = (*LOGPROB[:5], [], 8, 1.0, None, LOGPROB[5], "auto")
    return {
        "masked_logprob": projection,
        "masked_logprob_statistics": projection,
        "prefix_attention": (*ATTENTION, edges, edges, one, torch.tensor([2]), TARGETS, 0, "auto"),
        "linear": (torch.zeros(3, 32), torch.zeros(8, 32), torch.zeros(8), "none", *NORM, 1e-5),
        "log_mean_exp": (torch.zeros(4, dtype=torch.float64), torch.tensor([0, 4])),
        "evidence_bounds": (torch.zeros(4, dtype=torch.float64), 2, torch.tensor([0, 4])),
    }


@needs_extension
@pytest.mark.parametrize("operation", raw_calls())
def test_the_kernels_themselves_refuse_a_tensor_without_memory(operation):
    arguments = raw_calls()[operation]
    kernel = getattr(torch.ops.diffscore_fast, operation)
    kernel(*arguments)
    tensors = [place for place, item in enumerate(arguments) if isinstance(item, Tensor)]
    for place in tensors[1:]:
        given = [item.to("meta") if at == place else item for at, item in enumerate(arguments)]
        with pytest.raises(ValueError, match="input 0 is on cpu"):
            kernel(*given)
    traced = kernel(*[item.to("meta") if isinstance(item, Tensor) else item for item in arguments])
    assert (traced[0] if isinstance(traced, tuple) else traced).device.type == "meta"
