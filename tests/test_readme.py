"""Every command and snippet of the README runs as it stands there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```(sh|python)\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
RUNNABLE = [(kind, text) for kind, text in BLOCKS if not text.startswith("make ")]


@pytest.mark.parametrize(("kind", "text"), RUNNABLE, ids=[text.split("\n")[0][:50] for _, text in RUNNABLE])
def test_block_runs(kind, text, tmp_path):
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    command = ["bash", "-euo", "pipefail", "-c", text] if kind == "sh" else [sys.executable, "-c", text]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_make_targets_of_the_readme_exist():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = re.findall(r"^make (\w+)", "\n".join(text for _, text in BLOCKS), re.MULTILINE)
    assert named and set(named) <= targets


def test_statuses_of_the_readme_are_those_there_are():
    from diffscore_fast.bounds.likelihood import table as results

    table = (ROOT / "README.md").read_text().split("## Statuses")[1].split("\n## ")[0]
    named = set(re.findall(r"`([a-z_]+)`", "".join(row.split("|")[1] for row in re.findall(r"^\|.*\|$", table, re.M))))
    known = {value for name, value in vars(results).items() if name.isupper() and isinstance(value, str)}
    assert named == known


def test_docstring_examples_run():
    import doctest
    import importlib
    import pkgutil

    import diffscore_fast

    modules = [
        item.name
        for item in pkgutil.walk_packages(diffscore_fast.__path__, "diffscore_fast.")
        if not item.name.startswith(("diffscore_fast.kernels", "diffscore_fast._C"))
        and not item.name.endswith("__main__")
    ]
    outcomes = {name: doctest.testmod(importlib.import_module(name)) for name in modules}
    assert {name for name, outcome in outcomes.items() if outcome.failed} == set()
    assert sum(outcome.attempted for outcome in outcomes.values()) >= 10
