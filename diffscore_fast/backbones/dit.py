"""Diffusion transformers (DiT) that fill in masks: MDLM (arXiv 2406.07524) and BD3-LM (arXiv 2503.09573).

Their layers are conditioned on the noise level by adaLN. The published checkpoints set that level to 0, so that the
condition is one constant vector; `dit_families` folds it into the weights, and what is left is this plain network.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from diffscore_fast.backbones.rotary import RotaryBackbone
from diffscore_fast.backbones.spec import BackboneSpec

NORM_EPS = 1e-5
ROTARY_BASE = 10000.0
WIDENING = 4  # of the feed-forward


class DitLayer(nn.Module):
    """One layer after folding: pre-norm attention and feed-forward, with layer norms that have a bias."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(size, eps=NORM_EPS)
        self.qkv = nn.Linear(size, 3 * size, bias=False)
        self.out = nn.Linear(size, size, bias=False)
        self.feed_forward_norm = nn.LayerNorm(size, eps=NORM_EPS)
        self.up = nn.Linear(size, WIDENING * size)
        self.down = nn.Linear(WIDENING * size, size)


class DitBackbone(RotaryBackbone):
    """A diffusion transformer at noise level 0, split around attention as `SplitBackbone` asks."""

    def __init__(self, spec: BackboneSpec) -> None:
        super().__init__(spec, ROTARY_BASE)
        size = spec.hidden_size
        self.token_embedding = nn.Embedding(spec.vocab_size, size)
        self.layers = nn.ModuleList(DitLayer(size) for _ in range(spec.num_layers))
        self.norm = nn.LayerNorm(size, eps=NORM_EPS)
        self.head = nn.Linear(size, spec.vocab_size)

    @property
    def vocabulary_weight(self) -> Tensor:
        return self.head.weight

    @property
    def vocabulary_bias(self) -> Tensor | None:
        return self.head.bias

    def attention_outputs(self, layer: int, hidden: Tensor, attended: Tensor) -> Tensor:
        block = self._layer(layer)
        hidden = hidden + self._product(block.out, attended.flatten(1))
        inner = tanh_gelu(self._product(block.up, block.feed_forward_norm(hidden)))
        return hidden + self._product(block.down, inner)


def tanh_gelu(x: Tensor) -> Tensor:
    """GELU by its approximation with tanh, elementwise; 16-bit numbers are computed in float32.

    It is spelled out because torch's own, on a CPU, rounds an element differently by its place in the tensor, and a
    row's bits must not depend on its batch.
    """
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    inner = math.sqrt(2 / math.pi) * (exact + 0.044715 * (exact * exact * exact))
    return (0.5 * exact * (1.0 + torch.tanh(inner))).to(x.dtype)
