"""Every command and snippet of README.md and docs/ runs as it stands there, and prints what stands below it."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.warm_commands import warm_commands

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# A block of commands or code, and the output below it where there is one. Blocks that need a network, a GPU or another
# model are marked `console`, and their pages say so.
BLOCK = re.compile(r"```(sh|python)\n(.*?)```(?:\n+```text\n(.*?)```)?", re.DOTALL)
RUNNABLE = {page.stem: found for page in PAGES if (found := BLOCK.findall(page.read_text("utf-8")))}
NUMBER = re.compile(r"[-+]?\d+(?:,\d{3})*(?:\.\d*)?(?:e[-+]?\d+)?")
VERSION = re.compile(r"version:[\w.]+")
TOLERANCE = 2e-3  # scores agree across processors to 1e-5; pages show three digits


@pytest.fixture(scope="module")
def commands():
    with warm_commands() as folder:
        yield folder


@pytest.mark.parametrize("page", RUNNABLE)
def test_blocks_of_the_page_run_in_order(page, commands, tmp_path):
    """In one folder a page, in which the first block of getting-started.md has made the rows of the examples."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    run(*RUNNABLE["getting-started"][0][:2], tmp_path, commands)
    for kind, text, shown in RUNNABLE[page]:
        if text.startswith(("make ", "pip ")):
            continue
        output = run(kind, text, tmp_path, commands)
        assert not shown or shows(shown, output), f"{text}\nprinted\n{output}"


def run(kind: str, text: str, folder: Path, commands: Path) -> str:
    command = ["bash", "-euo", "pipefail", "-c", text] if kind == "sh" else ["python", "-c", text]
    settings = {"PATH": f"{commands}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "80"}
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **settings}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, f"{text}\nprinted\n{done.stdout}"
    return done.stdout


def shows(shown: str, output: str) -> bool:
    """Whether the output has the lines shown, in order: words alike, numbers to a tolerance; `...` is anything."""
    lines = iter(output.splitlines())
    return all(any(alike(line, other) for other in lines) for line in shown.splitlines() if line.strip(" .|"))


def alike(shown: str, line: str) -> bool:
    shown, line = VERSION.sub("version", shown), VERSION.sub("version", line)
    start, dots, _ = shown.partition("...")
    if dots:
        shown, line = start, line[: len(start)]
    numbers, others = NUMBER.findall(shown), NUMBER.findall(line)
    if NUMBER.sub("#", shown).split() != NUMBER.sub("#", line).split() or len(numbers) != len(others):
        return False
    values = [[float(item.replace(",", "")) for item in items] for items in (numbers, others)]
    return all(abs(a - b) <= TOLERANCE * max(1.0, abs(b) / 10) for a, b in zip(*values, strict=True))


def test_output_is_compared_by_words_and_numbers():
    assert shows("score -1.804 0.008\n...\nrows 4", "x\nscore  -1.8041 0.0078\nmore\nrows 4\n")
    assert not shows("score -1.804", "score -1.704")
    assert not shows("score -1.804", "mean -1.804")
    assert not shows("b 2\na 1", "a 1\nb 2")


def test_make_targets_that_the_pages_name_exist():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {name for page in PAGES for name in re.findall(r"\bmake ([a-z]+(?:-[a-z]+)*)`?$", page.read_text(), re.M)}
    blocks = "\n".join(text for found in RUNNABLE.values() for _, text, _ in found)
    named |= set(re.findall(r"^make ([\w-]+)", blocks, re.MULTILINE))
    assert named and named <= targets


def test_install_commands_bring_a_setuptools_that_can_build():
    """A new environment of Python 3.11 has an older one, which pip would leave there."""
    needed = re.search(r"\"(setuptools>=\d+)\"", (ROOT / "pyproject.toml").read_text("utf-8"))
    lines = [
        line
        for page in PAGES
        for line in page.read_text("utf-8").splitlines()
        if re.search(r"pip install torch\b", line)
    ]
    assert needed and lines and all(f"'{needed[1]}'" in line for line in lines)


def test_statuses_of_the_page_are_those_there_are():
    from diffscore_fast import status

    text = (ROOT / "docs" / "formats-and-statuses.md").read_text("utf-8").split("## Statuses")[1].split("\n## ")[0]
    named = set(re.findall(r"`([a-z_]+)`", "".join(row.split("|")[1] for row in re.findall(r"^\|.*\|$", text, re.M))))
    assert named == {value for name, value in vars(status).items() if name.isupper() and isinstance(value, str)}


