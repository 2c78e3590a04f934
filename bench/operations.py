"""Floating-point operations of the products that scoring needs, counted from what is evaluated.

A product of [n, k] and [k, m] is 2 n k m operations; an attended (query, key) pair is 4 times the width, for the dot
product and the weighted sum. Norms, activations and softmax are left out, on every side.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from diffscore_fast.backbones.bert import BertBackbone
from diffscore_fast.engine.packing import distinct_windows
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


def naive_operations(shape: BertShape, sources: np.ndarray, candidates: np.ndarray, draws: int) -> np.ndarray:
    """Operations float64 [n] of the published procedure for source and candidate lengths [n]: every draw a full pass,
    every row through every layer and the vocabulary."""
    rows = (1 + sources + candidates).astype(np.float64)
    layer = rows * (shape.keys_values + shape.rest) + 4 * shape.width * rows**2
    return draws * (shape.layers * layer + rows * shape.head)


def engine_operations(shape: BertShape, prefixes: Prefixes, windows: Windows) -> tuple[float, int]:
    """Operations of what the engine evaluates of these windows, every prefix once, and the number of windows."""
    prefix = prefixes.lengths.astype(np.float64)
    last, width = shape.layers - 1, 4 * shape.width
    total = (last * (prefix * (shape.keys_values + shape.rest) + width * prefix**2) + prefix * shape.keys_values).sum()
    counts = np.diff(windows.wanted_offsets)
    first, _ = distinct_windows(windows)
    first = first[counts[first] > 0]
    rows, wanted = windows.lengths[first].astype(np.float64), counts[first].astype(np.float64)
    seen = rows + windows.visible[first]
    total += (last * (rows * (shape.keys_values + shape.rest) + width * rows * seen)).sum()
    total += (rows * shape.keys_values + wanted * (shape.rest + shape.head) + width * wanted * seen).sum()
    return float(total), len(first)
