"""Did a change move a number? Scores and bounds of a fixed sample, compared bit for bit between two commits.

`python -m bench.same_numbers --against COMMIT` checks out COMMIT in a folder of its own, builds its extension, and runs
the sample there and here, one thread each. `--write` writes the numbers of a smaller sample to tests/data/numbers.json;
`tests/test_numbers.py` compares them with a tolerance, so that it passes on every processor.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).parent.parent
EXPECTED = ROOT / "tests" / "data" / "numbers.json"


@dataclass(frozen=True)
class Size:
    """How much is computed: rows, characters of their sources and candidates, texts to bound and their characters."""

    rows: int
    source: int
    candidate: int | None
    bounded: int
    text: int


WHOLE = Size(rows=4, source=600, candidate=None, bounded=3, text=90)
SMALL = Size(rows=2, source=160, candidate=80, bounded=2, text=40)
# Options of `DiffScorer.score`, by name.
SCORES: dict[str, dict[str, Any]] = {
    "default": {},
    "published grid": {"coupling": "independent", "draws": 20},
    "stratified": {"mask_ratios": "stratified", "replicates": 2},
    "uniform, count": {"mask_ratios": "uniform", "masking": "count"},
    "elbo": {"estimator": "elbo", "mask_ratios": "stratified"},
    "weighted": {"estimator": "weighted", "level_weights": [1, 1, 1, 1, 1, 2, 2, 2, 2]},
    "marginal": {"direction": "marginal"},
    "reverse": {"direction": "reverse", "template": "summarisation"},
    "bidirectional": {"direction": "bidirectional", "alpha": 0.3},
    "pmi": {"direction": "pmi"},
    "full": {"attention": "full", "draws": 4},
    "corrected": {"attention": "corrected", "full_draws": 4},
    "target error": {"target_stderr": 0.3, "max_draws": 16},
    "seed": {"seed": 7, "draws": 5},
}
# Method and options of `LikelihoodBounds`, by name.
BOUNDS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "cross-fitted": ("estimate", 8, {"orders": 16, "surrogate_orders": 16}),
    "plain": ("estimate", 8, {"orders": 16, "surrogate_orders": 8, "cross_fitted": False, "comparators": True}),
    "autoregressive": ("estimate", 4, {"surrogate": "autoregressive", "orders": 8}),
    "antithetic, parallel": ("estimate", 4, {"generation": "parallel", "steps": 4, "design": "antithetic"}),
    "exact": ("exact", 4, {"autoregressive": True}),
    "exact, parallel": ("exact", 4, {"generation": "parallel", "steps": 3}),
}


def sample(size: Size = WHOLE) -> dict[str, list[float]]:
    """Scores, standard errors and token scores of example rows, and bounds of their candidates."""
    import torch

    from diffscore_fast import DiffScorer, LikelihoodBounds

    lines = (ROOT / "examples" / "summaries.jsonl").read_text(encoding="utf-8").splitlines()[: size.rows]
    rows = [json.loads(line) for line in lines]
    sources, candidates = (
        [row[side][:stop] for row in rows] for side, stop in (("source", size.source), ("candidate", size.candidate))
    )
    out: dict[str, list[float]] = {}
    scorer = DiffScorer("mini")
    for name, options in SCORES.items():
        table = scorer.score(sources, candidates, token_scores=True, **options)
        assert table.tokens is not None
        out[name] = [*table.scores, *table.stderr, *table.profile.ravel(), *table.tokens.log_probs]
    lists = [[source, candidate] for source, candidate in zip(sources, candidates, strict=True)]
    for how in ("max", "mean"):
        table = scorer.score(None, candidates, references=lists, aggregate=how, draws=4)
        out[f"references, {how}"] = [*table.scores, *table.stderr]
    out["bfloat16"] = list(DiffScorer("mini", dtype=torch.bfloat16).score(sources[:2], candidates[:2], draws=4).scores)
    for name, (method, block_size, options) in BOUNDS.items():
        bounds = LikelihoodBounds("mini", block_size=block_size)
        found = getattr(bounds, method)([text[: size.text] for text in candidates[: size.bounded]], **options)
        columns = [found.lower, found.upper, found.stderr_lower, found.stderr_upper, *found.comparators.values()]
        out[f"bounds, {name}"] = [value for column in columns for value in column]
    return {name: [float(value) for value in values] for name, values in out.items()}


def numbers_of(tree: Path) -> dict[str, list[str]]:
    """The sample, computed by the code of a tree; numbers in hexadecimal, which is exact."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-P", __file__, "--print"],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return {name: [value.hex() for value in values] for name, values in json.loads(done.stdout).items()}


def at_commit(commit: str, folder: Path) -> dict[str, list[str]]:
    """The sample, computed by the code of a commit."""
    tree = folder / "tree"
    subprocess.run(["git", "worktree", "add", "--detach", "--force", tree, commit], cwd=ROOT, check=True)
    try:
        build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
        subprocess.run(build, cwd=tree, check=True, stdout=sys.stderr)
        return numbers_of(tree)
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)


def check_commit(context: click.Context, parameter: click.Parameter, commit: str | None) -> str | None:
    """The commit, if the repository has it."""
    if commit is not None:
        ask = ["git", "rev-parse", "--quiet", "--verify", "--end-of-options", f"{commit}^{{commit}}"]
        if subprocess.run(ask, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode:
            raise click.BadParameter(f"{commit!r} is no commit of this repository.")
    return commit


def rounded(values: list[float]) -> list[float | None]:
    """Values with 9 decimals; NaN becomes None."""
    return [None if math.isnan(value) else round(value, 9) for value in values]


@click.command(help=__doc__)
@click.option("--against", metavar="COMMIT", callback=check_commit, help="Commit to compare the working tree with.")
@click.option("--write", is_flag=True, help=f"Write {EXPECTED.relative_to(ROOT)}, from a smaller sample.")
@click.option("--print", "to_stdout", is_flag=True, help="Print the sample's numbers as JSON.")
def main(against: str | None, write: bool, to_stdout: bool) -> None:
    if not (against or write or to_stdout):
        raise click.UsageError("Say what to do: --against COMMIT, --write or --print.")
    if to_stdout:
        print(json.dumps(sample()))
    if write:
        EXPECTED.parent.mkdir(exist_ok=True)
        lines = (f"{json.dumps(name)}: {json.dumps(rounded(values))}" for name, values in sample(SMALL).items())
        EXPECTED.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    if against:
        with tempfile.TemporaryDirectory() as folder:
            before, now = at_commit(against, Path(folder)), numbers_of(ROOT)
        moved = [name for name in before if before[name] != now.get(name)]
        count = sum(map(len, before.values()))
        print(f"{count} numbers of {len(before)} kinds; moved: {', '.join(moved) or 'none'}")
        sys.exit(bool(moved))


if __name__ == "__main__":
    main()
