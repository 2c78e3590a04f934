"""A command that runs out of memory prints one message, no traceback, and ends with exit code 2. One process each."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

# The address space is limited to what is in use and `room` MiB, once loading or scoring has begun. (Tokenising is left
# out: the tokenizers library ends the process when it gets no memory. So does OpenBLAS, which takes its own at numpy's
# first product: one is made before.)
LIMITED = """
import re, resource, sys
from pathlib import Path
import numpy as np
from diffscore_fast.backbones.loader import load_model
from diffscore_fast.cli.main import main
from diffscore_fast.cli import bound, score# what is imported late
from diffscore_fast.engine.runner import Runner

np.ones((64, 64)) @ np.ones((64, 64))

def limit():
    used = int(re.search(r"VmSize:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10
    resource.setrlimit(resource.RLIMIT_AS, (used + (int(sys.argv[2]) << 20),) * 2)

evaluate = Runner.evaluate
def limited(self, *arguments, **options):
    limit()
    return evaluate(self, *arguments, **options)

if sys.argv[1] == "loading":
    load_model("mini")  # libraries and their threads are there then
    limit()
else:
    Runner.evaluate = limited
main(sys.argv[3:])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS is Linux's")
@pytest.mark.parametrize(
    ("command", "when", "room", "message"),
    [
        ("score", "loading", 20, "cpu has no room for the weights of 'mini' in torch.float32"),
        ("score", "scoring", 1, "the device has no room for"),
        ("bound", "scoring", 1, "the device has no room for"),
    ],
)
def test_a_command_that_runs_out_of_memory_says_so(tmp_path, command, when, room, message):
    row = {"source": "The cat sat on the mat. " * 270, "candidate": "A cat sat on a mat. " * 270}
    (tmp_path / "in.jsonl").write_text(json.dumps(row) + "\n")
    # A fixed threshold keeps the allocator from serving large arrays out of what was freed before the limit.
    options = ["--text-column", "candidate", "--block-size", "4"] if command == "bound" else ["--draws", "4"]
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, when, str(room), command, "in.jsonl", "-o", "out.jsonl", *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},
    )
    assert done.returncode == 2, done.stderr[-2000:]
    assert message in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "out.jsonl").exists()
