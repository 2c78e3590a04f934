"""The BERT family: post-layer-norm encoder, learned positions, token types, MLM head with tied weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from diffscore_fast.backbones.network import Network
from diffscore_fast.backbones.spec import BackboneSpec
from diffscore_fast.ops import ResidualNorm


class BertLayer(nn.Module):
    """One encoder layer. Queries, keys and values share one weight, so that one product computes all three."""

    def __init__(self, hidden_size: int, intermediate_size: int, eps: float) -> None:
        super().__init__()
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.out = nn.Linear(hidden_size, hidden_size)
        self.attention_norm = nn.LayerNorm(hidden_size, eps=eps)
        self.up = nn.Linear(hidden_size, intermediate_size)
        self.down = nn.Linear(intermediate_size, hidden_size)
        self.output_norm = nn.LayerNorm(hidden_size, eps=eps)


class BertBackbone(Network):
    """A BERT masked language model, split around attention as `SplitBackbone` asks.

    Every method is differentiable, so the trainer runs the same network that the engine scores with. ELECTRA's
    embeddings are narrower than its layers: they are projected up on the way in, and down in the head.
    """

    def __init__(
        self,
        spec: BackboneSpec,
        *,
        intermediate_size: int,
        num_positions: int,
        num_types: int = 2,
        layer_norm_eps: float = 1e-12,
        embedding_size: int | None = None,
    ) -> None:
        super().__init__()
        size = spec.hidden_size
        width = size if embedding_size is None else embedding_size
        self.spec = spec
        self.token_embedding = nn.Embedding(spec.vocab_size, width)
        self.position_embedding = nn.Embedding(num_positions, width)
        self.type_embedding = nn.Embedding(num_types, width)
        self.embedding_norm = nn.LayerNorm(width, eps=layer_norm_eps)
        self.projection = None if width == size else nn.Linear(width, size)
        self.layers = nn.ModuleList(BertLayer(size, intermediate_size, layer_norm_eps) for _ in range(spec.num_layers))
        self.transform = nn.Linear(size, width)
        self.transform_norm = nn.LayerNorm(width, eps=layer_norm_eps)
        self.output_bias = nn.Parameter(torch.zeros(spec.vocab_size))

    @property
    def vocabulary_weight(self) -> Tensor:
        return self.token_embedding.weight

    @property
    def vocabulary_bias(self) -> Tensor:
        return self.output_bias

    def embed(self, tokens: Tensor, positions: Tensor, types: Tensor) -> Tensor:
        summed = self.token_embedding(tokens) + self.position_embedding(positions) + self.type_embedding(types)
        hidden = self.embedding_norm(summed)
        if self.projection is None:
            return hidden
        return self._linear(hidden, self.projection.weight, self.projection.bias)

    def attention_inputs(
        self, layer: int, hidden: Tensor, positions: Tensor, query_rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        projection, size = self._layer(layer).qkv, self.spec.hidden_size
        if query_rows is None:
            projected = self._linear(hidden, projection.weight, projection.bias)
            query, key, value = self._heads(projected).split(self.spec.num_heads, dim=1)
            return query, key, value
        query = self._linear(hidden[query_rows], projection.weight[:size], projection.bias[:size])
        key, value = self.keys_values(layer, hidden, positions)
        return self._heads(query), key, value

    def keys_values(self, layer: int, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        projection, size = self._layer(layer).qkv, self.spec.hidden_size
        both = self._linear(hidden, projection.weight[size:], projection.bias[size:])
        key, value = self._heads(both).split(self.spec.num_heads, dim=1)
        return key, value

    def attention_outputs(self, layer: int, hidden: Tensor, attended: Tensor) -> Tensor:
        block = self._layer(layer)
        hidden = self._residual(block.out, block.attention_norm, attended.flatten(1), hidden)
        norm = block.output_norm
        after = ResidualNorm(hidden, norm.weight, norm.bias, norm.eps)
        return self._feed_forward(hidden, block.up, block.down, "gelu", after)

    def head_transform(self, hidden: Tensor) -> Tensor:
        return self.transform_norm(self._linear(hidden, self.transform.weight, self.transform.bias, activation="gelu"))

    def _residual(self, product: nn.Linear, norm: nn.LayerNorm, x: Tensor, residual: Tensor) -> Tensor:
        after = ResidualNorm(residual, norm.weight, norm.bias, norm.eps)
        return self._linear(x, product.weight, product.bias, residual_norm=after)

    def _layer(self, index: int) -> BertLayer:
        layer = self.layers[index]
        assert isinstance(layer, BertLayer)
        return layer
