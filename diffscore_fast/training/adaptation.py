"""Adapting a causal language model to fill in masks after a causal prefix: low-rank adapters, resumable at any step.

A run's folder:

settings.json         what the run was started with, and what changed since
log.csv               one row per step
evaluation.csv        held-out losses over training: the learning curve
base.json             the base's own left-to-right loss on the same held-out pairs
checkpoint.pt         adapter, optimiser, step, tokens, seconds; replaced in one move, so that it is always complete

Step s draws its examples and masks from a generator seeded by (seed, s): there is no other random state, and a run
that is killed goes on from its last checkpoint with the numbers of one that was not.
"""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from diffscore_fast.backbones.llama import LlamaBackbone
from diffscore_fast.errors import CheckpointError, InputError
from diffscore_fast.text.tokenizer import TextTokenizer
from diffscore_fast.training.corpus import Corpus
from diffscore_fast.training.evaluation import RATIOS, measure
from diffscore_fast.training.examples import Example, ExampleSampler, Mixture
from diffscore_fast.training.lora import AdaptedLlama
from diffscore_fast.training.objective import lay_out, mask_by_ratio, masked_losses, sample_rows, stratified_ratios
from diffscore_fast.training.patterns import Layout, lay_left_to_right, pack_layouts
from diffscore_fast.training.trainer import record_settings

PAIRS = Mixture(
    patterns={"prefix": 1.0},
    pairs={"body_to_lead": 0.35, "extract": 0.25, "continuation": 0.3, "marginal": 0.1},
    prefix_lengths=(40, 300),
    window_lengths=(16, 160),
    copies=1,
    long_share=0.0,
)
LEFT_TO_RIGHT = "left to right"


@dataclass(frozen=True)
class AdaptationSettings:
    """Everything a run depends on but its corpus and starting weights.

    Parameters
    ----------
    steps : int
        Steps in all.
    cooldown_steps : int, optional
        Rates fall linearly to zero over the last of them; over all of them if not given.
    warmup_steps : int
        Rates rise linearly over the first ones.
    rate, mask_rate : float
        Learning rates of the adapters and of the mask embedding.
    clip : float
        Largest norm of the gradient.
    left_to_right : float
        Share of the examples that are read left to right instead of under a mask, so that this is not unlearnt.
    tokens_per_step, rows_per_step : int
        Tokens read, and at most about so many predicted.
    rank, seed : int
    mixture : Mixture
        Pairs of prefix and window.
    checkpoint_steps, evaluation_steps, evaluation_pairs : int
        A checkpoint and an evaluation are made every so many steps, the latter on so many held-out pairs.
    """

    steps: int
    cooldown_steps: int | None = None
    warmup_steps: int = 25
    rate: float = 4e-4
    mask_rate: float = 1e-3
    clip: float = 1.0
    left_to_right: float = 0.0
    tokens_per_step: int = 2048
    rows_per_step: int = 400
    rank: int = 64
    seed: int = 0
    mixture: Mixture = field(default_factory=lambda: PAIRS)
    checkpoint_steps: int = 20
    evaluation_steps: int = 100
    evaluation_pairs: int = 48

    def __post_init__(self) -> None:
        if self.steps < 1 or not 1 <= (self.cooldown_steps or 1) <= self.steps:
            raise InputError(f"a cooldown of {self.cooldown_steps} steps does not fit a run of {self.steps}")
        if not 0 <= self.left_to_right < 1:
            raise InputError(f"the share read left to right must be at least 0 and below 1, not {self.left_to_right}")

    def factor(self, step: int) -> float:
        """What rates are multiplied by at `step`, from 0."""
        cooldown = self.cooldown_steps or self.steps
        return min(1.0, (step + 1) / self.warmup_steps) * min(1.0, max(0.0, (self.steps - step) / cooldown))


