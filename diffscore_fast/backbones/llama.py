"""Llama networks without their causal mask: RMS norms, rotary positions, SwiGLU, grouped key-value heads.

LLaDA (arXiv 2502.09992) and Dream (arXiv 2508.15487) are masked-diffusion models of this kind.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from diffscore_fast.backbones.network import Network
from diffscore_fast.backbones.spec import BackboneSpec


class LlamaLayer(nn.Module):
    """One layer. Queries, keys and values share one weight; the gate and the projection that it gates share another."""

    def __init__(self, spec: BackboneSpec, intermediate_size: int, eps: float, qkv_bias: bool) -> None:
        super().__init__()
        size, head_dim = spec.hidden_size, spec.head_dim
        self.attention_norm = nn.RMSNorm(size, eps=eps)
        self.qkv = nn.Linear(size, (spec.num_heads + 2 * spec.num_kv_heads) * head_dim, bias=qkv_bias)
        self.out = nn.Linear(spec.num_heads * head_dim, size, bias=False)
        self.feed_forward_norm = nn.RMSNorm(size, eps=eps)
        self.gate_up = nn.Linear(size, 2 * intermediate_size, bias=False)
        self.down = nn.Linear(intermediate_size, size, bias=False)


class LlamaBackbone(Network):
    """A masked-diffusion language model with Llama's layers, split around attention as `SplitBackbone` asks.

    Parameters
    ----------
    spec : BackboneSpec
    intermediate_size : int
        Hidden size of the feed-forward.
    eps : float
        Epsilon of the RMS norms.
    rotary_base : float
        Component j of a head of d components turns by position / rotary_base^(2j / d), with component j + d / 2.
    qkv_bias : bool
    tied_head : bool
        Whether the vocabulary projection is the embedding.
    """

    def __init__(
        self,
        spec: BackboneSpec,
        *,
        intermediate_size: int,
        eps: float,
        rotary_base: float,
        qkv_bias: bool = False,
        tied_head: bool = False,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.rotary_base = rotary_base
        self.token_embedding = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.layers = nn.ModuleList(LlamaLayer(spec, intermediate_size, eps, qkv_bias) for _ in range(spec.num_layers))
        self.norm = nn.RMSNorm(spec.hidden_size, eps=eps)
        self.head = None if tied_head else nn.Linear(spec.hidden_size, spec.vocab_size, bias=False)

    @property
    def vocabulary_weight(self) -> Tensor:
        return self.token_embedding.weight if self.head is None else self.head.weight

    @property
    def vocabulary_bias(self) -> Tensor | None:
        return None

    def embed(self, tokens: Tensor, positions: Tensor, types: Tensor) -> Tensor:
        return self.token_embedding(tokens)

    def attention_inputs(
        self, layer: int, hidden: Tensor, positions: Tensor, query_rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        block, spec = self._layer(layer), self.spec
        normed = block.attention_norm(hidden)
        if query_rows is None:
            query, key, value = self._heads(self._product(block.qkv, normed)).split(
                [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1
            )
            return self._turned(query, positions), self._turned(key, positions), value
        rows = spec.num_heads * spec.head_dim
        query = self._heads(self._product(block.qkv, normed[query_rows], slice(rows)))
        return self._turned(query, positions[query_rows]), *self._keys_values(block, normed, positions)

    def keys_values(self, layer: int, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        block = self._layer(layer)
        return self._keys_values(block, block.attention_norm(hidden), positions)

    def attention_outputs(self, layer: int, hidden: Tensor, attended: Tensor) -> Tensor:
        block = self._layer(layer)
        hidden = hidden + self._product(block.out, attended.flatten(1))
        return hidden + self._feed_forward(block.feed_forward_norm(hidden), block.gate_up, block.down, "swiglu")

    def head_transform(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden)

    def _keys_values(self, block: LlamaLayer, normed: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        rows = slice(self.spec.num_heads * self.spec.head_dim, None)
        key, value = self._heads(self._product(block.qkv, normed, rows)).split(self.spec.num_kv_heads, dim=1)
        return self._turned(key, positions), value

    def _product(self, layer: nn.Linear, x: Tensor, rows: slice = slice(None), **epilogue: Any) -> Tensor:
        """The product with those rows of the layer's weight."""
        bias = None if layer.bias is None else layer.bias[rows]
        return self._linear(x, layer.weight[rows], bias, **epilogue)

    def _turned(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Queries or keys [N, H, d] with their positions applied; computed in float32."""
        frequencies = rotary_frequencies(self.rotary_base, self.spec.head_dim, rows.device)
        angles = positions[:, None, None].float() * frequencies  # [N, 1, d / 2]
        cosine, sine = angles.cos(), angles.sin()
        first, second = rows.float().chunk(2, dim=-1)
        turned = torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
        return turned.to(rows.dtype)

    def _layer(self, index: int) -> LlamaLayer:
        layer = self.layers[index]
        assert isinstance(layer, LlamaLayer)
        return layer


@functools.lru_cache(maxsize=64)
def rotary_frequencies(base: float, head_dim: int, device: torch.device) -> Tensor:
    """Radians per position of the components of a head, float32 [head_dim / 2]."""
    # Computed on the host, so that every device turns by the same angles.
    return (1.0 / base ** (torch.arange(0, head_dim, 2, device="cpu").float() / head_dim)).to(device)
