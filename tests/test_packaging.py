"""What a wheel holds of the package: an editable install reads the tree itself and would hide a file left out."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "csrc", "kernels", "diffscore_fast")


def files_below(folder: Path) -> set[Path]:
    return {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}


def test_a_wheel_holds_every_file_of_the_package(tmp_path):
    tree, built = tmp_path / "tree", tmp_path / "built"
    tree.mkdir()
    for name in SOURCES:  # without *.egg-info, whose list of files an older build left
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copy(ROOT / name, tree)
    command = [sys.executable, "setup.py", "--quiet", "build_py", "--build-lib", str(built)]
    subprocess.run(command, cwd=tree, check=True, capture_output=True)
    expected = files_below(tree / "diffscore_fast") | {Path("kernels") / path for path in files_below(tree / "kernels")}
    assert expected - files_below(built / "diffscore_fast") == set(), "left out"
    assert files_below(built / "diffscore_fast") - expected == set(), "more than there is"
