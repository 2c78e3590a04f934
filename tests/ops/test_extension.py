"""The C++ extension is used only if it was built from the sources beside it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from diffscore_fast.ops import extension

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(extension._C is None, reason="the C++ extension is not built")
def test_an_extension_older_than_its_sources_is_refused_with_the_reason(tmp_path):
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    with (tmp_path / "csrc" / "inner.h").open("a") as file:
        file.write("// a change\n")
    shutil.copytree(ROOT / "diffscore_fast", tmp_path / "diffscore_fast", ignore=shutil.ignore_patterns("mini"))
    ask = "from diffscore_fast.ops.extension import cpu_unavailable as f; import torch; print(f(torch.device('cpu')))"
    run = subprocess.run([sys.executable, "-c", ask], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "built from other sources" in run.stdout
