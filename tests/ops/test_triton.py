"""The Triton kernels: their meaning in Triton's interpreter, and that no interpreter leaks into other tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

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
