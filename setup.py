"""What pyproject.toml cannot say: `kernels/` is installed as `diffscore_fast.kernels`."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["diffscore_fast", "diffscore_fast.*"]), "diffscore_fast.kernels"],
    package_dir={"diffscore_fast.kernels": "kernels"},
)
