"""Where the system refuses memory for generated code, plain loops run: no process ends, and the numbers stay the same.

Each check runs in its own process, since the policy cannot be removed: prctl(PR_SET_MDWE, PR_MDWE_REFUSE_EXEC_GAIN),
which systemd's MemoryDenyWriteExecute sets.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from diffscore_fast.ops.extension import brgemm_unavailable, generated_code_unavailable
from tests.support.products import needs_extension

ROOT = Path(__file__).parents[2]
PR_GET_MDWE = 66
DENIED = "import ctypes; assert ctypes.CDLL(None).prctl(65, 1, 0, 0, 0) == 0\n"


def policy_missing() -> bool:
    """Whether this kernel lacks the policy (Linux before 6.3, other systems)."""
    return sys.platform != "linux" or ctypes.CDLL(None).prctl(PR_GET_MDWE, 0, 0, 0, 0) < 0


pytestmark = pytest.mark.skipif(policy_missing(), reason="the kernel has no PR_SET_MDWE (Linux 6.3 has)")


def run(code: str, denied: bool = True) -> str:
    finished = subprocess.run(
        [sys.executable, "-c", (DENIED if denied else "") + code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "240"},
    )
    assert finished.returncode == 0, (finished.returncode, finished.stderr[-2000:])
    return finished.stdout


def test_the_probe_sees_the_policy():
    ask = "from diffscore_fast.ops.extension import generated_code_unavailable as f; print(f())"
    assert "no memory for generated code" in run(ask)
    assert run(ask, denied=False).strip() == str(generated_code_unavailable())


def test_the_probe_sees_the_policy_without_the_extension():
    ask = "from diffscore_fast.ops import extension as e; e._C = None; print(e.generated_code_unavailable())"
    assert "no memory for generated code" in run(ask)
    assert run(ask, denied=False).strip() == str(generated_code_unavailable())


@needs_extension
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_operations_run_and_brgemm_says_why_it_does_not(dtype):
    out = run(f"""
import torch
from diffscore_fast import ops
from diffscore_fast.ops.extension import brgemm_unavailable
dtype = torch.{dtype}
print(brgemm_unavailable(dtype))
hidden, weight, targets = torch.randn(50, 64).to(dtype), torch.randn(200, 64).to(dtype), torch.arange(50)
got, want = (ops.masked_logprob(hidden, weight, None, targets, implementation=name) for name in ("auto", "reference"))
assert (got - want).abs().max() < 1e-4
arguments = (hidden, weight, None, targets, None, [], 200, 1.0, None, None, "brgemm")
try:
    torch.ops.diffscore_fast.masked_logprob(*arguments)
except RuntimeError as error:
    print(error)
""")
    assert out.count("no memory for generated code") == 2
    assert "no products by brgemm" in out


SCORE = """
import torch
from diffscore_fast import DiffScorer
scores = []
for dtype in (torch.float32, torch.bfloat16):
    for implementation in ("auto", "reference"):
        scorer = DiffScorer("mini", dtype=dtype, implementation=implementation)
        scores += scorer.score(["The cat sat on the mat."], ["A cat is sitting on a mat."], draws=2).scores.tolist()
print(*scores)
"""


def test_scores_are_those_of_a_process_without_the_policy():
    denied, free = ([float(item) for item in run(SCORE, policy).split()] for policy in (True, False))
    assert denied[:2] == pytest.approx(free[:2], abs=1e-5)  # float32
    assert denied[2:] == pytest.approx(free[2:], abs=2e-2)  # bfloat16


def test_info_tells_the_reason():
    out = run("from diffscore_fast.cli.info import print_info; print_info()")
    assert "generated code" in out and "no memory for generated code" in out


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8, torch.float64], ids=str)
@needs_extension
def test_brgemm_answers_for_the_type_that_it_is_asked_for(dtype):
    assert f"not {str(dtype).removeprefix('torch.')}" in str(brgemm_unavailable(dtype))
