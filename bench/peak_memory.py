"""Peak memory of `diffscore score` over generated files of distinct rows: it must not grow with the file."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from diffscore_fast.backbones.bert import build_bert, state_in_bert_layout
from diffscore_fast.backbones.load import EMBEDDED_MODELS, read_patterns

ROWS = (10_000, 100_000, 1_000_000)
# The process reads its own high-water mark: what the kernel tells of a child includes the parent it was forked from.
RUN = """
import atexit, re
from pathlib import Path
from diffscore_fast.cli.main import main
atexit.register(lambda: print(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]))
main()
"""
WORDS = ("the", "cat", "dog", "house", "river", "rain", "sings", "falls", "old", "green", "over", "under")


def tiny_model(folder: Path) -> Path:
    """A random BERT of one layer of width 16, with the embedded model's tokenizer: its time and memory are little."""
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
             "max_position_embeddings": 512}  # fmt: skip
    config = json.loads((EMBEDDED_MODELS["mini"] / "config.json").read_text(encoding="utf-8")) | shape
    del config["diffscore_fast"]["weights_sha256"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    shutil.copy(EMBEDDED_MODELS["mini"] / "tokenizer.json", folder)
    torch.manual_seed(0)
    backbone = build_bert("tiny", config, *read_patterns(config), mask_id=4, start_id=2)
    save_file(state_in_bert_layout(backbone), folder / "model.safetensors")
    return folder


def write_rows(path: Path, count: int) -> None:
    """Rows of a source of 30 words, with a number of its own, and a candidate of 4."""
    generator = np.random.default_rng(0)
    with path.open("w", encoding="utf-8") as file:
        for row in range(count):
            words = [WORDS[i] for i in generator.integers(len(WORDS), size=34)]
            file.write(json.dumps({"source": f"{row} {' '.join(words[4:])}", "candidate": " ".join(words[:4])}) + "\n")


def peak_of_run(model: Path, rows: int, folder: Path, memory: str) -> tuple[float, float]:
    """Peak resident bytes and seconds of the command over that many rows."""
    write_rows(folder / "rows.jsonl", rows)
    command = [sys.executable, "-c", RUN, "score", str(folder / "rows.jsonl"), "-o", str(folder / "scored.jsonl"),
               "--model", str(model), "--draws", "1", "--mask-ratios", "uniform", "--memory", memory,
               "--quiet"]  # fmt: skip
    begin = time.perf_counter()
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(done.stdout) * 1024.0, time.perf_counter() - begin


def measure(rows: tuple[int, ...] = ROWS, memory: str = "64M") -> list[dict]:
    """One record a file size."""
    records = []
    with tempfile.TemporaryDirectory() as name:
        model = tiny_model(Path(name) / "tiny")
        for count in rows:
            peak, seconds = peak_of_run(model, count, Path(name), memory)
            records.append({"rows": count, "peak_bytes": peak, "seconds": round(seconds, 1), "memory": memory})
            print(f"{count:>10,} rows  peak {peak / 2**20:7.1f} MiB  {seconds:7.1f} s", flush=True)
    return records
