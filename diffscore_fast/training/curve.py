"""The learning curve of a run: a CSV of held-out losses over training, and a picture of it."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

from diffscore_fast.errors import InputError

PANELS = {
    "full, by mask ratio": ("full@0.15", "full@0.5", "full@0.85"),
    "prefix, by mask ratio": ("prefix@0.15", "prefix@0.5", "prefix@0.85"),
    "block, by block size": ("block@1", "block@4", "block@8", "block@16"),
    "prefix at 0.5: right and wrong": ("right prefix", "wrong prefix"),
    "left to right": ("left to right",),
}


def draw_curve(run: Path, folder: Path) -> None:
    """Write `folder`/learning_curve.csv and .png from the run's evaluation.csv.

    Raises
    ------
    InputError
        If the run has not been evaluated yet.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    source = run / "evaluation.csv"
    if not source.is_file():
        raise InputError(f"{source}: no such file; the run has not been evaluated yet")
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, folder / "learning_curve.csv")
    with source.open(encoding="utf-8", newline="") as file:
        rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    tokens = [row["tokens"] / 1e6 for row in rows]
    panels = {title: settings for title, settings in PANELS.items() if set(settings) <= rows[0].keys()}
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4 * len(panels), 4), sharey=True)
    for axis, (title, settings) in zip(axes, panels.items(), strict=True):
        for setting in settings:
            axis.plot(tokens, [row[setting] for row in rows], marker=".", label=setting.split("@")[-1])
        axis.set(title=title, xlabel="million tokens read in training")
        axis.grid(alpha=0.3)
        axis.legend()
    axes[0].set_ylabel("held-out nats per token")
    figure.tight_layout()
    figure.savefig(folder / "learning_curve.png", dpi=100)
    pyplot.close(figure)
