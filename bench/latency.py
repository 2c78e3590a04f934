"""Time from text to score: one pair and small batches, short pairs and long sources, and from a cold start.

`python -m bench.latency` times calls in one process, beside BARTScore of equal size with random weights (in float32
where ours is int8), and starts the command and the library in processes of their own. A "seen" source is that of the
call before; its keys and values are in the prefix cache of the scorer.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import numpy as np
import torch

from bench.baselines.bartscore import BartScore, bart_like
from bench.memory import WORDS
from bench.records import RESULTS, append_record, embedded_weights
from diffscore_fast import DiffScorer
from diffscore_fast.options import DTYPES

BATCHES = (1, 4, 16)
SECTIONS = ("short", "long", "cold")
PUBLISHED = {"draws": 20, "coupling": "independent"}
WARM_CALLS = 3  # they make kernels and buffers
LIBRARY = """
import time
begun = time.perf_counter()
from diffscore_fast import DiffScorer
import torch
imported = time.perf_counter()
scorer = DiffScorer("mini", dtype="{dtype}")
loaded = time.perf_counter()
scorer.score(["The cat sat on the mat."], ["A cat sat."])
print(imported - begun, loaded - imported, time.perf_counter() - loaded)
"""

Texts = tuple[list[str], list[str]]
Method = Callable[[list[str], list[str]], object]


@click.command()
@click.option("--dtype", type=click.Choice(DTYPES), default="float32", show_default=True)
@click.option("--calls", default=30, show_default=True, help="Timed calls per case and method.")
@click.option("--threads", default=2, show_default=True)
@click.option("--only", type=click.Choice(SECTIONS), multiple=True, help="Sections to run; default all.")
@click.option("--baselines/--no-baselines", default=True, help="Also BARTScore.")
def main(dtype: str, calls: int, threads: int, only: tuple[str, ...], baselines: bool) -> None:
    """Time calls; results are appended to bench/results/latency.jsonl."""
    torch.set_num_threads(threads)
    about = {"dtype": dtype, "weights": embedded_weights()}
    if {"short", "long"} & set(only or SECTIONS):
        methods = make_methods(dtype, baselines)
    for section in only or SECTIONS:
        if section == "cold":
            times = cold_start(dtype)
            print(f"{dtype}, cold: " + ", ".join(f"{name} {value} s" for name, value in times.items()))
            append_record(RESULTS / "latency.jsonl", section=section, **about, **times)
            continue
        cases = {f"batch {size}": short_pairs(size) for size in BATCHES} if section == "short" else long_sources()
        for case, texts in cases.items():
            for name, quantiles in timed(methods, texts, calls).items():
                print(f"{dtype}, {section}, {case}, {name}: {quantiles}", flush=True)
                fields = {"case": case, "method": name, "calls": calls, **quantiles}
                append_record(RESULTS / "latency.jsonl", section=section, **about, **fields)


def make_methods(dtype: str, baselines: bool) -> dict[str, Method]:
    """Ours by default and under the published settings, and BARTScore as published and tuned."""
    scorer, other = (DiffScorer("mini", dtype=dtype) for _ in range(2))  # type: ignore[arg-type]
    # Each with a prefix cache of its own: what one method has read is not seen by the other.
    methods: dict[str, Method] = {
        "default": lambda sources, candidates: scorer.score(sources, candidates),
        "published masks": lambda sources, candidates: other.score(sources, candidates, **PUBLISHED),  # type: ignore[arg-type]
    }
    if baselines:
        plain = BartScore(bart_like("equal", scorer.spec.vocab_size), tuned=False)
        kind = torch.bfloat16 if dtype == "bfloat16" else torch.float32
        tuned = BartScore(bart_like("equal", scorer.spec.vocab_size).to(dtype=kind), tuned=True)  # type: ignore[call-arg]
        for name, bart in (("bartscore, as published", plain), ("bartscore, tuned", tuned)):
            methods[name] = lambda sources, candidates, bart=bart: bart.score(  # type: ignore[misc]
                scorer.tokenize(sources), scorer.tokenize(candidates)
            )
    return methods


def short_pairs(size: int) -> Iterator[Texts]:
    """Batches of pairs of 10 and 10 words, none like another."""
    generator = np.random.default_rng(size)
    while True:
        texts = [" ".join(generator.choice(WORDS, 10)) for _ in range(2 * size)]
        yield texts[:size], texts[size:]


def long_sources() -> dict[str, Iterator[Texts]]:
    """One pair of 350 and 50 words: its source new in every call, and the same in all calls."""

    def pairs(seen: bool) -> Iterator[Texts]:
        generator = np.random.default_rng(0)
        source = " ".join(generator.choice(WORDS, 350))
        while True:
            yield [source if seen else " ".join(generator.choice(WORDS, 350))], [" ".join(generator.choice(WORDS, 50))]

    return {"source new": pairs(False), "source seen": pairs(True)}


def timed(methods: dict[str, Method], texts: Iterator[Texts], calls: int) -> dict[str, dict[str, float]]:
    """p50, p90 and p99 of each method in milliseconds; the methods take turns on the same texts."""
    times: dict[str, list[float]] = {name: [] for name in methods}
    for call in range(WARM_CALLS + calls):
        sources, candidates = next(texts)
        for name, method in methods.items():
            started = time.perf_counter()
            method(sources, candidates)
            if call >= WARM_CALLS:
                times[name].append(1e3 * (time.perf_counter() - started))
    return {
        name: {f"p{q}_ms": round(float(np.percentile(own, q)), 2) for q in (50, 90, 99)} for name, own in times.items()
    }


def cold_start(dtype: str, rounds: int = 3) -> dict[str, float]:
    """Seconds of import, load and first score in a fresh process, and of `diffscore score` over one row; medians."""
    library = LIBRARY.format(dtype=dtype)
    with tempfile.TemporaryDirectory() as scratch:
        rows = Path(scratch) / "rows.jsonl"
        rows.write_text(json.dumps({"source": "The cat sat on the mat.", "candidate": "A cat sat."}) + "\n")
        found = []
        for number in range(rounds):
            printed = subprocess.run(
                [sys.executable, "-c", library], check=True, stdout=subprocess.PIPE, text=True
            ).stdout
            command = [sys.executable, "-m", "diffscore_fast.cli.main", "score", str(rows), "--quiet", "--dtype", dtype]
            started = time.perf_counter()
            subprocess.run([*command, "-o", str(Path(scratch) / f"{number}.jsonl")], check=True)
            found.append([*map(float, printed.split()), time.perf_counter() - started])
    medians = np.median(np.array(found), axis=0)
    return dict(zip(("import_s", "load_s", "first_score_s", "command_s"), medians.round(3).tolist(), strict=True))


if __name__ == "__main__":
    main()
