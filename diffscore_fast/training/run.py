"""What training runs share: the loop, the files of a run's folder, and one update of a network.

A run's folder, beside its checkpoint:

settings.json         a list: what the run was started with, and each change with the step from which it applies
log.csv               one row per step
evaluation.csv        held-out losses over training: the learning curve

A checkpoint holds a step; log rows of later steps are dropped when a run goes on from it.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from diffscore_fast.backbones.spec import SplitBackbone
from diffscore_fast.training.examples import Example
from diffscore_fast.training.objective import masked_losses
from diffscore_fast.training.patterns import Pack


class TrainingRun(ABC):
    """A resumable run in a folder. It goes on from the folder's checkpoint, if there is one.

    A subclass calls `open_folder` once its network and optimiser are ready.

    Attributes
    ----------
    step_number, tokens : int
        Steps made and tokens read, over all processes of the run.
    seconds : float
        Time spent in steps, checkpoints and evaluations.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.step_number = self.tokens = 0
        self.seconds = 0.0

    @abstractmethod
    def restore(self) -> None:
        """Load the folder's checkpoint, if there is one."""

    @abstractmethod
    def step(self) -> dict[str, Any]:
        """One update; returns the row for log.csv, `step` first."""

    @abstractmethod
    def save(self) -> None:
        """Replace the checkpoint; the old one stays until the new one is complete."""

    @abstractmethod
    def evaluate(self) -> dict[str, float]:
        """Held-out losses by name, appended to evaluation.csv."""

    @abstractmethod
    def before_step(self) -> None:
        """What is due before a step."""

    @abstractmethod
    def after_step(self, row: Mapping[str, Any]) -> None:
        """What is due after a step, given its row of the log."""

    @abstractmethod
    def finish(self) -> None:
        """What follows the last step and its checkpoint; left out after SIGTERM."""

    def open_folder(self, settings: Any) -> None:
        """Make the folder, restore its checkpoint, rewind its logs, and record `settings`, a dataclass."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.restore()
        for name in ("log.csv", "evaluation.csv"):
            rewind(self.folder / name, self.step_number)
        record_settings(self.folder, self.step_number, settings)

    def go_on(self, steps: int) -> None:
        """Make steps until there are `steps` in all, or until SIGTERM comes; save a checkpoint either way."""
        started, before = time.monotonic(), self.seconds
        with sigterm_noted() as stopped:
            while self.step_number < steps and not stopped:
                self.before_step()
                row = self.step()
                self.seconds = before + time.monotonic() - started
                append_row(self.folder / "log.csv", {**row, "seconds": round(self.seconds, 1)})
                self.after_step(row)
            self.save()
            if not stopped:
                self.finish()

    def record_evaluation(self, losses: Mapping[str, float]) -> None:
        """Append held-out losses to evaluation.csv and print them."""
        row = {"step": self.step_number, "tokens": self.tokens, "seconds": round(self.seconds, 1), **losses}
        append_row(self.folder / "evaluation.csv", row)
        print(json.dumps(row), file=sys.stderr, flush=True)

    def print_progress(self, row: Mapping[str, Any]) -> None:
        print(json.dumps({**row, "seconds": round(self.seconds)}), file=sys.stderr, flush=True)


def update(
    network: SplitBackbone,
    pack: Pack,
    chosen: np.ndarray,
    optimiser: torch.optim.Optimizer,
    parameters: Iterable[nn.Parameter],
    clip: float,
) -> tuple[Tensor, float]:
    """One step of the optimiser on the masked rows that `chosen` names.

    The loss is the mean over sequences of means over their tokens. `clip` is the largest norm of the gradient of
    `parameters`. Returns the loss of each sequence [S], detached, and the norm before clipping.
    """
    losses = masked_losses(network, pack, chosen).per_sequence()
    optimiser.zero_grad(set_to_none=True)
    losses.mean().backward()
    norm = nn.utils.clip_grad_norm_(parameters, clip)
    optimiser.step()
    return losses.detach(), float(norm)


def draw_up_to(budget: int, draw: Callable[[], Example], cost: Callable[[Example], int]) -> list[Example]:
    """Examples whose costs add up to `budget` at most; at least one, whatever its cost."""
    examples: list[Example] = []
    while True:
        example = draw()
        budget -= cost(example)
        if examples and budget < 0:
            return examples
        examples.append(example)


def record_settings(folder: Path, step: int, settings: Any) -> None:
    """Append the settings, a dataclass, to the folder's settings.json, where they differ from the last ones there."""
    path = folder / "settings.json"
    history = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    now = json.loads(json.dumps(dataclasses.asdict(settings)))
    if not history or {**history[-1], "from_step": 0} != {"from_step": 0, **now}:
        history.append({"from_step": step, **now})
        path.write_text(json.dumps(history, indent=1) + "\n", encoding="utf-8")


def append_row(path: Path, row: Mapping[str, Any]) -> None:
    """Append a row to a CSV file in one write; a new file gets a header."""
    text = io.StringIO()
    writer = csv.DictWriter(text, row.keys())
    if not path.exists():
        writer.writeheader()
    writer.writerow(row)
    with path.open("a", newline="", encoding="utf-8") as file:
        file.write(text.getvalue())


def rewind(path: Path, step: int) -> None:
    """Drop the rows of a CSV file that are later than a step, and a row that a killed run left incomplete.

    The first column is the step.
    """
    if not path.is_file():
        return
    header, *rows = path.read_text(encoding="utf-8").splitlines(keepends=True) or [""]
    kept = [row for row in rows if row.endswith("\n") and int(row.split(",")[0]) <= step]
    if not header.endswith("\n"):
        path.unlink()
    elif len(kept) < len(rows):
        fresh = path.with_suffix(".new")
        fresh.write_text("".join([header, *kept]), encoding="utf-8")
        fresh.replace(path)


@contextmanager
def sigterm_noted() -> Iterator[list[int]]:
    """Within the block SIGTERM does not end the process: the list, empty at first, gets its number."""
    received: list[int] = []
    handler = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        yield received
    finally:
        signal.signal(signal.SIGTERM, handler)
