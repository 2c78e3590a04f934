"""Which implementation of an operation runs: one small table, without silent fallback; and checks of inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from diffscore_fast.errors import ImplementationError

AUTO = "auto"
MAX_ROWS = 2**31 - 1  # of a tensor that an operation reads; an expanded tensor may have more without their memory


@dataclass(frozen=True)
class Implementation:
    """One way to run an operation.

    `unavailable(device)` returns None where it can run, else one sentence that says why not.
    """

    name: str
    function: Callable[..., Any]
    unavailable: Callable[[torch.device], str | None]


class Operation:
    """A meaning with several implementations in order of preference; the last is the reference, its specification."""

    def __init__(self, name: str, implementations: list[Implementation]) -> None:
        self.name = name
        self.implementations = {item.name: item for item in implementations}

    def resolve(self, device: torch.device, wanted: str = AUTO) -> Implementation:
        """The implementation to run on `device`.

        `wanted` "auto" takes the first that can run; a name takes that one.

        Raises
        ------
        ImplementationError
            If the name is unknown, or names an implementation that cannot run there.
        """
        if wanted == AUTO:
            return next(item for item in self.implementations.values() if item.unavailable(device) is None)
        if wanted not in self.implementations:
            known = ", ".join(self.implementations)
            raise ImplementationError(f"{self.name} has no implementation {wanted!r}; it has: {known}")
        reason = self.implementations[wanted].unavailable(device)
        if reason is not None:
            raise ImplementationError(f"{self.name}: implementation {wanted!r} cannot run on {device}: {reason}")
        return self.implementations[wanted]

    def run(self, chosen: Implementation, *arguments: Any) -> Any:
        """What `chosen` returns. torch's profiler shows the call as diffscore_fast::OPERATION.IMPLEMENTATION."""
        if torch.compiler.is_compiling() or not torch.autograd._profiler_enabled():
            return chosen.function(*arguments)
        with torch.profiler.record_function(f"diffscore_fast::{self.name}.{chosen.name}"):
            return chosen.function(*arguments)

    def reasons(self, device: torch.device) -> dict[str, str | None]:
        """Every implementation in order of preference: None where it can run on `device`, else why it cannot."""
        return {name: item.unavailable(device) for name, item in self.implementations.items()}


def wanted_by_operation(operations: Sequence[Operation], wanted: str) -> dict[str, str]:
    """What to ask each operation for, by operation name, when a user asks for one implementation.

    Operations that do not have it run "auto".

    Raises
    ------
    ImplementationError
        If no operation has it.
    """
    known = sorted({name for operation in operations for name in operation.implementations})
    if wanted not in (AUTO, *known):
        raise ImplementationError(f"no operation has an implementation {wanted!r}; known are: auto, {', '.join(known)}")
    return {item.name: wanted if wanted in item.implementations else AUTO for item in operations}


def check_one_device(operation: str, **tensors: Tensor | None) -> None:
    """Refuses tensors on more than one device, where a kernel would read from a wrong address.

    Raises
    ------
    ValueError
        With the names of the first two tensors on different devices.
    """
    given = {name: item.device for name, item in tensors.items() if item is not None}
    first, device = next(iter(given.items()))
    for name, other in given.items():
        if other != device:
            raise ValueError(f"{operation}: {first} is on {device}, {name} on {other}; they must be on one device")


def check_real(operation: str, **tensors: Tensor | None) -> None:
    """Refuses complex numbers, whose imaginary part a conversion to float32 would drop."""
    for name, item in tensors.items():
        if item is not None and item.is_complex():
            raise TypeError(f"{operation}: {name} must be of real numbers; got {item.dtype}")


def check_row_count(operation: str, name: str, count: int) -> None:
    """Refuses more rows than MAX_ROWS, so that sizes in bytes stay below 2^63."""
    if count > MAX_ROWS:
        raise ValueError(f"{operation}: {name} has {count} rows; at most {MAX_ROWS} are taken")


def anywhere(device: torch.device) -> str | None:
    """Availability of an implementation that runs on every device."""
    return None
