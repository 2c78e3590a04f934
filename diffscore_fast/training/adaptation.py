"""Adapting a causal language model to fill in masks after a causal prefix: low-rank adapters, resumable at any step.

A run's folder:

settings.json, log.csv, evaluation.csv    see `run`
base.json             the base's own left-to-right loss on the held-out pairs
checkpoint.pt         adapter, optimiser, step, tokens, seconds; replaced in one move, so that it is always complete

Step s draws its examples and masks from a generator seeded by (seed, s). There is no other random state, so a killed
run goes on from its last checkpoint with the numbers of an uninterrupted one.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diffscore_fast.backbones.llama import LlamaBackbone
from diffscore_fast.errors import CheckpointError, InputError
from diffscore_fast.text.tokenizer import TextTokenizer
from diffscore_fast.training.corpus import Corpus
from diffscore_fast.training.evaluation import RATIOS, Measured, measure
from diffscore_fast.training.examples import Example, ExampleSampler, Mixture
from diffscore_fast.training.lora import AdaptedLlama
from diffscore_fast.training.objective import lay_out, mask_by_ratio, masked_losses, sample_rows, stratified_ratios
from diffscore_fast.training.patterns import Layout, lay_left_to_right, pack_layouts
from diffscore_fast.training.run import TrainingRun, draw_up_to, update

HELD_OUT_PAIRS = Mixture(
    patterns={"prefix": 1.0},
    pairs={"body_to_lead": 0.35, "extract": 0.25, "continuation": 0.3, "marginal": 0.1},
    prefix_lengths=(40, 300),
    window_lengths=(16, 160),
    copies=1,
    long_share=0.0,
)
# More to copy from, and further back, than what is evaluated.
TRAINING_PAIRS = replace(
    HELD_OUT_PAIRS,
    pairs={"body_to_lead": 0.35, "extract": 0.35, "continuation": 0.2, "marginal": 0.1},
    prefix_lengths=(40, 400),
)
BLOCK_SIZES = (4, 8, 16, 32)
LEFT_TO_RIGHT = "left to right"


@dataclass(frozen=True)
class AdaptationSettings:
    """Everything that a run depends on, apart from its corpus and starting weights.

    Parameters
    ----------
    steps : int
        Steps in all.
    cooldown_steps : int, optional
        Rates fall linearly to zero over so many last steps; over all steps if not given.
    warmup_steps : int
        Rates rise linearly over the first ones.
    rate, mask_rate : float
        Learning rates of the adapters and of the mask embedding.
    clip : float
        Largest norm of the gradient.
    left_to_right : float
        Share of the examples that are read left to right, without masks, so that the network does not unlearn it.
    tokens_per_step, rows_per_step : int
        Tokens that a step reads, and about how many it predicts at most.
    dtype : str
        Of the products, "float32" or "bfloat16".
    rank, seed : int
    mixture : Mixture
        Pairs of prefix and window.
    checkpoint_steps, evaluation_steps, evaluation_pairs : int
        Steps between checkpoints, steps between evaluations, and held-out pairs of an evaluation.
    """

    steps: int
    cooldown_steps: int | None = None
    warmup_steps: int = 25
    rate: float = 4e-4
    mask_rate: float = 1e-3
    clip: float = 1.0
    left_to_right: float = 0.0
    tokens_per_step: int = 2048
    rows_per_step: int = 800
    dtype: str = "float32"
    rank: int = 64
    seed: int = 0
    mixture: Mixture = field(default_factory=lambda: TRAINING_PAIRS)
    checkpoint_steps: int = 20
    evaluation_steps: int = 100
    evaluation_pairs: int = 48

    def __post_init__(self) -> None:
        if self.steps < 1 or not 1 <= (self.cooldown_steps or 1) <= self.steps:
            raise InputError(f"a cooldown of {self.cooldown_steps} steps does not fit a run of {self.steps}")
        if not 0 <= self.left_to_right < 1:
            raise InputError(f"the share read left to right must be at least 0 and below 1, not {self.left_to_right}")

    def factor(self, step: int) -> float:
        """Factor of the rates at `step`, counted from 0."""
        cooldown = self.cooldown_steps or self.steps
        return min(1.0, (step + 1) / self.warmup_steps) * min(1.0, max(0.0, (self.steps - step) / cooldown))


class Adaptation(TrainingRun):
    """A run that adapts a network to masks.

    Parameters
    ----------
    base : LlamaBackbone
        The network; its weights do not change.
    tokenizer : TextTokenizer
    train, held_out : Corpus
        Articles to learn from, and articles that are only evaluated on.
    folder : Path
        The run's folder. Where it holds a checkpoint, the run goes on from there.
    settings : AdaptationSettings
    adapter : dict of str to Tensor, optional
        Adapter to start from, in a folder without a checkpoint.
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
        super().__init__(folder)
        self.network = AdaptedLlama(base, settings.rank, settings.seed, getattr(torch, settings.dtype))
        self.base, self.settings, self._adapter = base, settings, adapter
        self.sampler = ExampleSampler(train, settings.mixture)
        self.tokenizer = tokenizer
        self._held_out = held_out
        factors, mask = list(self.network.adapters.parameters()), [self.network.mask_embedding]
        groups = [{"params": factors, "base": settings.rate}, {"params": mask, "base": settings.mask_rate}]
        self.optimiser = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98), weight_decay=0.0)
        self.open_folder(settings)

    def run(self) -> None:
        """Go on to the last step, or until SIGTERM comes; either way checkpoint at the end."""
        self.measure_base()
        self.go_on(self.settings.steps)

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
        learnt = list(self.network.learnt().values())
        losses, norm = update(self.network, pack, chosen, self.optimiser, learnt, settings.clip)
        self.step_number += 1
        self.tokens += len(pack.tokens)
        values = losses.double().numpy()
        return {
            "step": self.step_number,
            "tokens": self.tokens,
            "gradient_norm": round(norm, 4),
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
        measured = adaptation_losses(self.network, self.tokenizer, self._held_out, self.settings.evaluation_pairs)
        losses = {item.setting: round(item.mean, 4) for item in measured}
        self.record_evaluation(losses)
        return losses

    def before_step(self) -> None:
        if self.step_number % self.settings.evaluation_steps == 0 and not self._is_evaluated():
            self.evaluate()

    def after_step(self, row: Mapping[str, Any]) -> None:
        if self.step_number % self.settings.checkpoint_steps == 0:
            self.save()
            self.print_progress(row)

    def finish(self) -> None:
        if not self._is_evaluated():
            self.evaluate()

    def measure_base(self) -> None:
        """Write base.json, once: what the left-to-right loss of evaluation.csv is to be compared with."""
        path = self.folder / "base.json"
        if not path.is_file():
            pairs = evaluation_pairs(self.tokenizer, self._held_out, self.settings.evaluation_pairs)
            loss = round(_left_to_right(self.base, pairs).mean, 4)
            path.write_text(json.dumps({LEFT_TO_RIGHT: loss}) + "\n", encoding="utf-8")

    def _draw(self, rng: np.random.Generator) -> list[Example]:
        """The step's examples, up to its tokens: start token, line break, prefix, and the copies of the window; in
        blocks, the clean window and all blocks, each with the row before it."""

        def cost(example: Example) -> int:
            size = len(example.window)
            copied = size + size // example.block_size if example.block_size else 0
            return 2 + len(example.prefix) + example.copies * (size + 1) + copied

        return draw_up_to(self.settings.tokens_per_step, lambda: respelled(self.tokenizer, self.sampler, rng), cost)

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

    def restore(self) -> None:
        if not (self.folder / "checkpoint.pt").is_file():
            if self._adapter is not None:
                self.network.load_adapter(self._adapter)
            return
        state = read_checkpoint(self.folder)
        self.network.load_adapter(state["adapter"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.step_number, self.tokens, self.seconds = state["step"], state["tokens"], state["seconds"]
        for group, base in zip(self.optimiser.param_groups, (self.settings.rate, self.settings.mask_rate), strict=True):
            group["base"] = base  # the settings may have changed

    def _is_evaluated(self) -> bool:
        path = self.folder / "evaluation.csv"
        if not path.is_file():
            return False
        with path.open(encoding="utf-8", newline="") as file:
            return any(int(row["step"]) == self.step_number for row in csv.DictReader(file))


def adaptation_losses(network: LlamaBackbone, tokenizer: TextTokenizer, held_out: Corpus, count: int) -> list[Measured]:
    """Losses on `count` fixed held-out pairs: whole windows by mask ratio, in blocks, and left to right.

    The settings are `prefix@r` for mask ratios r, `block b@0.5` for block sizes b, and `left to right`. Each value is
    the mean over the masked tokens of a pair; all pairs weigh the same.
    """
    pairs = evaluation_pairs(tokenizer, held_out, count)
    measured = []
    for size, ratio in [*((0, ratio) for ratio in RATIOS), *((size, 0.5) for size in BLOCK_SIZES)]:
        examples = [replace(pair, pattern="block", block_size=size) if size else pair for pair in pairs]
        masks = [
            mask_by_ratio(len(pair.window), ratio, np.random.default_rng([0, 4, number]))
            for number, pair in enumerate(pairs)
        ]
        name = f"block {size}@{ratio}" if size else f"prefix@{ratio}"
        measured.append(_per_pair(measure(name, network, examples, masks)[0]))
    return [*measured, _left_to_right(network, pairs)]


def evaluation_pairs(tokenizer: TextTokenizer, held_out: Corpus, count: int) -> list[Example]:
    """The first `count` of the fixed held-out pairs."""
    sampler = ExampleSampler(held_out, HELD_OUT_PAIRS)
    return [respelled(tokenizer, sampler, np.random.default_rng([0, 2, number])) for number in range(count)]


def _per_pair(measured: Measured) -> Measured:
    """The same with one mean per pair, which all weigh alike."""
    return Measured(measured.setting, measured.sums / measured.counts, np.ones_like(measured.counts))


@torch.no_grad()
def _left_to_right(network: LlamaBackbone, pairs: list[Example]) -> Measured:
    layouts = [lay_left_to_right(pair.prefix, pair.window, network.spec) for pair in pairs]
    means = [float(masked_losses(network, pack_layouts([item])).tokens.mean()) for item in layouts]
    return Measured(LEFT_TO_RIGHT, np.array(means), np.ones(len(means), dtype=np.int64))


def respelled(tokenizer: TextTokenizer, sampler: ExampleSampler, rng: np.random.Generator) -> Example:
    """A pair whose prefix and window are tokenised as separate texts, without white space around them."""
    while True:
        drawn = sampler.draw(rng)
        texts = [tokenizer.decode(part).strip("\ufffd \n\t") for part in (drawn.prefix, drawn.window)]
        prefix, window = (item.ids.astype(np.int64) for item in tokenizer.encode(texts))
        if len(window):
            return replace(drawn, prefix=prefix, window=window)


def block_shares(blocks: float) -> dict[int, float]:
    """A mixture's `window_blocks`: that share of the windows in blocks, each size of `BLOCK_SIZES` equally often."""
    shares = {0: 1 - blocks, **{size: blocks / len(BLOCK_SIZES) for size in BLOCK_SIZES}}
    return {size: share for size, share in shares.items() if share > 0}


def read_checkpoint(run: Path) -> dict[str, Any]:
    """The contents of a run's last checkpoint.

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
    except Exception as error:  # torch.load raises errors of many types
        raise CheckpointError(f"{path}: not a readable checkpoint ({error})") from None


def _rounded_mean(values: np.ndarray) -> float | None:
    return round(float(values.mean()), 6) if len(values) else None
