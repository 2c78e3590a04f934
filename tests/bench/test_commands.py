"""The pages and the `--help` of the benchmarks say the same."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMANDS = sorted(path.stem for path in (ROOT / "bench").glob("*.py") if "__main__" in path.read_text("utf-8"))
PAGES = [ROOT / "README.md", ROOT / "bench" / "README.md", *(ROOT / "docs").glob("*.md")]
TEXTS = [page.read_text("utf-8") for page in PAGES]
CALLS = [(name, line) for text in TEXTS for name, line in re.findall(r"python -m bench\.(\w+)([^\n`#]*)", text)]


def help_of(name: str, monkeypatch, capsys) -> str:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as stopped:
        import_module(f"bench.{name}").main()
    assert stopped.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", COMMANDS)
def test_options_that_the_pages_use_are_in_the_help(name, monkeypatch, capsys):
    used = {option for called, line in CALLS if called == name for option in re.findall(r"--[\w-]+", line)}
    assert used <= set(re.findall(r"--[\w-]+", help_of(name, monkeypatch, capsys)))


def test_the_pages_name_every_command_and_no_other():
    assert {name for name, _ in CALLS} == set(COMMANDS)
    assert {"--data", "--rows"} <= set(re.findall(r"--[\w-]+", str(CALLS)))  # the expression finds options
