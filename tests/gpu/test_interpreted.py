"""The tests of this folder pass in Triton's interpreter, so that no error in the tests themselves waits for a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.gpu import INTERPRETED


@pytest.mark.skipif(INTERPRETED, reason="it is running")
def test_the_tests_for_gpus_pass_in_the_interpreter():
    # A process of its own: Triton reads the variable once, when it is imported.
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "pytest", "-p", "no:cacheprovider", "-m", "gpu", "tests/gpu"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    found = re.search(r"(\d+) passed", run.stdout)
    assert found is not None and int(found[1]) > 20 and "1 skipped" in run.stdout
