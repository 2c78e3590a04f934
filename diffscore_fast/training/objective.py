"""The masked-diffusion objective: which tokens are masked, and the loss at them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from diffscore_fast.backbones.spec import BackboneSpec, SplitBackbone
from diffscore_fast.training.examples import Example
from diffscore_fast.training.patterns import Layout, Pack, hidden_at, lay_block, lay_full, lay_prefix, lay_prefix_blocks


@dataclass(frozen=True)
class Losses:
    """Negative log-probabilities of masked tokens, nats: `tokens` [R], with the `sequence` [R] each belongs to."""

    tokens: Tensor
    sequence: Tensor
    num_sequences: int

    def per_sequence(self) -> Tensor:
        """Mean over the scored masked tokens of each sequence, [S]."""
        totals = torch.zeros(self.num_sequences).index_add(0, self.sequence, self.tokens)
        counts = torch.bincount(self.sequence, minlength=self.num_sequences)
        return totals / counts.clamp_min(1)


def stratified_ratios(count: int, rng: np.random.Generator) -> np.ndarray:
    """Mask ratios t_j = (j + u_j) / count, one in each of `count` equal parts of (0, 1), in random order. [count]"""
    return rng.permutation((np.arange(count) + rng.random(count)) / count)


def mask_by_ratio(length: int, ratio: float, rng: np.random.Generator) -> np.ndarray:
    """bool [length]: each token masked independently; where none would be, one uniformly chosen token is."""
    masked = rng.random(length) < ratio
    if not masked.any():
        masked[rng.integers(length)] = True
    return masked


def mask_blocks(length: int, block_size: int, rng: np.random.Generator) -> np.ndarray:
    """bool [length]: in each block of n tokens, a number of masked tokens uniform in 1..n, at uniform places.

    The start token takes place 0 of the first block, so window token i lies in block (i + 1) // block_size.
    """
    blocks = (np.arange(length) + 1) // block_size
    order = np.lexsort((rng.random(length), blocks))
    names, starts, sizes = np.unique(blocks, return_index=True, return_counts=True)
    counts = np.zeros(blocks[-1] + 1, dtype=np.int64)
    counts[names] = rng.integers(1, sizes + 1)
    rank = np.empty(length, dtype=np.int64)
    rank[order] = np.arange(length) - np.repeat(starts, sizes)
    return rank < counts[blocks]


def lay_out(example: Example, masks: np.ndarray, spec: BackboneSpec) -> Layout:
    """The example in its attention pattern; `masks` bool [C, W], with one copy for all patterns but `prefix`."""
    if example.pattern == "prefix":
        return lay_prefix(example.prefix, example.window, masks, spec)
    (masked,) = masks
    if example.pattern == "block" and spec.logit_shift:
        return lay_prefix_blocks(example.prefix, example.window, masked, example.block_size, spec)
    if example.pattern == "block":
        return lay_block(example.window, masked, example.block_size, spec)
    return lay_full(example.window, masked, spec)


def mask_examples(examples: Sequence[Example], spec: BackboneSpec, rng: np.random.Generator) -> list[Layout]:
    """Draw masks for a batch: ratios stratified over its `full` and `prefix` examples, counts within blocks."""
    by_ratio = sum(example.copies for example in examples if example.pattern != "block")
    ratios = iter(stratified_ratios(by_ratio, rng))
    layouts = []
    for example in examples:
        length = len(example.window)
        if example.pattern == "block":
            masks = [mask_blocks(length, example.block_size, rng)]
        else:
            masks = [mask_by_ratio(length, next(ratios), rng) for _ in range(example.copies)]
        layouts.append(lay_out(example, np.stack(masks), spec))
    return layouts


def sample_rows(pack: Pack, limit: int, rng: np.random.Generator) -> np.ndarray:
    """Which masked rows to score, as ascending indices into `pack.masked_rows`: at most about `limit`.

    The vocabulary projection costs a row as much as two layers, so only a sample of the rows passes it. Every sequence
    keeps the same share of its rows and at least one; a uniform sample leaves the mean over a sequence's masked rows
    unbiased.
    """
    sequence = pack.sequence.numpy()
    if len(sequence) <= limit:
        return np.arange(len(sequence))
    sizes = np.bincount(sequence, minlength=pack.num_sequences)
    keep = np.maximum(1, np.round(sizes * limit / len(sequence)))
    order = np.lexsort((rng.random(len(sequence)), sequence))
    rank = np.empty(len(sequence), dtype=np.int64)
    rank[order] = np.arange(len(sequence)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return np.flatnonzero(rank < keep[sequence])


def masked_losses(backbone: SplitBackbone, pack: Pack, chosen: np.ndarray | None = None) -> Losses:
    """Losses at the masked rows that `chosen` (ascending indices into them) names; at all of them if None."""
    index = slice(None) if chosen is None else torch.from_numpy(chosen)
    rows, targets = pack.masked_rows[index], pack.targets[index]
    logits = _logits(backbone, backbone.head_transform(hidden_at(backbone, pack, rows)))
    losses = functional.cross_entropy(logits, targets, reduction="none")
    return Losses(losses, pack.sequence[index], pack.num_sequences)


def _logits(backbone: SplitBackbone, hidden: Tensor) -> Tensor:
    """Vocabulary logits [R, V] in float32, with the options that the family's spec states."""
    spec = backbone.spec
    bias = backbone.vocabulary_bias
    weight = backbone.vocabulary_weight[: spec.vocab_size]
    logits = functional.linear(
        hidden.to(weight.dtype), weight, None if bias is None else bias[: spec.vocab_size]
    ).float()
    if spec.logit_scale != 1.0:
        logits = logits * spec.logit_scale
    if spec.soft_cap is not None:
        logits = spec.soft_cap * torch.tanh(logits / spec.soft_cap)
    if spec.excluded_ids:
        logits = logits.index_fill(1, torch.tensor(spec.excluded_ids), float("-inf"))
    return logits
