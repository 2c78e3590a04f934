"""The bench for GPUs runs in Triton's interpreter, so that no mistake in it waits for a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_every_case_is_timed_in_the_interpreter():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "bench.gpu", "--device", "cpu", "--small"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for timed in ("masked_logprob triton", "masked_logprob linear", "prefix_attention triton", "score packs of 64"):
        assert timed in done.stdout
