"""The C++ extension is used only if it was built from the sources beside it, against the torch that runs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from diffscore_fast.ops import extension

ROOT = Path(__file__).parents[2]


ASK = "from diffscore_fast.ops.extension import cpu_unavailable as f; print(f(torch.device('cpu')))"

needs_extension = pytest.mark.skipif(extension._C is None, reason="the C++ extension is not built")


def answer(folder: Path, before: str = "") -> str:
    """Whether a new process in this folder can use the extension: None, or the reason why not."""
    command = [sys.executable, "-c", f"import torch; {before}{ASK}"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


@needs_extension
def test_an_extension_older_than_its_sources_is_refused_with_the_reason(tmp_path):
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    with (tmp_path / "csrc" / "inner.h").open("a") as file:
        file.write("// a change\n")
    shutil.copytree(ROOT / "diffscore_fast", tmp_path / "diffscore_fast", ignore=shutil.ignore_patterns("mini"))
    assert "built from other sources" in answer(tmp_path)


@needs_extension
def test_an_extension_for_another_minor_version_of_torch_is_refused_with_both_versions():
    major, minor = torch.__version__.split(".")[:2]
    assert answer(ROOT) == "None"
    assert answer(ROOT, f"torch.__version__ = '{major}.{minor}.99+cpu'; ") == "None"
    said = answer(ROOT, f"torch.__version__ = '{major}.{minor}9.0'; ")
    assert f"built against torch {major}.{minor}, and this is torch {major}.{minor}9.0; reinstall" in said
