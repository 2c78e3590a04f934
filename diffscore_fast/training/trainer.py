"""Training of a BERT network under all attention patterns. Resumable at any step."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from diffscore_fast.backbones.bert import BertBackbone
from diffscore_fast.training.checkpoint import restore_checkpoint, save_checkpoint, swapped_weights
from diffscore_fast.training.corpus import Corpus
from diffscore_fast.training.evaluation import held_out_losses
from diffscore_fast.training.examples import Example, ExampleSampler, Mixture
from diffscore_fast.training.objective import mask_examples, sample_rows
from diffscore_fast.training.optimiser import Schedule, WeightAverage, parameter_groups
from diffscore_fast.training.patterns import pack_layouts
from diffscore_fast.training.run import TrainingRun, draw_up_to, update

PRINT_STEPS = 20


@dataclass(frozen=True)
class Settings:
    """Everything that a run depends on, apart from its corpus and starting weights."""

    seed: int = 0
    tokens_per_step: int = 1536  # rows of a pack: prefix, window, and both streams of a block sequence
    rows_per_step: int = 448  # masked rows that are projected to the vocabulary
    checkpoint_seconds: float = 300.0
    evaluation_seconds: float = 1800.0
    evaluation_sequences: int = 16
    mixture: Mixture = field(default_factory=Mixture)
    schedule: Schedule = field(default_factory=Schedule)


class Trainer(TrainingRun):
    """Trains a backbone on examples of a corpus.

    Step s draws its examples and masks from a generator seeded by (seed, s), so that a resumed run makes the steps of
    an uninterrupted one.

    Parameters
    ----------
    backbone : BertBackbone
        Starting weights; trained in place.
    source : Path
        The model folder that they came from; checkpoints copy its config and tokenizer.
    train, held_out : Corpus
        Articles to learn from, and articles that are only evaluated on.
    folder : Path
        The run's folder (see `run` and `checkpoint`). If it has a checkpoint, the run goes on from there.
    settings : Settings
    """

    def __init__(
        self, backbone: BertBackbone, source: Path, train: Corpus, held_out: Corpus, folder: Path, settings: Settings
    ) -> None:
        super().__init__(folder)
        self.backbone = backbone.train().requires_grad_(True)
        self.source, self.held_out, self.settings = source, held_out, settings
        self.sampler = ExampleSampler(train, settings.mixture)
        self.groups = parameter_groups(backbone, settings.schedule)
        self.optimiser = torch.optim.AdamW(self.groups, lr=0.0, betas=(0.9, 0.98), eps=1e-6, fused=True)
        self.average = WeightAverage(backbone)
        self.warm_from = settings.schedule.head_steps
        self._saved = self._evaluated = time.monotonic()
        self.open_folder(settings)

    def run(self, *, steps: int) -> None:
        """Go on until `steps` steps have been made in all, or SIGTERM comes; either way checkpoint at the end."""
        self._saved = self._evaluated = time.monotonic()
        self.go_on(steps)

    def step(self) -> dict[str, float | None]:
        """One update; returns the row for the log: step, tokens read, gradient norm, and mean loss by pattern."""
        rng = np.random.default_rng([self.settings.seed, self.step_number])
        examples = self._draw(rng)
        pack = pack_layouts(mask_examples(examples, self.backbone.spec, rng))
        chosen = sample_rows(pack, self.settings.rows_per_step, rng)
        self._set_rates()
        parameters = [parameter for group in self.groups for parameter in group["params"]]
        losses, norm = update(self.backbone, pack, chosen, self.optimiser, parameters, self.settings.schedule.clip)
        self.step_number += 1
        self.tokens += len(pack.tokens)
        self.average.update(self.backbone, self.step_number)
        row: dict[str, float | None] = {"step": self.step_number, "tokens": self.tokens}
        row["gradient_norm"] = round(norm, 3)
        values = losses.numpy()
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
        self.record_evaluation(losses)
        return losses

    def before_step(self) -> None:
        """Nothing is due: checkpoints and evaluations go by time."""

    def after_step(self, row: Mapping[str, Any]) -> None:
        if self.step_number % PRINT_STEPS == 0:
            self.print_progress(row)
        if time.monotonic() - self._saved > self.settings.checkpoint_seconds:
            self.save()
            self._saved = time.monotonic()
        if time.monotonic() - self._evaluated > self.settings.evaluation_seconds:
            self.evaluate()
            self._evaluated = time.monotonic()

    def finish(self) -> None:
        self.evaluate()

    def restore(self) -> None:
        progress = restore_checkpoint(self.folder, self.backbone, self.average, self.optimiser)
        if progress is None:
            return
        self.step_number, self.tokens = progress["step"], progress["tokens"]
        self.seconds, self.warm_from = progress["seconds"], progress["warm_from"]
        if not progress["optimiser_restored"]:
            self.warm_from = max(self.warm_from, self.step_number)

    def _draw(self, rng: np.random.Generator) -> list[Example]:
        """The step's examples, up to its tokens: start token, prefix, and the window once per copy or stream."""

        def cost(example: Example) -> int:
            streams = 2 if example.pattern == "block" else example.copies
            return 1 + len(example.prefix) + streams * len(example.window)

        return draw_up_to(self.settings.tokens_per_step, lambda: self.sampler.draw(rng), cost)

    def _set_rates(self) -> None:
        """Set the rates of this step; in the stage of the head alone, the other groups are frozen."""
        schedule = self.settings.schedule
        head_alone = self.step_number < schedule.head_steps
        stage_step = self.step_number if head_alone else self.step_number - self.warm_from
        for group in self.optimiser.param_groups:
            learns = group["name"] == "head" or not head_alone
            base = schedule.head_alone if head_alone else group["base_rate"]
            group["lr"] = base * schedule.factor(stage_step) * schedule.cooling(self.step_number)
            for parameter in group["params"]:
                parameter.requires_grad_(learns)
