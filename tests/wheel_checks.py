"""The files that `make dist` has put into dist/, and the wheel as a user has it: installed, and without a compiler.

Run by `make dist` alone; `pytest` does not collect this file by itself.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.tags import sys_tags
from packaging.utils import parse_wheel_filename

from diffscore_fast import __version__
from tests.test_packaging import ROOT, package_files

DIST = ROOT / "dist"
EXAMPLES = ROOT / "examples" / "summaries.jsonl"
# Written by compilers and interpreters into the tree, and no part of the package.
MADE = re.compile(r"__pycache__|\.so$")


def only(pattern: str) -> Path:
    found = list(DIST.glob(pattern))
    assert len(found) == 1, f"dist/ should hold one {pattern}: {found}"
    return found[0]


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> Path:
    """A virtual environment that holds the wheel, and sees the dependencies that this one has installed.

    A line in a .pth file adds a folder of packages without reading the .pth files in it. The editable install of the
    checkout, which is such a file, stays out of sight.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    # Neither the checkout nor its editable install may be in sight, or pip would find the package installed already.
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*command, only("*.whl")], cwd=folder, env=variables, check=True)
    query = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = subprocess.run([python, "-c", query], check=True, capture_output=True, text=True).stdout.strip()
    here = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    Path(packages, "dependencies.pth").write_text("\n".join(here) + "\n", encoding="utf-8")
    return folder


def installed(environment: Path, *command: str) -> str:
    """Standard output of a command in the environment, where no compiler can be found.

    All other variables are as for `checkout`: numpy's BLAS takes another kernel, and another last bit, by some of them.
    """
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    variables = {**kept, "PATH": str(environment / "bin"), "HOME": str(environment), "CC": "false", "CXX": "false"}
    assert not any(shutil.which(name, path=variables["PATH"]) for name in ("cc", "c++", "gcc", "g++", "clang", "ninja"))
    return _output([environment / "bin" / command[0], *command[1:]], environment, {**variables, "OMP_NUM_THREADS": "1"})


def checkout(*arguments: str) -> str:
    """Standard output of `diffscore` as the checkout has it."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return _output([sys.executable, "-m", "diffscore_fast.cli.main", *arguments], ROOT, variables)


def _output(command: list, folder: Path, variables: dict[str, str]) -> str:
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_source_archive_holds_no_links():
    with tarfile.open(only("*.tar.gz")) as archive:
        assert all(item.isreg() or item.isdir() for item in archive.getmembers())


def test_the_wheel_holds_the_package_and_the_extension():
    """It was built from the source archive, so the archive holds all that a build needs."""
    with zipfile.ZipFile(only("*.whl")) as wheel:
        names = {name for name in wheel.namelist() if not name.startswith(f"diffscore_fast-{__version__}.dist-info/")}
        expected = {f"diffscore_fast/{path}" for path in package_files(ROOT) if not MADE.search(str(path))}
        extensions = {name for name in names if re.fullmatch(r"diffscore_fast/_C\.[^/]+\.so", name)}
        assert names == expected | extensions and len(extensions) == 1
        for name in expected:
            assert wheel.read(name) == (ROOT / name).read_bytes(), name


def test_the_wheel_is_for_this_python_and_processor():
    _, version, _, tags = parse_wheel_filename(only("*.whl").name)
    assert str(version) == __version__
    assert tags & set(sys_tags()) and not any(tag.platform == "any" for tag in tags)


def test_it_runs_its_own_kernels(environment):
    """Of the C++ operations, `info` names the implementation that runs."""
    where = installed(environment, "python", "-c", "import torch, diffscore_fast._C as c; print(c.__file__)")
    assert Path(where.strip()).is_relative_to(environment)
    shown = installed(environment, "diffscore", "info")
    for operation in ("masked_logprob", "prefix_attention", "linear", "log_mean_exp", "evidence_bounds"):
        assert re.search(rf"{operation} on cpu\W+cpu\b", shown), shown


@pytest.mark.parametrize(
    "arguments",
    [("score", "--draws", "4", "--tokens", "--profile"), ("bound", "--orders", "4", "--surrogate-orders", "4")],
    ids=["score", "bound"],
)
def test_its_numbers_are_those_of_the_checkout_bit_for_bit(environment, tmp_path, arguments):
    command, *options = arguments
    examples = [json.loads(line) for line in EXAMPLES.read_text(encoding="utf-8").splitlines()[:3]]
    rows = [{"source": row["source"], "candidate": row["candidate"], "text": row["candidate"][:90]} for row in examples]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    said = {
        "wheel": installed(environment, "diffscore", command, str(path), "-o", str(tmp_path / "wheel.jsonl"), *options),
        "checkout": checkout(command, str(path), "-o", str(tmp_path / "checkout.jsonl"), *options),
    }
    assert (tmp_path / "wheel.jsonl").read_bytes() == (tmp_path / "checkout.jsonl").read_bytes()
    own, other = (re.findall(r"signature .*", text) for text in said.values())
    assert own == other and len(own) == 1 and re.search(r"\|implementation:cpu(\||$)", own[0])
