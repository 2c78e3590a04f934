"""What a wheel and a source archive hold: an editable install reads the tree itself and would hide a missing file.

`make dist` builds both for real; tests/wheel_checks.py then checks the installed wheel.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUILD_FILES = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff")
FOLDERS = ("csrc", "kernels", "diffscore_fast")


def files_below(folder: Path) -> set[Path]:
    return {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}


def package_files(tree: Path) -> set[Path]:
    """Files of the package by their path in it. rglob passes over diffscore_fast/kernels, a link to kernels/."""
    return files_below(tree / "diffscore_fast") | {Path("kernels") / path for path in files_below(tree / "kernels")}


@pytest.fixture
def tree(tmp_path) -> Path:
    """A copy of what a build reads, without the *.egg-info that lists the files of an older build."""
    for name in FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(ROOT / name, tmp_path / "tree" / name, symlinks=True, ignore=ignored)
    for name in BUILD_FILES:
        shutil.copy(ROOT / name, tmp_path / "tree")
    return tmp_path / "tree"


def run_setup(tree: Path, *arguments: str) -> None:
    subprocess.run([sys.executable, "setup.py", "--quiet", *arguments], cwd=tree, check=True, capture_output=True)


def test_a_wheel_holds_every_file_of_the_package(tree, tmp_path):
    built = tmp_path / "built"
    run_setup(tree, "build_py", "--build-lib", str(built))
    assert package_files(tree) - files_below(built / "diffscore_fast") == set(), "left out"
    assert files_below(built / "diffscore_fast") - package_files(tree) == set(), "more than there is"
    assert {path.name for path in built.iterdir()} == {"diffscore_fast"}


def test_a_source_archive_holds_what_a_build_reads_as_regular_files(tree, tmp_path):
    run_setup(tree, "sdist", "--formats", "tar", "--dist-dir", str(tmp_path))
    (path,) = tmp_path.glob("*.tar")
    with tarfile.open(path) as archive:
        members = {Path(*Path(item.name).parts[1:]): item for item in archive.getmembers() if not item.isdir()}
        assert all(item.isreg() for item in members.values()), "a link would need what it points at"
        expected = {Path("diffscore_fast") / path for path in package_files(tree)}
        expected |= {Path("csrc") / path for path in files_below(tree / "csrc")} | set(map(Path, BUILD_FILES))
        made = {Path("PKG-INFO"), Path("setup.cfg")}
        found = {path for path in members if not path.parts[0].endswith(".egg-info")} - made
        assert expected - found == set(), "left out"
        assert found - expected == set(), "more than a build reads"
        for path in found:
            content = archive.extractfile(members[path])
            assert content is not None and content.read() == (tree / path).read_bytes(), path
