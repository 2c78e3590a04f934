"""What networks with rotary positions share: their projections to heads, and the turning of queries and keys."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from diffscore_fast.backbones.network import Network
from diffscore_fast.backbones.spec import BackboneSpec


class RotaryBackbone(Network):
    """A pre-norm network with rotary positions, split around attention as `SplitBackbone` asks.

    A subclass makes `token_embedding`, `norm` (before the vocabulary) and `layers`, whose members have at least
    `attention_norm` and `qkv` (rows of all queries, then keys, then values), and may have `query_norm` and `key_norm`,
    norms of each head.

    Parameters
    ----------
    spec : BackboneSpec
    rotary_base : float
        Component j of a head of d components turns by position / rotary_base^(2j / d), with component j + d / 2.
    """

    layers: nn.ModuleList
    norm: nn.Module

    def __init__(self, spec: BackboneSpec, rotary_base: float) -> None:
        super().__init__()
        self.spec = spec
        self.rotary_base = rotary_base

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
            return (
                self._placed(query, block, "query_norm", positions),
                self._placed(key, block, "key_norm", positions),
                value,
            )
        rows = spec.num_heads * spec.head_dim
        query = self._heads(self._product(block.qkv, normed[query_rows], slice(rows)))
        query = self._placed(query, block, "query_norm", positions[query_rows])
        return query, *self._keys_values(block, normed, positions)

    def keys_values(self, layer: int, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        block = self._layer(layer)
        return self._keys_values(block, block.attention_norm(hidden), positions)

    def _layer(self, index: int) -> Any:
        return self.layers[index]

    def head_transform(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden)

    def _keys_values(self, block: Any, normed: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        rows = slice(self.spec.num_heads * self.spec.head_dim, None)
        key, value = self._heads(self._product(block.qkv, normed, rows)).split(self.spec.num_kv_heads, dim=1)
        return self._placed(key, block, "key_norm", positions), value

    def _placed(self, rows: Tensor, block: Any, norm: str, positions: Tensor) -> Tensor:
        """Queries or keys [N, H, d], normed head by head if the layer has that norm, with their positions applied."""
        head_norm = getattr(block, norm, None)
        return self._turned(rows if head_norm is None else head_norm(rows), positions)

    def _product(self, layer: nn.Linear, x: Tensor, rows: slice = slice(None), **epilogue: Any) -> Tensor:
        """The product with those rows of the layer's weight."""
        bias = None if layer.bias is None else layer.bias[rows]
        return self._linear(x, layer.weight[rows], bias, **epilogue)

    def _turned(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Queries or keys [N, H, d] with their positions applied; computed in float32 at least."""
        exact = torch.promote_types(rows.dtype, torch.float32)
        frequencies = rotary_frequencies(self.rotary_base, self.spec.head_dim, rows.device)
        angles = positions[:, None, None].float() * frequencies  # [N, 1, d / 2]
        cosine, sine = angles.cos(), angles.sin()
        first, second = rows.to(exact).chunk(2, dim=-1)
        turned = torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
        return turned.to(rows.dtype)


@functools.lru_cache(maxsize=64)
def rotary_frequencies(base: float, head_dim: int, device: torch.device) -> Tensor:
    """Radians per position of the components of a head, float32 [head_dim / 2]."""
    # Computed on the host, so that every device turns by the same angles.
    return (1.0 / base ** (torch.arange(0, head_dim, 2, device="cpu").float() / head_dim)).to(device)
