"""The training loop: draw, mask, step, log, evaluate, checkpoint. Resumable at any step."""

from __future__ import annotations

import csv
import dataclasses
import json
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from diffscore_fast.backbones.bert import BertBackbone
from diffscore_fast.training.checkpoint import restore_checkpoint, save_checkpoint, swapped_weights
from diffscore_fast.training.corpus import Corpus
from diffscore_fast.training.evaluation import held_out_losses
from diffscore_fast.training.examples import Example, ExampleSampler, Mixture
from diffscore_fast.training.objective import mask_examples, masked_losses, sample_rows
from diffscore_fast.training.optimiser import Schedule, WeightAverage, parameter_groups
from diffscore_fast.training.patterns import pack_layouts


@dataclass(frozen=True)
class Settings:
    """Everything a run depends on but its corpus and starting weights."""

    seed: int = 0
    tokens_a_step: int = 1536  # rows of a pack: prefix, window, and both streams of a block sequence
    rows_a_step: int = 448  # masked rows that pass the vocabulary projection
    checkpoint_seconds: float = 300.0
    evaluation_seconds: float = 1800.0
    evaluation_sequences: int = 16
    mixture: Mixture = field(default_factory=Mixture)
    schedule: Schedule = field(default_factory=Schedule)


class Trainer:
    """Trains a backbone on examples of a corpus.

    Step s draws its examples and masks from a generator seeded by (seed, s), so a resumed run sees what an
    uninterrupted one would have seen.

    Parameters
    ----------
    backbone : BertBackbone
        Starting weights; trained in place.
    source : Path
        The model folder they came from; checkpoints copy its config and tokenizer.
    train, held_out : Corpus
        Articles to learn from, and articles that are only evaluated on.
    folder : Path
        The run's folder (see `checkpoint`). Where it holds a checkpoint, the run goes on from there.
    """

    def __init__(
        self, backbone: BertBackbone, source: Path, train: Corpus, held_out: Corpus, folder: Path, settings: Settings
    ) -> None:
        self.backbone = backbone.train().requires_grad_(True)
        self.source = source
        self.held_out = held_out
        self.folder = folder
        self.settings = settings
        self.sampler = ExampleSampler(train, settings.mixture)
        self.groups = parameter_groups(backbone, settings.schedule)
        self.optimiser = torch.optim.AdamW(self.groups, lr=0.0, betas=(0.9, 0.98), eps=1e-6, fused=True)
        self.average = WeightAverage(backbone)
        self.step_number = self.tokens = 0
        self.seconds = 0.0
        self.warm_from = settings.schedule.head_steps
        folder.mkdir(parents=True, exist_ok=True)
        progress = restore_checkpoint(folder, backbone, self.average, self.optimiser)
        if progress is not None:
            self.step_number, self.tokens = progress["step"], progress["tokens"]
            self.seconds, self.warm_from = progress["seconds"], progress["warm_from"]
            if not progress["optimiser_restored"]:
                self.warm_from = max(self.warm_from, self.step_number)
        record_settings(folder, self.step_number, settings)

    def run(self, *, steps: int) -> None:
        """Go on until `steps` steps have been made in all, or SIGTERM comes; either way checkpoint at the end."""
        stopped: list[int] = []
        handler = signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
        started = saved = evaluated = time.monotonic()
        before = self.seconds
        while self.step_number < steps and not stopped:
            row = self.step()
            now = time.monotonic()
            self.seconds = before + now - started
            self._log("log.csv", {**row, "seconds": round(self.seconds, 1)})
            if self.step_number % 20 == 0:
                print(json.dumps({**row, "seconds": round(self.seconds)}), file=sys.stderr, flush=True)
            if now - saved > self.settings.checkpoint_seconds:
                self.save()
                saved = time.monotonic()
            if now - evaluated > self.settings.evaluation_seconds:
                self.evaluate()
                evaluated = time.monotonic()
        signal.signal(signal.SIGTERM, handler)
        self.save()
        if not stopped:
            self.evaluate()

    def step(self) -> dict[str, float | None]:
        """One update; returns the row for the log: the step, tokens read, and mean loss per pattern."""
        rng = np.random.default_rng([self.settings.seed, self.step_number])
        examples = self._draw(rng)
        pack = pack_layouts(mask_examples(examples, self.backbone.spec, rng))
        chosen = sample_rows(pack, self.settings.rows_a_step, rng)
        self._set_rates()
        losses = masked_losses(self.backbone, pack, chosen).per_sequence()
        self.optimiser.zero_grad(set_to_none=True)
        losses.mean().backward()
        trained = [parameter for group in self.groups for parameter in group["params"] if parameter.grad is not None]
        norm = nn.utils.clip_grad_norm_(trained, self.settings.schedule.clip)
        self.optimiser.step()
        self.step_number += 1
        self.tokens += len(pack.tokens)
        self.average.update(self.backbone, self.step_number)
        row: dict[str, float | None] = {"step": self.step_number, "tokens": self.tokens}
        row["gradient_norm"] = round(float(norm), 3)
        values = losses.detach().numpy()
        for pattern in ("full", "prefix", "block"):
            of_pattern = values[[example.pattern == pattern for example in examples]]
            row[pattern] = round(float(of_pattern.mean()), 4) if len(of_pattern) else None
        return row

    def save(self) -> None:
        progress = {
            "step": self.step_number,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "warm_from": self.warm_from,
        }
        save_checkpoint(self.folder, self.source, self.backbone, self.average, self.optimiser, progress)

    def evaluate(self) -> dict[str, float]:
        """Held-out losses of the averaged weights, appended to evaluation.csv."""
        with swapped_weights(self.backbone, self.average):
            measured = held_out_losses(self.backbone, self.held_out, sequences=self.settings.evaluation_sequences)
        losses = {item.setting: round(item.mean, 4) for item in measured}
        row = {"step": self.step_number, "tokens": self.tokens, "seconds": round(self.seconds, 1), **losses}
        self._log("evaluation.csv", row)
        print(json.dumps(row), file=sys.stderr, flush=True)
        return losses

    def _draw(self, rng: np.random.Generator) -> list[Example]:
        """Examples up to the step's budget of rows; at least one, whatever its length."""
        examples: list[Example] = []
        left = self.settings.tokens_a_step
        while True:
            example = self.sampler.draw(rng)
            streams = 2 if example.pattern == "block" else example.copies
            left -= 1 + len(example.prefix) + streams * len(example.window)
            if examples and left < 0:
                return examples
            examples.append(example)

    def _set_rates(self) -> None:
        """Rates of this step; in the head's own stage the other groups take no part at all."""
        schedule = self.settings.schedule
        head_alone = self.step_number < schedule.head_steps
        stage_step = self.step_number if head_alone else self.step_number - self.warm_from
        for group in self.optimiser.param_groups:
            learns = group["name"] == "head" or not head_alone
            base = schedule.head_alone if head_alone else group["base_rate"]
            group["lr"] = base * schedule.factor(stage_step) * schedule.cooling(self.step_number)
            for parameter in group["params"]:
                parameter.requires_grad_(learns)

    def _log(self, name: str, row: Mapping[str, float | None]) -> None:
        path = self.folder / name
        fresh = not path.exists()
        with path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, row.keys())
            if fresh:
                writer.writeheader()
            writer.writerow(row)


def record_settings(folder: Path, step: int, settings: Any) -> None:
    """Append the settings, a dataclass, to the folder's settings.json, a list, where they differ from the last ones."""
    path = folder / "settings.json"
    history = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    now = json.loads(json.dumps(dataclasses.asdict(settings)))
    if not history or {**history[-1], "from_step": 0} != {"from_step": 0, **now}:
        history.append({"from_step": step, **now})
        path.write_text(json.dumps(history, indent=1) + "\n", encoding="utf-8")
