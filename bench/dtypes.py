"""Speed and error of the dtypes on a CPU, on real rows: `python -m bench.dtypes --data FOLDER`.

In every round each dtype scores the same rows once, so that a slow minute hits all. Errors are differences from the
scores in float32, in nats per token.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import click
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from scipy.stats import spearmanr

from bench.judgement_sets import read_rows
from bench.records import RESULTS, append_record, embedded_weights
from bench.timing import interleaved
from diffscore_fast import DiffScorer
from diffscore_fast.ops import int8_unavailable

# Rows of each set: whole groups of one source first for summaries, spread over the file for the others.
SIZES = {"SummEval": 32, "SFRES": 120, "WMT lt-en": 100}
CLOSE = 0.02  # nats per token


@click.command()
@click.option("--data", type=click.Path(path_type=Path, exists=True), required=True, help="Folder of judgement sets.")
@click.option("--sets", type=click.Choice(tuple(SIZES)), multiple=True, help="Judgement sets to read; default all.")
@click.option("--rows", type=int, help="Rows of each set, in place of the defaults.")
@click.option("--rounds", default=3, show_default=True, help="Rounds; in each, every dtype scores all rows once.")
def main(data: Path, sets: tuple[str, ...], rows: int | None, rounds: int) -> None:
    """Time the dtypes, compare their scores with float32's; results are appended to bench/results/dtypes.jsonl."""
    names = ["float32", "bfloat16"]
    if (reason := int8_unavailable(torch.device("cpu"))) is None:
        names.append("int8")
    else:
        click.echo(f"int8 is left out: {reason}")
    scorers = {name: DiffScorer("mini", dtype=getattr(torch, name)) for name in names}
    weights = embedded_weights()
    for name in sets or tuple(SIZES):
        sources, candidates = load(data, name, rows or SIZES[name])
        scores: dict[str, np.ndarray] = {}

        def turn(dtype: str) -> None:
            scorers[dtype].clear_cache()  # every turn computes its own prefixes
            scores[dtype] = scorers[dtype].score(sources, candidates).scores  # noqa: B023

        seconds = interleaved({dtype: lambda dtype=dtype: turn(dtype) for dtype in names}, rounds)  # type: ignore[misc]
        table = Table(title=f"{name}, {len(sources)} rows, {torch.get_num_threads()} threads")
        for column in ("dtype", "rows/s", "times bfloat16", "mean shift", "rms", f"within {CLOSE}", "rank correlation"):
            table.add_column(column, justify="left" if column == "dtype" else "right")
        for dtype in names:
            moved = scores[dtype] - scores["float32"]
            found = {
                "rows_per_second": len(sources) / statistics.median(seconds[dtype]),
                "of_bfloat16": statistics.median(
                    a / b for a, b in zip(seconds["bfloat16"], seconds[dtype], strict=True)
                ),
                "mean_shift": float(moved.mean()),
                "rms": float(np.sqrt((moved**2).mean())),
                "close": float((np.abs(moved) <= CLOSE).mean()),
                "rank_correlation": float(spearmanr(scores[dtype], scores["float32"])[0]),
            }
            table.add_row(dtype, *(f"{value:.4g}" for value in found.values()))
            append_record(RESULTS / "dtypes.jsonl", set=name, rows=len(sources), dtype=dtype, weights=weights, **found)
        Console(width=120).print(table)


def load(data: Path, name: str, count: int) -> tuple[list[str], list[str]]:
    """Sources and candidates; WMT's pairs give the reference and the better translation."""
    every = read_rows(data, name)
    if name != "SummEval":
        every = [every[i] for i in np.linspace(0, len(every) - 1, min(count, len(every))).astype(int)]
    source, candidate = ("reference", "better") if name.startswith("WMT") else ("source", "candidate")
    return [row[source] for row in every[:count]], [row[candidate] for row in every[:count]]


if __name__ == "__main__":
    main()