def test_options_that_the_pages_name_exist():
    from diffscore_fast.cli.main import main
    from diffscore_fast.training.__main__ import main as training

    known = {
        name
        for group in (main, training)
        for command in group.commands.values()
        for option in command.params
        for name in (*option.opts, *option.secondary_opts)
    }
    named = {item for page in PAGES for item in re.findall(r"(?<![\w-])--[a-z][\w-]*", page.read_text("utf-8"))}
    assert named - known == OTHER_OPTIONS


# Of pip, benches, and all; of curl, docker and lm_eval.
OTHER_OPTIONS = {"--no-build-isolation", "--bart-large", "--against", "--data", "--help"}
OTHER_OPTIONS |= {"--build-arg", "--tasks", "--model_args"}


def test_pages_link_to_files_and_headings_that_exist():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
            if target.startswith(("http:", "https:")):
                continue
            name, _, heading = target.partition("#")
            path = page if not name else (page.parent / name)
            assert path.exists(), f"{page.name}: {target}"
            if heading and path.suffix == ".md":
                assert heading in headings(path), f"{page.name}: {target}"


def headings(path: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub and mkdocs make them."""
    titles = re.findall(r"^#+ (.+)$", path.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


def test_the_readme_fits_a_screen_or_two():
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 150


def test_objects_of_the_api_pages_exist():
    for page in (ROOT / "docs" / "api").glob("*.md"):
        for name in re.findall(r"^::: ([\w.]+)$", page.read_text("utf-8"), re.MULTILINE):
            module, _, attribute = name.rpartition(".")
            try:
                assert hasattr(importlib.import_module(module), attribute), name
            except ModuleNotFoundError:
                importlib.import_module(name)


def test_figures_of_the_readme_are_the_recorded_ones():
    import json

    records = [json.loads(line) for line in (ROOT / "bench/results/throughput.jsonl").read_text().splitlines()]
    table = (ROOT / "README.md").read_text("utf-8").split("## How fast")[1].split("\n## ")[0]
    sets = ("SummEval", "REALSumm", "SFRES", "WMT lt-en")
    for label, name in RECORDED.items():
        row = next(line for line in table.splitlines() if line.startswith(f"| {label}"))
        for shown, data in zip(row.split("|")[2:6], sets, strict=True):
            measured = [
                item["rows_per_second"]
                for item in records
                if item["section"] == "baselines" and item["data"] == data and name in item.values()
            ]
            assert any(f"{value:.{len(shown.strip().partition('.')[2])}f}" == shown.strip() for value in measured)


RECORDED = {
    "diffscore_fast, default": "prefix, default masks",
    "the published procedure": "naive",
    "BARTScore, same size": "bartscore, as published",
    "BARTScore, BART-large": "bartscore large, as published",
}


def test_pictures_show_the_recorded_results(tmp_path):
    import runpy

    pictures = runpy.run_path(str(ROOT / "docs" / "make_pictures.py"))
    pictures["draw_intervals"](tmp_path / "intervals.svg")
    drawn = ROOT / "docs" / "images"
    assert (tmp_path / "intervals.svg").read_text() == (drawn / "intervals.svg").read_text()
    shown = re.findall(r"│ (-\d\.\d{3}) │ ", (ROOT / "README.md").read_text("utf-8"))
    assert len(shown) == 3 and all(f"{score}" in (drawn / "heatmap.svg").read_text("utf-8") for score in shown)


# Modules that need packages of other projects; tests/integrations has them.
HARNESSES = tuple(
    f"diffscore_fast.integrations.{name}"
    for name in ("deepeval", "diffscore_metric", "inspect_ai", "lm_eval", "torchmetrics")
)


def test_docstring_examples_run():
    import doctest
    import pkgutil

    import diffscore_fast

    modules = [
        item.name
        for item in pkgutil.walk_packages(diffscore_fast.__path__, "diffscore_fast.")
        if not item.name.startswith(("diffscore_fast.kernels", "diffscore_fast._C"))
        and not item.name.endswith("__main__")
        and not item.name.startswith(HARNESSES)
    ]
    outcomes = {name: doctest.testmod(importlib.import_module(name)) for name in modules}
    assert {name for name, outcome in outcomes.items() if outcome.failed} == set()
    assert sum(outcome.attempted for outcome in outcomes.values()) >= 10
