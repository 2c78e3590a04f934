"""Peak memory of `diffscore score` against the number of rows, for each file format: `python -m bench.memory`.

The network is tiny and random and the memory budget is the smallest one, so that whatever grows with the file is
visible. Rows go to bench/results/memory.csv.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import click
import numpy as np
import pyarrow
from pyarrow import parquet

from bench.records import RESULTS, append_rows
from bench.tiny_model import tiny_model

ROWS = "10000,300000"
ROWS_OF = {"rows.jsonl": "10000,100000,1000000"}
NAMES = ("rows.jsonl", "rows.jsonl.gz", "rows.jsonl.zst", "rows.csv", "rows.tsv", "rows.parquet")
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
COLUMNS = ("id", "source", "candidate", "extra")
WORDS = ("the", "cat", "dog", "house", "river", "rain", "sings", "falls", "old", "green", "over", "under")

# The process reports its own peak: getrusage of a child would count the memory of the parent that started it.
RUN = """
import atexit, re
from pathlib import Path
from diffscore_fast.cli.main import main
atexit.register(lambda: print(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]))
main()
"""


@click.command()
@click.option(
    "--names", default=",".join(NAMES), show_default=True, help="Comma-separated file names; the ending is the format."
)
@click.option(
    "--rows", help=f"Comma-separated numbers. Default: {ROWS_OF['rows.jsonl']} for rows.jsonl, {ROWS} for the others."
)
@click.option("--memory", default="64M", show_default=True, help="Budget of `diffscore score --memory`.")
def main(names: str, rows: str | None, memory: str) -> None:
    """Peak memory of `diffscore score` against the number of rows, for each file format."""
    with tempfile.TemporaryDirectory() as scratch:
        model = tiny_model(Path(scratch) / "model")
        for name in names.split(","):
            for count in map(int, (rows or ROWS_OF.get(name, ROWS)).split(",")):
                measure(Path(scratch) / name, count, model, memory)


def measure(source: Path, count: int, model: Path, memory: str) -> None:
    """Write the file, score it, print and record peak memory and time, and remove the file."""
    target = source.with_name(f"scored_{source.name}")
    write(source, count)
    peak, seconds = peak_of_command(
        [
            "score",
            str(source),
            "-o",
            str(target),
            "--model",
            str(model),
            "--memory",
            memory,
            "--draws",
            "1",
            "--mask-ratios",
            "uniform",
            "--quiet",
        ]
    )
    size = source.stat().st_size
    print(
        f"{source.name:16} {count:9,} rows {size / 2**20:8.1f} MiB  peak {peak / 2**20:7.1f} MiB  {seconds:6.1f} s",
        flush=True,
    )
    append_rows(
        RESULTS / "memory.csv",
        [
            {
                "file": source.name,
                "rows": count,
                "file_bytes": size,
                "memory": memory,
                "peak_bytes": peak,
                "seconds": f"{seconds:.1f}",
                "pyarrow": pyarrow.__version__,
            }
        ],
    )
    source.unlink()
    target.unlink()


def generated_rows(count: int) -> Iterator[tuple[str, ...]]:
    """Rows with a source of 30 words and a number of its own, a candidate of 4 words, and two columns to keep."""
    generator = np.random.default_rng(0)
    for row in range(count):
        words = [WORDS[i] for i in generator.integers(len(WORDS), size=34)]
        yield str(10**18 + row), f"{row} {' '.join(words[4:])}", " ".join(words[:4]), f"{row * 2654435761 % 2**32:08x}"


def write(path: Path, count: int) -> None:
    """A file of `count` rows in the format of its name, in constant memory."""
    rows = generated_rows(count)
    if path.suffix == ".parquet":
        schema = pyarrow.schema([(name, pyarrow.string()) for name in COLUMNS])
        with parquet.ParquetWriter(path, schema) as file:
            while chunk := list(islice(rows, 100_000)):
                columns = [pyarrow.array(column) for column in zip(*chunk, strict=True)]
                file.write_table(pyarrow.table(columns, schema=schema))
    elif path.suffix in (".csv", ".tsv"):
        with path.open("w", newline="") as text:
            writer = csv.writer(text, delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writerow(COLUMNS)
            writer.writerows(rows)
    else:
        with pyarrow.output_stream(path, compression=COMPRESSIONS.get(path.suffix)) as packed:
            for row in rows:
                packed.write(json.dumps(dict(zip(COLUMNS, row, strict=True))).encode() + b"\n")


def peak_of_command(arguments: list[str]) -> tuple[int, float]:
    """Peak resident bytes and seconds of one run of the command; raises if the command fails."""
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", RUN, *arguments], check=True, stdout=subprocess.PIPE)
    return int(done.stdout) * 1024, time.perf_counter() - begin


if __name__ == "__main__":
    main()
