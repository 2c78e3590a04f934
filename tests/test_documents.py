"""What the documents, the workflows and the version say of the repository is so."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from diffscore_fast import __version__

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "diffscore_fast"
DOCUMENTS = ("ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md")
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
# `folder/file.py`, `file.py: name` or `file.py: Class.method`, as the documents spell places of the code.
PLACE = re.compile(r"`((?:[\w.]+/)*[\w.-]+\.(?:py|cpp|md|toml|txt|yml|cff|in)|(?:[\w.]+/)+)(?:: ([\w.]+))?`")


def file_named(name: str) -> Path:
    """Where a path of the documents leads: in the package, or else in the repository."""
    inside = PACKAGE / name
    return inside if inside.exists() else ROOT / name


@cache
def names_in(path: Path) -> frozenset[str]:
    """What a module defines: `name`, `Class` and `Class.member`, inherited members apart."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        for name in _names(node):
            found.add(name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{name}" for member in node.body for name in _names(member)}
    return frozenset(found)


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [item.id for item in targets if isinstance(item, ast.Name)]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_places_that_a_document_names_exist(document):
    places = PLACE.findall((ROOT / document).read_text(encoding="utf-8"))
    places = [(file, name) for file, name in places if "NAME" not in file]
    assert places
    wrong = [file for file, _ in places if not file_named(file).exists()]
    wrong += [
        f"{file}: {name}"
        for file, name in places
        if name and file not in wrong and name not in names_in(file_named(file))
    ]
    assert not wrong


@pytest.mark.parametrize("document", [*DOCUMENTS, ".ci/run", *(str(path.relative_to(ROOT)) for path in WORKFLOWS)])
def test_make_targets_that_are_named_exist(document):
    rules = "".join((ROOT / name).read_text(encoding="utf-8") for name in ("Makefile", "mini.mk"))
    targets = set(re.findall(r"^([\w-]+):(?!=)", rules, re.MULTILINE))
    text = (ROOT / document).read_text(encoding="utf-8")
    named = set(re.findall(r"(?:^|`|run: )make ([a-z-]+)", text, re.MULTILINE))
    assert named <= targets


def test_the_changelog_is_of_this_version():
    """Its first heading is `Unreleased`, below which all versions are older than this one, or this version."""
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    first, *older = headings
    if first != "Unreleased":
        assert re.fullmatch(rf"{re.escape(__version__)} \(\d{{4}}-\d\d-\d\d\)", first)
    assert all(_numbers(item.split()[0]) < _numbers(__version__) for item in older)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def test_the_citation_is_of_this_version_and_has_what_the_format_asks_for():
    citation = _yaml(ROOT / "CITATION.cff")
    assert citation["cff-version"] == "1.2.0" and citation["version"] == __version__
    assert {"title", "message", "authors"} <= citation.keys()
    assert {item["url"].rpartition("/")[2] for item in citation["references"]} == {"2605.11601", "2605.24292"}
    for item in citation["references"]:
        assert {"type", "title", "authors"} <= item.keys()
        assert all(author.keys() == {"given-names", "family-names"} for author in item["authors"])


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_has_jobs_of_steps(path):
    workflow = _yaml(path)
    assert True in workflow, "YAML 1.1 reads the key `on` as true"
    assert set(workflow) - {True} <= {"name", "permissions", "env", "concurrency", "jobs"}
    for job in workflow["jobs"].values():
        assert "runs-on" in job and all(("run" in step) != ("uses" in step) for step in job["steps"])


def _yaml(path: Path) -> Any:
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load(path.read_text(encoding="utf-8"))
