"""What holds for every operation: its documentation, and the names that profilers show."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest
import torch

from diffscore_fast import ops
from tests.ops.test_devices import CALLS, REFERENCE_ONLY
from tests.support.products import needs_extension

KERNELS = Path(__file__).parents[2] / "kernels"


def test_the_table_of_operations_is_complete():
    rows = re.findall(r"^(\w+) {2,}\S.* {2,}(\w+\.py) {2,}(.+)$", str(ops.__doc__), re.MULTILINE)
    found = {name: (file, tuple(implementations.split(", "))) for name, file, implementations in rows}
    assert found == {
        operation.name: (
            Path(inspect.getfile(getattr(ops, operation.name))).name,
            tuple(operation.implementations),
        )
        for operation in ops.OPERATIONS
    }


@pytest.mark.parametrize("operation", ops.OPERATIONS, ids=lambda item: item.name)
def test_the_docstring_states_a_formula_and_the_reference_comes_last(operation):
    meaning = inspect.getdoc(getattr(ops, operation.name)).split("Parameters\n---")[0]
    assert re.search(r"^[\w\[\]: ]*\S+ = .*[(\[{].*$", meaning, re.MULTILINE)
    assert list(operation.implementations)[-1] == "reference"


@needs_extension
@pytest.mark.parametrize("operation", [item.name for item in ops.OPERATIONS])
def test_a_profile_names_the_operation_and_its_implementation(operation):
    tensors, call = CALLS[operation]
    for name in ("auto", "reference"):
        with torch.profiler.profile() as profile:
            call(list(tensors), name)
        shown = {event.name for event in profile.events()}
        taken = "cpu" if name == "auto" and operation not in REFERENCE_ONLY else "reference"
        assert f"diffscore_fast::{operation}.{taken}" in shown
        assert taken == "reference" or f"diffscore_fast::{operation}" in shown  # the C++ operation itself


def test_triton_kernels_carry_the_name_of_an_operation():
    """A GPU's profile shows the names of kernels only."""
    launched = [
        node.name
        for path in KERNELS.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")
    ]
    names = tuple(operation.name for operation in ops.OPERATIONS)
    assert len(launched) >= 7 and all(name.startswith(names) for name in launched)
