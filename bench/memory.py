"""Peak memory of `diffscore score` against the number of rows, for each file format.

    python -m bench.memory [--rows 10000,300000] [--names rows.jsonl,rows.csv]

The network is small and random, so that what grows with the file shows. Needs the development requirements.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

NAMES = ("rows.jsonl", "rows.jsonl.gz", "rows.jsonl.zst", "rows.csv", "rows.tsv", "rows.parquet")
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
COLUMNS = ("id", "candidate", "extra")

# The process itself says what it took: getrusage of a child counts the memory of the parent that started it.
RUN = """
import atexit, re
from pathlib import Path
from diffscore_fast.cli.main import main
atexit.register(lambda: print(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]))
main()
"""


def rows(count: int) -> Iterator[tuple[str, str, str]]:
    """Rows of about 170 characters that all differ; their texts repeat, which spares the network work."""
    for i in range(count):
        yield str(10**18 + i), f"Row {i % 1000}.", f"{i * 2654435761 % 2**32:08x}" * 16


def write(path: Path, count: int) -> None:
    """A file of `count` rows in the format of its name, in constant memory."""
    import pyarrow
    from pyarrow import parquet

    if path.suffix == ".parquet":
        schema = pyarrow.schema([(name, pyarrow.string()) for name in COLUMNS])
        with parquet.ParquetWriter(path, schema) as file:
            stream = rows(count)
            while part := list(islice(stream, 100_000)):
                file.write_table(
                    pyarrow.table([pyarrow.array(column) for column in zip(*part, strict=True)], schema=schema)
                )
    elif path.suffix in (".csv", ".tsv"):
        with path.open("w", newline="") as text:
            writer = csv.writer(text, delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writerow(COLUMNS)
            writer.writerows(rows(count))
    else:
        with pyarrow.output_stream(path, compression=COMPRESSIONS.get(path.suffix)) as packed:
            for row in rows(count):
                packed.write(json.dumps(dict(zip(COLUMNS, row, strict=True))).encode() + b"\n")


def make_model(folder: Path) -> None:
    """A random BERT of width 8 with the embedded model's tokenizer."""
    from transformers import BertConfig, BertForMaskedLM

    from diffscore_fast.backbones.load import EMBEDDED_MODELS

    tokenizer = EMBEDDED_MODELS["mini"] / "tokenizer.json"
    vocabulary = len(json.loads(tokenizer.read_text())["model"]["vocab"])
    BertForMaskedLM(BertConfig(
        vocab_size=vocabulary, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8,
        max_position_embeddings=64,
    )).save_pretrained(folder)  # fmt: skip
    shutil.copy(tokenizer, folder)


def peak(arguments: list[str]) -> tuple[float, float]:
    """MiB of peak resident memory and seconds of a run of the command, which must succeed."""
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", RUN, *arguments], check=True, stdout=subprocess.PIPE)
    return int(done.stdout) / 1024, time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="10000,300000", help="comma-separated numbers of rows")
    parser.add_argument("--names", default=",".join(NAMES), help="comma-separated file names, for their endings")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model")
        for file in options.names.split(","):
            for count in map(int, options.rows.split(",")):
                source, target = folder / file, folder / f"out_{file}"
                write(source, count)
                command = ["score", str(source), "-o", str(target), "--model", str(folder / "model")]
                command += ["--direction", "marginal", "--draws", "1", "--mask-ratios", "uniform", "--quiet"]
                memory, seconds = peak(command)
                size = source.stat().st_size / 2**20
                print(
                    f"{file:16} {count:9,} rows {size:8.1f} MiB  peak {memory:7.0f} MiB  {seconds:6.1f} s", flush=True
                )
                source.unlink()
                target.unlink()


if __name__ == "__main__":
    main()
