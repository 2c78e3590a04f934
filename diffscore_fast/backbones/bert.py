"""The BERT family: post-layer-norm encoder, learned positions, token types, MLM head with tied weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from diffscore_fast.backbones.spec import BackboneSpec, PatternName, PatternSpec
from diffscore_fast.errors import CheckpointError
from diffscore_fast.ops import ResidualNorm, linear

# transformers' `BertForMaskedLM` may also save these copies of other tensors.
TIED_NAMES = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
DERIVED_NAMES = ("bert.embeddings.position_ids",)  # 0, 1, 2, ...


class BertLayer(nn.Module):
    """One encoder layer. Queries, keys and values share one weight, so that one product makes all three."""

    def __init__(self, hidden_size: int, intermediate_size: int, eps: float) -> None:
        super().__init__()
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.out = nn.Linear(hidden_size, hidden_size)
        self.attention_norm = nn.LayerNorm(hidden_size, eps=eps)
        self.up = nn.Linear(hidden_size, intermediate_size)
        self.down = nn.Linear(intermediate_size, hidden_size)
        self.output_norm = nn.LayerNorm(hidden_size, eps=eps)


class BertBackbone(nn.Module):
    """A BERT masked language model, split around attention as `Backbone` asks.

    Every method is differentiable, so the trainer runs the same network that the engine scores with.
    """

    def __init__(self, spec: BackboneSpec, *, intermediate_size: int, num_positions: int, num_types: int = 2,
                 layer_norm_eps: float = 1e-12) -> None:  # fmt: skip
        super().__init__()
        size = spec.hidden_size
        self.spec = spec
        self.words = nn.Embedding(spec.vocab_size, size)
        self.positions = nn.Embedding(num_positions, size)
        self.types = nn.Embedding(num_types, size)
        self.embedding_norm = nn.LayerNorm(size, eps=layer_norm_eps)
        self.layers = nn.ModuleList(BertLayer(size, intermediate_size, layer_norm_eps) for _ in range(spec.num_layers))
        self.transform = nn.Linear(size, size)
        self.transform_norm = nn.LayerNorm(size, eps=layer_norm_eps)
        self.output_bias = nn.Parameter(torch.zeros(spec.vocab_size))

    @property
    def device(self) -> torch.device:
        return self.output_bias.device

    @property
    def dtype(self) -> torch.dtype:
        return self.words.weight.dtype

    @property
    def vocabulary_weight(self) -> Tensor:
        return self.words.weight

    @property
    def vocabulary_bias(self) -> Tensor:
        return self.output_bias

    def embed(self, tokens: Tensor, positions: Tensor, types: Tensor) -> Tensor:
        return self.embedding_norm(self.words(tokens) + self.positions(positions) + self.types(types))

    def attention_inputs(
        self, layer: int, hidden: Tensor, positions: Tensor, query_rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        projection, size = self._layer(layer).qkv, self.spec.hidden_size
        if query_rows is None:
            projected = linear(hidden, projection.weight, projection.bias)
            query, key, value = self._heads(projected).split(self.spec.num_heads, dim=1)
            return query, key, value
        query = linear(hidden[query_rows], projection.weight[:size], projection.bias[:size])
        key, value = self.keys_values(layer, hidden, positions)
        return self._heads(query), key, value

    def keys_values(self, layer: int, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        projection, size = self._layer(layer).qkv, self.spec.hidden_size
        both = linear(hidden, projection.weight[size:], projection.bias[size:])
        key, value = self._heads(both).split(self.spec.num_heads, dim=1)
        return key, value

    def attention_outputs(self, layer: int, hidden: Tensor, attended: Tensor) -> Tensor:
        block = self._layer(layer)
        hidden = _residual(block.out, block.attention_norm, attended.flatten(1), hidden)
        return _residual(
            block.down, block.output_norm, linear(hidden, block.up.weight, block.up.bias, activation="gelu"), hidden
        )

    def head_transform(self, hidden: Tensor) -> Tensor:
        return self.transform_norm(linear(hidden, self.transform.weight, self.transform.bias, activation="gelu"))

    def _layer(self, index: int) -> BertLayer:
        layer = self.layers[index]
        assert isinstance(layer, BertLayer)
        return layer

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.view(projected.shape[0], -1, self.spec.head_dim)


def _residual(product: nn.Linear, norm: nn.LayerNorm, x: Tensor, residual: Tensor) -> Tensor:
    after = ResidualNorm(residual, norm.weight, norm.bias, norm.eps)
    return linear(x, product.weight, product.bias, residual_norm=after)


def build_bert(name: str, config: dict, patterns: dict[str, PatternSpec], default_pattern: PatternName,
               mask_id: int, start_id: int) -> BertBackbone:  # fmt: skip
    """An untrained network of the shape that `config` (transformers' BERT config.json) states."""
    if config.get("hidden_act", "gelu") != "gelu":
        raise CheckpointError(f"{name}: config.json has hidden_act {config['hidden_act']!r}; only 'gelu' is known")
    heads, size = config["num_attention_heads"], config["hidden_size"]
    spec = BackboneSpec(
        family="bert", name=name, num_layers=config["num_hidden_layers"], num_heads=heads, num_kv_heads=heads,
        head_dim=size // heads, hidden_size=size, vocab_size=config["vocab_size"], mask_id=mask_id, start_id=start_id,
        patterns=patterns, default_pattern=default_pattern,
    )  # fmt: skip
    return BertBackbone(
        spec, intermediate_size=config["intermediate_size"], num_positions=config["max_position_embeddings"],
        num_types=config["type_vocab_size"], layer_norm_eps=config["layer_norm_eps"],
    )  # fmt: skip


def load_state(backbone: BertBackbone, weights: dict[str, Tensor], where: str) -> None:
    """Fill a network from tensors in transformers' `BertForMaskedLM` layout, strictly: none missing, none left over."""
    for copy, original in TIED_NAMES.items():
        if copy in weights and original in weights and not torch.equal(weights[copy], weights[original]):
            raise CheckpointError(f"{where}: {copy} differs from {original}; only a tied output head can be loaded")
    weights = {name: item for name, item in weights.items() if name not in (*TIED_NAMES, *DERIVED_NAMES)}
    state: dict[str, Tensor] = {}
    missing: list[str] = []
    for ours, theirs in _names(backbone.spec.num_layers).items():
        parts = [weights.pop(name, None) for name in theirs]
        absent = [name for name, part in zip(theirs, parts, strict=True) if part is None]
        missing += absent
        if not absent:
            state[ours] = torch.cat([part.float() for part in parts if part is not None])
    if missing or weights:
        raise CheckpointError(
            f"{where}: tensors do not match a BERT masked language model of {backbone.spec.num_layers} layers; "
            f"missing {sorted(missing)[:4]}, unexpected {sorted(weights)[:4]}"
        )
    try:
        backbone.load_state_dict(state, strict=True)
    except RuntimeError as error:
        raise CheckpointError(f"{where}: tensor shapes do not match config.json: {error}") from None


def state_in_bert_layout(backbone: BertBackbone) -> dict[str, Tensor]:
    """The network's tensors under transformers' names: the inverse of `load_state`."""
    state = backbone.state_dict()
    stored: dict[str, Tensor] = {}
    for ours, theirs in _names(backbone.spec.num_layers).items():
        for name, part in zip(theirs, state[ours].chunk(len(theirs)), strict=True):
            stored[name] = part.detach().clone().contiguous()
    return stored


def _names(num_layers: int) -> dict[str, list[str]]:
    """Our parameter name to transformers' names; several are stacked along the rows."""
    names = {
        "words.weight": ["bert.embeddings.word_embeddings.weight"],
        "positions.weight": ["bert.embeddings.position_embeddings.weight"],
        "types.weight": ["bert.embeddings.token_type_embeddings.weight"],
        "output_bias": ["cls.predictions.bias"],
    }

    def pair(ours: str, *theirs: str) -> None:
        for kind in ("weight", "bias"):
            names[f"{ours}.{kind}"] = [f"{name}.{kind}" for name in theirs]

    pair("embedding_norm", "bert.embeddings.LayerNorm")
    pair("transform", "cls.predictions.transform.dense")
    pair("transform_norm", "cls.predictions.transform.LayerNorm")
    for index in range(num_layers):
        ours, theirs = f"layers.{index}", f"bert.encoder.layer.{index}"
        pair(f"{ours}.qkv", *(f"{theirs}.attention.self.{part}" for part in ("query", "key", "value")))
        pair(f"{ours}.out", f"{theirs}.attention.output.dense")
        pair(f"{ours}.attention_norm", f"{theirs}.attention.output.LayerNorm")
        pair(f"{ours}.up", f"{theirs}.intermediate.dense")
        pair(f"{ours}.down", f"{theirs}.output.dense")
        pair(f"{ours}.output_norm", f"{theirs}.output.LayerNorm")
    return names
