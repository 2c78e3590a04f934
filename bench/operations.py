"""Floating-point operations of the products that scoring needs, counted from what is evaluated.

A product of [n, k] and [k, m] is 2 n k m operations; an attended (query, key) pair is 4 times the width, for the dot
product and the weighted sum. Norms, activations and softmax are left out, on every side.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from diffscore_fast import DiffScorer
from diffscore_fast.backbones.bert import BertBackbone
from diffscore_fast.engine.packing import distinct_windows
from diffscore_fast.engine.plan import AttentionPattern, MaskPlan, Sequences
from diffscore_fast.engine.windows import Prefixes, Windows


@dataclass(frozen=True)
class BertShape:
    """What the count needs to know of a BERT."""

    layers: int
    width: int
    inner: int
    vocabulary: int

    @staticmethod
    def of(backbone: BertBackbone) -> BertShape:
        spec = backbone.spec
        inner = backbone.layers[0].up.out_features  # type: ignore[union-attr]
        return BertShape(spec.num_layers, spec.hidden_size, int(inner), spec.vocab_size)  # type: ignore[arg-type]

    @property
    def keys_values(self) -> int:
        """Per row of a layer."""
        return 4 * self.width**2

    @property
    def rest(self) -> int:
        """Per row of a layer beyond its keys and values: query, output, feed-forward."""
        return 4 * self.width**2 + 4 * self.width * self.inner

    @property
    def head(self) -> int:
        """Per row that meets the vocabulary."""
        return 2 * self.width**2 + 2 * self.width * self.vocabulary

    def passes(self, queries: np.ndarray, keys: np.ndarray, layers: int) -> np.ndarray:
        """Of whole layers, for that many rows that each see that many."""
        return layers * (queries * (self.keys_values + self.rest) + 4.0 * self.width * queries * keys)


def naive_operations(shape: BertShape, sources: np.ndarray, candidates: np.ndarray, draws: int) -> np.ndarray:
    """Operations float64 [n] of the published procedure for source and candidate lengths [n]: every draw a full pass,
    every row through every layer and the vocabulary."""
    rows = (1 + sources + candidates).astype(np.float64)
    return draws * (shape.passes(rows, rows, shape.layers) + rows * shape.head)


def prefix_operations(shape: BertShape, lengths: np.ndarray) -> float:
    """Operations of computing prefixes: whole layers, and the last one's keys and values."""
    rows = lengths.astype(np.float64)
    return float((shape.passes(rows, rows, shape.layers - 1) + rows * shape.keys_values).sum())


def window_operations(shape: BertShape, windows: Windows) -> tuple[float, int]:
    """Operations of the distinct windows that ask for something, and their number."""
    counts = np.diff(windows.wanted_offsets)
    first, _ = distinct_windows(windows)
    first = first[counts[first] > 0]
    rows, wanted = windows.lengths[first].astype(np.float64), counts[first].astype(np.float64)
    seen = rows + windows.visible[first]
    total = shape.passes(rows, seen, shape.layers - 1) + rows * shape.keys_values
    total += wanted * (shape.rest + shape.head) + 4.0 * shape.width * wanted * seen
    return float(total.sum()), len(first)


def torch_operations(call: Callable[[], object]) -> float:
    """Operations of the products that torch makes during a call; a causal attention counts as a whole one."""

    def attention(query: Any, key: Any, value: Any, *arguments: Any, **options: Any) -> int:
        return sdpa_flop_count(query, key, value)

    on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # torch has a formula for GPUs alone
    with FlopCounterMode(display=False, custom_mapping={on_cpu: attention}) as counter:
        call()
    return float(counter.get_total_flops())


@dataclass
class Work:
    """What a call to the scorer would evaluate.

    operations : of its products
    evaluations : distinct windows
    plans : sequences and masks of every portion and round
    """

    operations: float = 0.0
    evaluations: int = 0
    plans: list[tuple[Sequences, MaskPlan]] = field(default_factory=list)

    def masks(self) -> list[np.ndarray]:
        """Masks bool [K, L] of each target, in order, where every portion has one round over whole targets."""
        masks = []
        for sequences, plan in self.plans:
            spans = np.split(plan.masked, np.cumsum(plan.stop - plan.start)[:-1])
            owned = [np.flatnonzero(plan.sequence == index) for index in range(len(sequences.target_lengths))]
            masks += [np.stack([spans[at] for at in of_target]) for of_target in owned]
        return masks


def count_work(scorer: DiffScorer, call: Callable[[], object]) -> Work:
    """Plan what `call` asks of the scorer, without running the model: every log-probability is 0."""
    runner, work, seen = scorer._runner, Work(), set()
    shape, evaluate = BertShape.of(runner.backbone), runner.evaluate  # type: ignore[arg-type]

    def run(prefixes: Prefixes, windows: Windows, attention: AttentionPattern, progress: object = None) -> np.ndarray:
        new = [i for i, key in enumerate(prefixes.keys) if key not in seen]
        seen.update(prefixes.keys)
        of_windows, count = window_operations(shape, windows)
        work.operations += of_windows + prefix_operations(shape, prefixes.lengths[new])
        work.evaluations += count
        return np.zeros(len(windows.wanted), np.float32)

    def recorded(estimator: Any, sequences: Sequences, *arguments: Any) -> Any:
        def plan(observed: Any) -> MaskPlan | None:
            made = type(estimator).plan(estimator, observed)
            if made is not None:
                work.plans.append((sequences, made))
            return made

        with patch.object(estimator, "plan", plan):
            return evaluate(estimator, sequences, *arguments)

    with patch.object(runner, "run", run), patch.object(runner, "evaluate", recorded):
        call()
    return work
