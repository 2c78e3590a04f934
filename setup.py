"""Installation: the Python packages, and the C++ extension where it can be built."""

from __future__ import annotations

import runpy
from pathlib import Path

from setuptools import find_packages, setup

COMPILE_FLAGS = [
    "-O3",
    "-g0",
    "-fno-math-errno",  # but not -ffast-math: infinities, NaN and the order of sums are part of the meaning
    "-fopenmp",  # compiled in, not linked: the symbols come from the OpenMP library that torch has loaded
    "-Wall",
    "-Wno-psabi",
    "-Wno-unknown-pragmas",
]


def write_fingerprint() -> str:
    """Write a source file with the hash of csrc/, if it is not there yet; returns its path."""
    path = Path("build") / "fingerprint.cpp"
    value = runpy.run_path("csrc/fingerprint.py")["fingerprint"]()
    text = f'extern const char* const diffscore_sources = "{value}";\n'
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return str(path)


def extension_arguments() -> dict:
    """`ext_modules` and `cmdclass` for setup(), empty where torch cannot be imported at build time."""
    try:
        from torch.utils.cpp_extension import BuildExtension, CppExtension
    except ImportError:
        print("diffscore_fast: torch is not importable; building without the C++ kernels")
        return {}

    class OptionalBuild(BuildExtension):
        """Without a working compiler the package still installs, and runs its reference implementations."""

        def build_extensions(self) -> None:
            try:
                super().build_extensions()
            except Exception as error:  # every compiler and ninja has its own type of failure
                print(f"diffscore_fast: building without the C++ kernels: {error}")
                self.extensions = []

    sources = sorted(str(path) for path in Path("csrc").glob("*.cpp")) + [write_fingerprint()]
    headers = sorted(str(path) for pattern in ("*.h", "*.inc") for path in Path("csrc").glob(pattern))
    extension = CppExtension("diffscore_fast._C", sources, depends=headers, extra_compile_args=COMPILE_FLAGS)
    return {"ext_modules": [extension], "cmdclass": {"build_ext": OptionalBuild}}


# Folders of data count as packages to setuptools, though find_packages sees none in them.
DATA = ["diffscore_fast.backbones.mini", "diffscore_fast.backbones.small_adapter"]
PACKAGES = [*find_packages(include=["diffscore_fast", "diffscore_fast.*"]), *DATA]

setup(packages=PACKAGES, **extension_arguments())
