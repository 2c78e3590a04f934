"""What a wheel holds of the package: an editable install reads the tree itself and would hide a file left out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def files_below(folder: Path) -> set[Path]:
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {path for path in found if "__pycache__" not in path.parts and path.suffix != ".so"}


def test_a_wheel_holds_every_file_of_the_package(tmp_path):
    command = [sys.executable, "setup.py", "--quiet", "build_py", "--build-lib", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    package, kernels = ROOT / "diffscore_fast", ROOT / "kernels"
    built = files_below(tmp_path / "diffscore_fast")
    expected = files_below(package) | {Path("kernels") / path for path in files_below(kernels)}
    assert expected - built == set(), "left out"
    assert built - expected == set(), "more than there is"
    assert (tmp_path / "diffscore_fast" / "backbones" / "mini" / "model.safetensors").stat().st_size > 1e7
