"""The script for GPUs runs, and passes, in Triton's interpreter before a GPU sees it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_every_check_passes_in_the_interpreter():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "bench.gpu", "--device", "cpu", "--small"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "linear + cross_entropy" in done.stdout and "FAILED" not in done.stdout
