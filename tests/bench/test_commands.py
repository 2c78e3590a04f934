"""The documentation and the `--help` of the benchmarks agree."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMANDS = sorted(path.stem for path in (ROOT / "bench").glob("*.py") if "__main__" in path.read_text("utf-8"))
PAGES = [ROOT / "README.md", ROOT / "bench" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
CALL = re.compile(r"python -m bench\.(\w+)([^\n`#]*)")
CALLS = [call for page in PAGES for call in CALL.findall(page.read_text("utf-8"))]
OPTION = re.compile(r"--[\w-]+")


def help_of(name: str, monkeypatch, capsys) -> str:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as stopped:
        import_module(f"bench.{name}").main()
    assert stopped.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", COMMANDS)
def test_options_in_the_documentation_are_in_the_help(name, monkeypatch, capsys):
    used = {option for called, line in CALLS if called == name for option in OPTION.findall(line)}
    assert used <= set(OPTION.findall(help_of(name, monkeypatch, capsys)))


@pytest.mark.parametrize(("name", "line"), CALLS)
def test_a_call_in_the_documentation_names_the_options_that_the_command_needs(name, line):
    parameters = import_module(f"bench.{name}").main.params
    needed = {option.opts[0] for option in parameters if option.required}
    assert needed <= set(OPTION.findall(line))


def test_the_documentation_names_no_other_command():
    assert {name for name, _ in CALLS} <= set(COMMANDS)
    assert {"--data", "--rows"} <= set(OPTION.findall(str(CALLS)))  # the expression finds options


def test_the_readme_of_the_benches_names_every_command():
    assert {name for name, _ in CALL.findall((ROOT / "bench" / "README.md").read_text("utf-8"))} == set(COMMANDS)
