"""How the time of scoring grows: over rows, draws, source length and candidate length."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import numpy as np

from bench.records import append_rows
from bench.timing import interleaved, spread
from diffscore_fast import DiffScorer

# Held while another is varied: rows, K, words of a source, words of a candidate.
FIXED = {"rows": 4, "draws": 6, "source words": 60, "candidate words": 24}
POINTS = {
    "rows": (2, 4, 8, 16),
    "draws": (2, 4, 8, 16),
    "source words": (50, 100, 200, 400),
    "candidate words": (10, 20, 40, 80),
}
ATTENTIONS = ("prefix", "full")


def measure(scorer: DiffScorer, weights: str, words: list[str], rounds: int, results: Path) -> None:
    """Time every point in interleaved rounds; append scaling.csv and draw scaling.png."""
    seconds: dict[tuple[str, str, int], list[float]] = {}
    for varied, values in POINTS.items():
        calls = {}
        for value in values:
            shape = {**FIXED, varied: value}
            for attention in ATTENTIONS:
                calls[f"{attention}/{value}"] = _call(scorer, words, shape, attention)
        for label, times in interleaved(calls, rounds).items():
            attention, point = label.split("/")
            seconds[attention, varied, int(point)] = times
            print(f"{attention:<7} {varied:<16} {point:>5} {statistics.median(times):8.3f} s", flush=True)
    append_rows(
        results / "scaling.csv",
        [
            {
                "attention": attention,
                "varied": varied,
                "value": value,
                "median_s": f"{statistics.median(times):.5f}",
                "spread_s": f"{spread(times):.5f}",
                "rounds": len(times),
                "weights_sha256": weights,
            }
            for (attention, varied, value), times in seconds.items()
        ],
    )
    _draw(results / "scaling.png", seconds)


def _call(scorer: DiffScorer, words: list[str], shape: dict[str, int], attention: Any) -> Any:
    """A call that scores distinct candidates, each with a source of its own."""
    generator = np.random.default_rng(0)

    def text(count: int) -> str:
        return " ".join(words[i] for i in generator.integers(len(words), size=count))

    sources = [text(shape["source words"]) for _ in range(shape["rows"])]
    candidates = [text(shape["candidate words"]) for _ in range(shape["rows"])]

    def score() -> None:
        scorer.clear_cache()
        scorer.score(sources, candidates, attention=attention, draws=shape["draws"], mask_ratios="stratified")

    return score


def _draw(path: Path, seconds: dict[tuple[str, str, int], list[float]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(POINTS), figsize=(3.2 * len(POINTS), 3), sharey=True)
    for axis, (varied, values) in zip(axes, POINTS.items(), strict=True):
        for attention in ATTENTIONS:
            medians = [statistics.median(seconds[attention, varied, value]) for value in values]
            axis.plot(values, medians, marker="o", label=attention)
        axis.set_xlabel(varied)
        axis.set_xlim(left=0)
    axes[0].set_ylim(bottom=0)  # shared, and so set when all curves are drawn
    axes[0].set_ylabel("seconds")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
