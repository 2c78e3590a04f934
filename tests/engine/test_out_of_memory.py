"""Memory that runs out while scoring, with the error of each library: packs are halved, or a typed error is raised."""

from __future__ import annotations

import errno

import numpy as np
import pytest
import torch

from diffscore_fast.engine.plan import AttentionPattern
from diffscore_fast.engine.runner import Runner
from diffscore_fast.errors import DeviceMemoryError, is_out_of_memory
from tests.engine.test_memory import log_probs
from tests.support.networks import RotaryDecoder

ERRORS = [
    torch.OutOfMemoryError("no room"),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: you tried "
        "to allocate 4000000000000 bytes. Error code 12 (Cannot allocate memory)"
    ),
    RuntimeError("std::bad_alloc"),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("unable to mmap 100 bytes from file <model.safetensors>: Cannot allocate memory (12)"),
    MemoryError(),
    MemoryError("std::bad_alloc"),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
]
OTHERS = [
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    OSError(errno.ENOSPC, "No space left on device"),
    ValueError("out of memory"),
    KeyError("bad_alloc"),
]


class Full(RotaryDecoder):
    """Raises an error beyond `room` tokens."""

    def __init__(self, room: int, error: Exception) -> None:
        super().__init__(logit_shift=0)
        self.room, self.error, self.failures = room, error, 0

    def embed(self, tokens, positions, types):
        if len(tokens) > self.room:
            self.failures += 1
            raise self.error
        return super().embed(tokens, positions, types)


def test_out_of_memory_errors_are_told_from_others():
    found = []
    for ask in (lambda: torch.empty(1 << 46), lambda: np.empty(1 << 50), lambda: bytearray(1 << 60)):
        with pytest.raises((RuntimeError, MemoryError)) as caught:
            ask()
        found.append(is_out_of_memory(caught.value))
    assert found == [True] * 3
    assert not any(map(is_out_of_memory, OTHERS))


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_packs_are_halved_for_every_kind_of_out_of_memory_error(error):
    expected = log_probs(Runner(RotaryDecoder(logit_shift=0)), AttentionPattern("full"))
    device = Full(30, error)
    np.testing.assert_allclose(log_probs(Runner(device), AttentionPattern("full")), expected, atol=1e-5)
    assert 0 < device.failures < 10


@pytest.mark.parametrize("error", ERRORS, ids=repr)
@pytest.mark.parametrize("attention", ["full", "prefix"])
def test_a_window_that_never_fits_is_the_typed_error(error, attention):
    with pytest.raises(DeviceMemoryError, match="no room for"):
        log_probs(Runner(Full(5, error)), AttentionPattern(attention))


@pytest.mark.parametrize("error", OTHERS, ids=repr)
@pytest.mark.parametrize("attention", ["full", "prefix"])
def test_other_errors_are_neither_retried_nor_renamed(error, attention):
    device = Full(5, error)
    with pytest.raises(type(error)) as caught:
        log_probs(Runner(device), AttentionPattern(attention))
    assert caught.value is error and device.failures == 1


def test_a_plan_that_the_host_has_no_room_for_is_the_typed_error(mini, monkeypatch):
    def full(*arguments):
        raise MemoryError("Unable to allocate 3.2 TiB")

    monkeypatch.setattr("diffscore_fast.engine.runner.compose", full)
    with pytest.raises(DeviceMemoryError, match="no room to lay out windows"):
        mini.score(["It rained."], ["It rained all day."], draws=4)
