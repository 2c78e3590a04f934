"""Rows per second from file to file with a model that costs next to nothing: what the engine and the files take.

A GPU scores short rows at the rate at which one core can prepare them. `python -m bench.host` prints and records the
rate per core, and where the time goes.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import click
import numpy as np
import torch

from bench.memory import WORDS
from bench.records import RESULTS, append_record
from bench.tiny_model import tiny_model
from diffscore_fast.cli.main import main as command

SOURCE_WORDS, CANDIDATE_WORDS = 8, 4


@click.command()
@click.option("--rows", default=100_000, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--note", default="", help="Recorded with the result.")
def main(rows: int, rounds: int, note: str) -> None:
    """Rows per second and core of `diffscore score`, for short rows of JSON Lines."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = tiny_model(folder / "model", WORDS)
        write_rows(folder / "warm.jsonl", 2000)
        write_rows(folder / "rows.jsonl", rows)
        timed_run(folder / "warm.jsonl", model)
        rates = [rows / timed_run(folder / "rows.jsonl", model) for _ in range(rounds)]
        trace = folder / "trace.json"
        timed_run(folder / "rows.jsonl", model, "--profile-run", str(trace))  # itself takes time: a run of its own
        profile = json.loads(trace.read_text(encoding="utf-8"))["otherData"]["seconds"]
    print(f"{statistics.median(rates):,.0f} rows per second of one core; {min(rates):,.0f} to {max(rates):,.0f}")
    for stage, taken in sorted(profile.items(), key=lambda item: -item[1]):
        print(f"  {stage:<12} {1e6 * taken / rows:6.1f} us per row")
    append_record(
        RESULTS / "host.jsonl",
        rows=rows,
        rounds=rounds,
        rows_per_second=round(statistics.median(rates)),
        slowest=round(min(rates)),
        fastest=round(max(rates)),
        microseconds_per_row={stage: round(1e6 * taken / rows, 2) for stage, taken in profile.items()},
        note=note,
    )


def write_rows(path: Path, count: int) -> None:
    """Short rows, each with a source and a candidate of its own."""
    generator = np.random.default_rng(0)
    words = np.array(WORDS)[generator.integers(len(WORDS), size=(count, SOURCE_WORDS + CANDIDATE_WORDS))].tolist()
    with path.open("w", encoding="utf-8") as file:
        for row, own in enumerate(words):
            source, candidate = " ".join([*own[:SOURCE_WORDS], str(row)]), " ".join(own[SOURCE_WORDS:])
            file.write(json.dumps({"id": row, "source": source, "candidate": candidate}) + "\n")


def timed_run(source: Path, model: Path, *options: str) -> float:
    """Seconds of this process's one core for `diffscore score`, model loaded and file written."""
    output = source.with_suffix(".out.jsonl")
    arguments = ["score", str(source), "-o", str(output), "--model", str(model), "--quiet", "--draws", "1"]
    started = time.process_time()
    with suppress(SystemExit):
        command.main([*arguments, "--mask-ratios", "uniform", *options], standalone_mode=False)
    seconds = time.process_time() - started
    output.unlink()
    return seconds


if __name__ == "__main__":
    main()