class Adaptation:
    """A run that adapts a network to masks.

    Parameters
    ----------
    base : LlamaBackbone
        Its weights stay as they are.
    tokenizer : TextTokenizer
    train, held_out : Corpus
        Articles to learn from, and articles that are only evaluated on.
    folder : Path
        The run's folder. Where it holds a checkpoint, the run goes on from there.
    settings : AdaptationSettings
    adapter : dict of str to Tensor, optional
        What to start from, in a folder without a checkpoint.
    """

    def __init__(
        self,
        base: LlamaBackbone,
        tokenizer: TextTokenizer,
        train: Corpus,
        held_out: Corpus,
        folder: Path,
        settings: AdaptationSettings,
        adapter: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.network = AdaptedLlama(base, settings.rank, settings.seed)
        self.base, self.folder, self.settings = base, folder, settings
        self.sampler = ExampleSampler(train, settings.mixture)
        self.tokenizer = tokenizer
        self._held_out = ExampleSampler(held_out, replace(settings.mixture, copies=1))
        factors, mask = list(self.network.adapters.parameters()), [self.network.mask_embedding]
        groups = [{"params": factors, "base": settings.rate}, {"params": mask, "base": settings.mask_rate}]
        self.optimiser = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98), weight_decay=0.0)
        self.step_number = self.tokens = 0
        self.seconds = 0.0
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / "checkpoint.pt").is_file():
            self._restore()
        elif adapter is not None:
            self.network.load_adapter(adapter)
        for name in ("log.csv", "evaluation.csv"):
            rewind(folder / name, self.step_number)
        record_settings(folder, self.step_number, settings)

    def run(self) -> None:
        """Go on to the last step, or until SIGTERM comes; either way checkpoint at the end."""
        stopped: list[int] = []
        handler = signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
        settings, started, before = self.settings, time.monotonic(), self.seconds
        try:
            self.measure_base()
            while self.step_number < settings.steps and not stopped:
                if self.step_number % settings.evaluation_steps == 0 and not self._is_evaluated():
                    self.evaluate()
                row = self.step()
                self.seconds = before + time.monotonic() - started
                self._log("log.csv", {**row, "seconds": round(self.seconds, 1)})
                if self.step_number % settings.checkpoint_steps == 0:
                    self.save()
                    print(json.dumps({**row, "seconds": round(self.seconds)}), file=sys.stderr, flush=True)
            self.save()
            if not stopped and not self._is_evaluated():
                self.evaluate()
        finally:
            signal.signal(signal.SIGTERM, handler)

    def step(self) -> dict[str, Any]:
        """One update; returns the row for the log. Losses are means over sequences of means over their tokens."""
        settings = self.settings
        rng = np.random.default_rng([settings.seed, self.step_number])
        examples = self._draw(rng)
        causal = rng.random(len(examples)) < settings.left_to_right
        layouts = self._layouts(examples, causal, rng)
        pack = pack_layouts(layouts)
        chosen = sample_rows(pack, settings.rows_per_step, rng)
        for group in self.optimiser.param_groups:
            group["lr"] = group["base"] * settings.factor(self.step_number)
        losses = masked_losses(self.network, pack, chosen).per_sequence()
        self.optimiser.zero_grad(set_to_none=True)
        losses.mean().backward()
        norm = nn.utils.clip_grad_norm_(list(self.network.learnt().values()), settings.clip)
        self.optimiser.step()
        self.step_number += 1
        self.tokens += len(pack.tokens)
        values = losses.detach().double().numpy()
        return {
            "step": self.step_number,
            "tokens": self.tokens,
            "gradient_norm": round(float(norm), 4),
            "masked": _rounded_mean(values[~causal]),
            LEFT_TO_RIGHT: _rounded_mean(values[causal]),
        }

    def save(self) -> None:
        """Replace the checkpoint; the old one stays until the new one is on disk."""
        state = {
            "adapter": {name: item.detach() for name, item in self.network.learnt().items()},
            "optimiser": self.optimiser.state_dict(),
            "step": self.step_number,
            "tokens": self.tokens,
            "seconds": self.seconds,
        }
        fresh = self.folder / "checkpoint.pt.new"
        with fresh.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self.folder / "checkpoint.pt")

    def evaluate(self) -> dict[str, float]:
        """Held-out losses on fixed pairs and masks, appended to evaluation.csv: means over pairs of means per token."""
        pairs, losses = self._evaluation_pairs(), {}
        for ratio in RATIOS:
            masks = [
                mask_by_ratio(len(pair.window), ratio, np.random.default_rng([0, 4, number]))
                for number, pair in enumerate(pairs)
            ]
            measured = measure(f"prefix@{ratio}", self.network, pairs, masks)[0]
            losses[measured.setting] = round(float((measured.sums / measured.counts).mean()), 4)
        losses[LEFT_TO_RIGHT] = round(self._left_to_right(self.network, pairs), 4)
        self._log(
            "evaluation.csv",
            {"step": self.step_number, "tokens": self.tokens, "seconds": round(self.seconds, 1), **losses},
        )
        print(json.dumps({"step": self.step_number, **losses}), file=sys.stderr, flush=True)
        return losses

    def measure_base(self) -> None:
        """Write base.json, once: what the left-to-right loss of evaluation.csv is to be compared with."""
        path = self.folder / "base.json"
        if not path.is_file():
            loss = round(self._left_to_right(self.base, self._evaluation_pairs()), 4)
            path.write_text(json.dumps({LEFT_TO_RIGHT: loss}) + "\n", encoding="utf-8")

    def _evaluation_pairs(self) -> list[Example]:
        return [
            self._respelled(self._held_out, np.random.default_rng([0, 2, number]))
            for number in range(self.settings.evaluation_pairs)
        ]

    @torch.no_grad()
    def _left_to_right(self, network: LlamaBackbone, pairs: list[Example]) -> float:
        layouts = [lay_left_to_right(pair.prefix, pair.window, network.spec) for pair in pairs]
        return float(np.mean([float(masked_losses(network, pack_layouts([item])).tokens.mean()) for item in layouts]))

    def _draw(self, rng: np.random.Generator) -> list[Example]:
        """Examples up to the step's tokens; at least one, whatever its length."""
        examples: list[Example] = []
        left = self.settings.tokens_per_step
        while True:
            example = self._respelled(self.sampler, rng)
            left -= 2 + len(example.prefix) + example.copies * (len(example.window) + 1)
            if examples and left < 0:
                return examples
            examples.append(example)

    def _respelled(self, sampler: ExampleSampler, rng: np.random.Generator) -> Example:
        """A pair whose parts are spelled as texts of their own, without white space around them."""
        while True:
            drawn = sampler.draw(rng)
            texts = [self.tokenizer.decode(part).strip("\ufffd \n\t") for part in (drawn.prefix, drawn.window)]
            prefix, window = (item.ids.astype(np.int64) for item in self.tokenizer.encode(texts))
            if len(window):
                return replace(drawn, prefix=prefix, window=window)

    def _layouts(self, examples: list[Example], causal: np.ndarray, rng: np.random.Generator) -> list[Layout]:
        """Mask ratios are stratified over all masked copies of the step."""
        spec, layouts = self.network.spec, []
        count = sum(example.copies for example, alone in zip(examples, causal, strict=True) if not alone)
        ratios = iter(stratified_ratios(count, rng))
        for example, alone in zip(examples, causal, strict=True):
            if alone:
                layouts.append(lay_left_to_right(example.prefix, example.window, spec))
            else:
                masks = [mask_by_ratio(len(example.window), next(ratios), rng) for _ in range(example.copies)]
                layouts.append(lay_out(example, np.stack(masks), spec))
        return layouts

    def _restore(self) -> None:
        state = read_checkpoint(self.folder)
        self.network.load_adapter(state["adapter"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.step_number, self.tokens, self.seconds = state["step"], state["tokens"], state["seconds"]
        for group, base in zip(self.optimiser.param_groups, (self.settings.rate, self.settings.mask_rate), strict=True):
            group["base"] = base  # as the settings say now

    def _is_evaluated(self) -> bool:
        path = self.folder / "evaluation.csv"
        if not path.is_file():
            return False
        with path.open(encoding="utf-8", newline="") as file:
            return any(int(row["step"]) == self.step_number for row in csv.DictReader(file))

    def _log(self, name: str, row: Mapping[str, Any]) -> None:
        path = self.folder / name
        text = io.StringIO()
        writer = csv.DictWriter(text, row.keys())
        if not path.exists():
            writer.writeheader()
        writer.writerow(row)
        with path.open("a", newline="", encoding="utf-8") as file:
            file.write(text.getvalue())


def read_checkpoint(run: Path) -> dict[str, Any]:
    """What a run's last checkpoint holds.

    Raises
    ------
    CheckpointError
        If there is none, or it cannot be read.
    """
    path = run / "checkpoint.pt"
    try:
        return torch.load(path, weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; the run has made no checkpoint yet") from None
    except Exception as error:  # torch raises what its parts happen to raise
        raise CheckpointError(f"{path}: not a readable checkpoint ({error})") from None


def rewind(path: Path, step: int) -> None:
    """Drop the rows of a CSV file that are later than a step, and what a killed run wrote of a row."""
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


def _rounded_mean(values: np.ndarray) -> float | None:
    return round(float(values.mean()), 6) if len(values) else None
