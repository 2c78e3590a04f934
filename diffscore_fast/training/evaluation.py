"""Held-out losses of a network, per attention pattern and mask ratio or block size, from fixed examples and masks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from diffscore_fast.backbones.spec import SplitBackbone
from diffscore_fast.training.corpus import Corpus
from diffscore_fast.training.examples import Example, ExampleSampler, Mixture
from diffscore_fast.training.objective import lay_out, mask_blocks, mask_by_ratio, masked_losses
from diffscore_fast.training.patterns import Layout, pack_layouts

RATIOS = (0.15, 0.5, 0.85)
BLOCK_SIZES = (1, 4, 8, 16)
PREFIX_RATIO = 0.5  # at which right and wrong prefixes are compared
PAIR_KINDS = ("extract", "body_to_lead", "paragraph_to_paragraph", "continuation")
PACK_ROWS = 2048


@dataclass(frozen=True)
class Measured:
    """Losses of one setting, one value per sequence: `sums` float64 [S] nats over `counts` int64 [S] tokens.

    For `nelbo` settings the sums estimate minus log-likelihood of the whole text, and the counts are its tokens.
    """

    setting: str
    sums: np.ndarray
    counts: np.ndarray

    @property
    def mean(self) -> float:
        """Nats per token."""
        return float(self.sums.sum() / self.counts.sum())

    def interval(self, *, level: float = 0.95, resamples: int = 1000, seed: int = 0) -> tuple[float, float]:
        """Bootstrap interval of the mean, sequences resampled."""
        rows = np.random.default_rng(seed).integers(len(self.sums), size=(resamples, len(self.sums)))
        means = self.sums[rows].sum(axis=1) / self.counts[rows].sum(axis=1)
        low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
        return float(low), float(high)


def held_out_losses(backbone: SplitBackbone, held_out: Corpus, *, sequences: int, seed: int = 0) -> list[Measured]:
    """Losses of every setting on `sequences` fixed examples each.

    Settings: `full@r` and `prefix@r` for mask ratios r; `block@b` (mean over masked tokens, as trained) and
    `block@b nelbo` (the bound on a text's log-likelihood) for block sizes b, all on the same texts; `right prefix` and
    `wrong prefix`, the same windows and masks after their own and after another article's prefix, over all pair kinds.
    """
    sampler = ExampleSampler(held_out, Mixture(long_share=0.0, copies=1))
    runs = [sampler.draw_run(np.random.default_rng([seed, 1, i]), "full", 0, 128) for i in range(sequences)]
    pairs = [
        sampler.draw_pair(np.random.default_rng([seed, 2, i]), PAIR_KINDS[i % len(PAIR_KINDS)])
        for i in range(sequences)
    ]
    measured = []
    for pattern, examples in (("full", runs), ("prefix", pairs)):
        for ratio in RATIOS:
            masks = _ratio_masks(examples, ratio, seed)
            measured.append(measure(f"{pattern}@{ratio}", backbone, examples, masks)[0])
    for size in BLOCK_SIZES:
        blocks = [replace(run, pattern="block", block_size=size) for run in runs]
        masks = [mask_blocks(len(run.window), size, np.random.default_rng([seed, 3, i])) for i, run in enumerate(runs)]
        measured += measure(f"block@{size}", backbone, blocks, masks)
    masks = _ratio_masks(pairs, PREFIX_RATIO, seed)
    measured += measure("right prefix", backbone, pairs, masks)
    measured += measure("wrong prefix", backbone, with_wrong_prefixes(pairs), masks)
    return measured


def with_wrong_prefixes(pairs: Sequence[Example]) -> list[Example]:
    """The same windows, each after the prefix of the next pair of its kind (another article's, as a rule)."""
    step = len(PAIR_KINDS)
    assert len(pairs) > step, "with one pair of a kind, the next one is itself"
    return [replace(pair, prefix=pairs[(i + step) % len(pairs)].prefix) for i, pair in enumerate(pairs)]


@torch.no_grad()
def measure(
    setting: str, backbone: SplitBackbone, examples: Sequence[Example], masks: Sequence[np.ndarray]
) -> list[Measured]:
    """Losses of examples under given masks (bool over each window); for `block` examples, the bound as well.

    For the bound, every loss of a block with n tokens of which l are masked weighs n / l. As l is uniform in 1..n, the
    sum over the text is then an unbiased estimate of the negative evidence lower bound of the any-order model.
    """
    layouts = [lay_out(example, mask[None], backbone.spec) for example, mask in zip(examples, masks, strict=True)]
    losses = torch.cat([masked_losses(backbone, pack_layouts(group)).tokens for group in _groups(layouts)])
    values, counts = losses.double().numpy(), np.array([int(mask.sum()) for mask in masks])
    sequence = np.repeat(np.arange(len(masks)), counts)
    measured = [Measured(setting, np.bincount(sequence, values), counts)]
    if examples[0].pattern == "block" and not backbone.spec.logit_shift:
        weights = [_block_weights(mask, item.block_size) for mask, item in zip(masks, examples, strict=True)]
        bounds = np.bincount(sequence, values * np.concatenate(weights))
        measured.append(Measured(f"{setting} nelbo", bounds, np.array([len(mask) for mask in masks])))
    return measured


def difference_interval(
    one: Measured, other: Measured, *, level: float = 0.95, resamples: int = 1000, seed: int = 0
) -> tuple[float, float, float]:
    """Mean of `one` minus mean of `other` on the same sequences, with its bootstrap interval."""
    rows = np.random.default_rng(seed).integers(len(one.sums), size=(resamples, len(one.sums)))
    differences = (one.sums - other.sums)[rows].sum(axis=1) / one.counts[rows].sum(axis=1)
    low, high = np.quantile(differences, [(1 - level) / 2, (1 + level) / 2])
    return one.mean - other.mean, float(low), float(high)


def _ratio_masks(examples: Sequence[Example], ratio: float, seed: int) -> list[np.ndarray]:
    return [
        mask_by_ratio(len(example.window), ratio, np.random.default_rng([seed, 4, number]))
        for number, example in enumerate(examples)
    ]


def _block_weights(mask: np.ndarray, block_size: int) -> np.ndarray:
    """n / l of each masked token's block, in order of the tokens."""
    blocks = (np.arange(len(mask)) + 1) // block_size
    sizes, masked = np.bincount(blocks), np.bincount(blocks, weights=mask)
    return (sizes[blocks] / np.maximum(masked[blocks], 1))[mask]


def _groups(layouts: Sequence[Layout]) -> Iterator[list[Layout]]:
    """Consecutive layouts up to about `PACK_ROWS` rows."""
    group: list[Layout] = []
    rows = 0
    for layout in layouts:
        if group and rows + len(layout.tokens) > PACK_ROWS:
            yield group
            group, rows = [], 0
        group.append(layout)
        rows += len(layout.tokens)
    if group:
        yield group
