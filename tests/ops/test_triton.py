"""The Triton kernels: their meaning in Triton's interpreter, and that no interpreter leaks into other tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import aot
from diffscore_fast.ops import OPERATIONS

ROOT = Path(__file__).parents[2]


def test_kernels_in_the_interpreter():
    # A process of its own: Triton reads the variable once, when it is imported.
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


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_machine_code_has_matrix_instructions_and_no_spills(target):
    """Two kernels of the report; `python -m bench.aot` compiles all of them for all targets."""
    wanted = {"sm_90": "wgmma", "gfx942": "mfma"}[target]
    forward = aot.logprob_cases("LLaDA-8B", 1024, 4096, 126464, torch.bfloat16)[0]
    prefix = aot.attention_cases(12, 64, torch.bfloat16)[0]
    for case in (forward, prefix):
        built = aot.compile_case(case, aot.TARGETS[target][0])
        assert built.spills == 0
        assert wanted in built.instructions
