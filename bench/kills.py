"""Random kills of a run over shards: of its workers, and of the command itself, which is then resumed.

Whatever was killed, and when, every run must end with the bytes of one that was left alone.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import click

from bench.records import RESULTS, append_record

EXAMPLE = Path(__file__).parent.parent / "examples" / "summaries.jsonl"
PARENT_SHARE = 0.3  # of the kills
TARGET_STDERR = ["--target-stderr", "0.2", "--max-draws", "16", "--draws", "4"]


@dataclass
class Kills:
    """What happened.

    Parameters
    ----------
    by_victim : Counter
        Kills of "worker" and of "parent".
    runs : int
        Runs that were begun with an empty output folder and have ended.
    different : int
        Those of them whose bytes are not those of the run that was left alone.
    given_up : int
        Times that a run ended by itself, since some rows or the start had lost three workers or more; it is resumed.
    left_behind : int
        Processes that were there after the last of a run.
    """

    by_victim: Counter[str] = field(default_factory=Counter)
    runs: int = 0
    different: int = 0
    given_up: int = 0
    left_behind: int = 0


def write_shards(folder: Path, shards: int, rows: int) -> None:
    """Files of example rows, none like another: JSON Lines, and one Parquet and one CSV file."""
    examples = [json.loads(line) for line in EXAMPLE.read_text(encoding="utf-8").splitlines()]
    folder.mkdir()
    place = 0
    for shard in range(shards):
        found = []
        for _ in range(rows):
            example = examples[place % len(examples)]
            words = example["candidate"].split()
            found.append(
                {
                    "id": place,
                    "source": " ".join(example["source"].split()[: 20 + place % 17]),
                    "candidate": " ".join(words[: 3 + place % max(1, len(words))]),
                }
            )
            place += 1
        name = folder / f"shard-{shard:03d}"
        if shard == 1:
            import pyarrow
            from pyarrow import parquet

            parquet.write_table(pyarrow.Table.from_pylist(found), name.with_suffix(".parquet"))
        else:
            lines = "".join(json.dumps(row) + "\n" for row in found)
            name.with_suffix(".jsonl").write_text(lines, encoding="utf-8")


def contents(folder: Path) -> dict[str, bytes]:
    """The shards of an output folder."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def run_kills(folder: Path, kills: int, workers: int, seed: int, shards: int, rows: int, longest: float) -> Kills:
    """Run over shards in `folder` again and again, with kills at random moments.

    Parameters
    ----------
    folder : Path
        An empty folder.
    kills, workers, seed, shards, rows : int
    longest : float
        Seconds between two kills, at most.
    """
    dice, found = random.Random(seed), Kills()
    write_shards(folder / "in", shards, rows)
    _start(folder, "alone", 1).wait()
    expected = contents(folder / "alone")
    assert len(expected) == shards, "the run that is left alone ends"
    children: set[int] = set()
    run = _start(folder, "out", workers)
    while True:
        wanted = found.by_victim.total() < kills
        try:
            code = run.wait(dice.uniform(0.0, longest) if wanted else None)
        except subprocess.TimeoutExpired:
            alive = _children(run.pid)
            children |= set(alive)
            victim = "parent" if dice.random() < PARENT_SHARE or not alive else "worker"
            if victim == "parent" and not alive and dice.random() < 0.8:
                continue  # it is still starting; most kills are for later
            _kill(run.pid if victim == "parent" else dice.choice(alive))
            found.by_victim[victim] += 1
            if victim == "parent":
                run.wait()
                run = _start(folder, "out", workers)
            continue
        if code == 2 and "ended" in (folder / "errors").read_text():
            found.given_up += 1
            run = _start(folder, "out", workers)
            continue
        if code != 0:
            raise RuntimeError(f"exit code {code}: {(folder / 'errors').read_text()[-2000:]}")
        found.runs += 1
        found.different += contents(folder / "out") != expected
        if not wanted:
            break
        shutil.rmtree(folder / "out")
        run = _start(folder, "out", workers)
    time.sleep(2.0)
    found.left_behind = sum(_is_running(pid) for pid in children)
    return found


def _start(folder: Path, output: str, workers: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "diffscore_fast.cli.main", "score", "in", "-o", output, "--resume", "--quiet"]
    command += [*TARGET_STDERR, "--workers", str(workers)]
    root = str(Path(__file__).parent.parent)
    with (folder / "errors").open("wb") as errors:
        return subprocess.Popen(command, cwd=folder, stderr=errors, env={**os.environ, "PYTHONPATH": root})


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@click.command()
@click.option("--kills", default=100, show_default=True)
@click.option("--workers", default=2, show_default=True)
@click.option("--shards", default=8, show_default=True)
@click.option("--rows", default=40, show_default=True, help="Of each shard.")
@click.option("--seed", default=0, show_default=True)
@click.option("--longest", default=8.0, show_default=True, help="Seconds between two kills, at most.")
def main(kills: int, workers: int, shards: int, rows: int, seed: int, longest: float) -> None:
    """Kill workers and the command at random moments, and compare the bytes of every run that ends."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        found = run_kills(Path(name), kills, workers, seed, shards, rows, longest)
    counts = {
        "runs": found.runs,
        "different": found.different,
        "given_up": found.given_up,
        "left_behind": found.left_behind,
    }
    seconds = round(time.perf_counter() - started)
    settings = {"workers": workers, "shards": shards, "rows": rows, "seed": seed, "seconds": seconds}
    append_record(RESULTS / "kills.jsonl", kills=dict(found.by_victim), **counts, **settings)
    print({**found.by_victim, **counts, **settings})
    sys.exit(found.different > 0 or found.left_behind > 0)


if __name__ == "__main__":
    main()
