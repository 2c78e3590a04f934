"""Floating-point operations of the matmuls that scoring needs, counted from what is evaluated.

A matmul of [n, k] and [k, m] takes 2 n k m operations. An attended (query, key) pair takes 4 times the width, for the
dot product and the weighted sum. Norms, activations and softmax are not counted, for any method.
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
from diffscore_fast.backbones.bert import BertBackbone, BertLayer
from diffscore_fast.engine.packing import distinct_windows
from diffscore_fast.engine.plan import AttentionPattern, MaskPlan, Sequences
from diffscore_fast.engine.windows import Prefixes, Windows


@dataclass(frozen=True)
class BertShape:
    """The sizes of a BERT that the count needs."""

    layers: int
    width: int
    inner: int
    vocabulary: int

    @staticmethod
    def of(backbone: BertBackbone) -> BertShape:
        spec, layer = backbone.spec, backbone.layers[0]
        assert isinstance(layer, BertLayer)
        return BertShape(spec.num_layers, spec.hidden_size, layer.up.out_features, spec.vocab_size)

    @property
    def keys_values(self) -> int:
        """Operations of the key and value projections, per row and layer."""
        return 4 * self.width**2

    @property
    def rest(self) -> int:
        """Operations of the other projections (query, output, feed-forward), per row and layer."""
        return 4 * self.width**2 + 4 * self.width * self.inner

    @property
    def head(self) -> int:
        """Operations of the head and the vocabulary projection, per row that is projected."""
        return 2 * self.width**2 + 2 * self.width * self.vocabulary

    def passes(self, queries: np.ndarray, keys: np.ndarray, layers: int) -> np.ndarray:
        """Operations of `layers` whole layers, for sequences of `queries` rows that each attend to `keys` rows."""
        return layers * (queries * (self.keys_values + self.rest) + 4.0 * self.width * queries * keys)


def bert_of(scorer: DiffScorer) -> BertBackbone:
    """The network of a scorer whose model is a BERT."""
    assert isinstance(scorer.backbone, BertBackbone)
    return scorer.backbone


def naive_operations(
    shape: BertShape, sources: np.ndarray, candidates: np.ndarray, draws: int | np.ndarray
) -> np.ndarray:
    """Operations float64 [n] of the published procedure for source and candidate lengths [n].

    Every draw (`draws`: one number, or int [n]) is a full pass: every row goes through every layer and the vocabulary.
    """
    rows = (1 + sources + candidates).astype(np.float64)
    return draws * (shape.passes(rows, rows, shape.layers) + rows * shape.head)


def prefix_operations(shape: BertShape, lengths: np.ndarray) -> float:
    """Operations of computing prefixes: all layers but the last, and the last layer's keys and values."""
    rows = lengths.astype(np.float64)
    return float((shape.passes(rows, rows, shape.layers - 1) + rows * shape.keys_values).sum())


def window_operations(shape: BertShape, windows: Windows) -> tuple[float, int]:
    """Operations of the distinct windows that have wanted rows, and the number of these windows."""
    counts = np.diff(windows.wanted_offsets)
    first, _ = distinct_windows(windows)
    first = first[counts[first] > 0]
    rows, wanted = windows.lengths[first].astype(np.float64), counts[first].astype(np.float64)
    seen = rows + windows.visible[first]
    total = shape.passes(rows, seen, shape.layers - 1) + rows * shape.keys_values
    total += wanted * (shape.rest + shape.head) + 4.0 * shape.width * wanted * seen
    return float(total.sum()), len(first)


def torch_operations(call: Callable[[], object]) -> float:
    """Operations of the matmuls that torch makes during a call; causal attention counts like full attention."""

    def attention(query: Any, key: Any, value: Any, *arguments: Any, **options: Any) -> int:
        return sdpa_flop_count(query, key, value)

    on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # torch's own formula is for GPUs only
    with FlopCounterMode(display=False, custom_mapping={on_cpu: attention}) as counter:
        call()
    return float(counter.get_total_flops())


@dataclass
class Work:
    """What a call to the scorer would evaluate.

    operations : floating-point operations of its matmuls
    evaluations : number of distinct windows
    plans : sequences and masks of every chunk and round
    """

    operations: float = 0.0
    evaluations: int = 0
    plans: list[tuple[Sequences, MaskPlan]] = field(default_factory=list)

    def masks(self) -> list[np.ndarray]:
        """Masks bool [K, L] of each target, in order. Every chunk must have one round over whole targets."""
        masks = []
        for sequences, plan in self.plans:
            spans = np.split(plan.masked, np.cumsum(plan.stop - plan.start)[:-1])
            owned = [np.flatnonzero(plan.sequence == index) for index in range(len(sequences.target_lengths))]
            masks += [np.stack([spans[at] for at in of_target]) for of_target in owned]
        return masks


def count_work(scorer: DiffScorer, call: Callable[[], object]) -> Work:
    """Count what `call` asks of the scorer. The model does not run: every log-probability is 0."""
    runner, work = scorer.runner, Work()
    shape, evaluate, seen = BertShape.of(bert_of(scorer)), runner.evaluate, set[bytes]()

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
