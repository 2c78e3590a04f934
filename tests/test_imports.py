"""Which part of the package may import which; see ARCHITECTURE.md."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "diffscore_fast"
# A part may import those of later lines, and itself; scoring and bounds do not import each other.
LAYERS = (
    {"cli", "compat", "integrations", "training"},
    {"distributed", "serving"},
    {"scoring", "bounds"},
    {"engine"},
    {"backbones", "io"},
    {"ops", "text"},
    {"kernels"},
    {"arguments", "errors", "options", "process", "signature", "status", "version"},
)
# `cli` stands on the others of its line as well; `text` runs no kernel.
ALSO = {("cli", "compat"), ("cli", "training")}
NOT = {("text", "kernels"), ("io", "ops"), ("io", "kernels"), ("engine", "io")}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


FILES = {
    module_name(path): path
    for folder in (PACKAGE, PACKAGE / "kernels")  # a link, which rglob passes over
    for path in folder.rglob("*.py")
    if path != PACKAGE / "__init__.py"  # the public names, found at their first use
}


def imported(path: Path) -> set[str]:
    """Modules of the package that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module and node.level == 0, f"{path}: a relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner.removeprefix("diffscore_fast.") in FILES else node.module)
    own = {name.removeprefix("diffscore_fast.") for name in found if name.startswith("diffscore_fast.")}
    assert own - {"_C"} <= FILES.keys(), f"{path}: {own - FILES.keys()}"
    return own - {module_name(path), "_C"}


def part_of(module: str) -> str:
    return module.split(".")[0]


def test_imports_point_one_way():
    level = {part: index for index, parts in enumerate(LAYERS) for part in parts}
    wrong = []
    for module, path in FILES.items():
        for other in imported(path):
            pair = part_of(module), part_of(other)
            allowed = pair[0] == pair[1] or level[pair[0]] < level[pair[1]] or pair in ALSO
            if level[pair[0]] == level[pair[1]] == len(LAYERS) - 1:  # the bottom: `test_no_circle` sees to it
                allowed = True
            if not allowed or pair in NOT:
                wrong.append(f"{module} imports {other}")
    assert not wrong


def test_every_part_has_a_layer():
    assert {part_of(module) for module in FILES} == set().union(*LAYERS)


def test_no_circle():
    TopologicalSorter({module: imported(path) for module, path in FILES.items()}).prepare()
