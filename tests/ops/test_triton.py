"""The Triton kernels: their results in Triton's interpreter, and their machine code for each target."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench import aot
from diffscore_fast.ops import OPERATIONS

ROOT = Path(__file__).parents[2]


def test_kernels_in_the_interpreter():
    # In its own process, since Triton reads the variable once, when it is imported.
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/ops/interpreted/triton_checks.py"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]


def test_the_interpreter_is_off_elsewhere():
    for operation in OPERATIONS:
        if "triton" in operation.implementations:
            assert "GPU" in str(operation.implementations["triton"].unavailable(torch.device("cpu")))


MATRIX_INSTRUCTION = {"sm_80": "mma.sync", "sm_90": "wgmma", "sm_100": "tcgen05", "gfx942": "mfma"}


@pytest.mark.parametrize("target", list(aot.TARGETS))
def test_machine_code_has_matrix_instructions_and_no_spills(target):
    """A kernel of each kind; `python -m bench.aot` compiles all of them, in every dtype and with every option."""
    forward = aot.logprob_cases("BD3-LM", 1024, 768, 50258, torch.bfloat16, eight_bit=True)[0]
    window = aot.attention_cases(12, 64, torch.float16)[2]
    wide = aot.attention_cases(16, 256, torch.bfloat16)[0]
    bounds = aot.segment_cases(1_000_000, 128, 128)[0]
    for case in (forward, window, wide, bounds):
        built = aot.compile_case(case, aot.TARGETS[target][0])
        assert built.spills == 0
        if case is not bounds:  # float64, without a product
            assert MATRIX_INSTRUCTION[target] in built.instructions


def test_spills_are_found():
    """With half the warps of the shipped configuration; otherwise the test above could not fail."""
    case = aot.attention_cases(12, 32, torch.bfloat16)[2]
    assert aot.compile_case(replace(case, launch=(4, 2, True)), aot.TARGETS["sm_100"][0]).spills > 0
