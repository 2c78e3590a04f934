"""Checkpoints whose layers are BERT's: BERT, DistilBERT, RoBERTa, ELECTRA generators, in transformers' layouts."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from diffscore_fast.backbones.bert import BertBackbone
from diffscore_fast.backbones.spec import BackboneSpec, PatternName, PatternSpec
from diffscore_fast.errors import CheckpointError

# Our names of a layer's parts, and BERT's. Several of theirs are stacked along the rows of one of ours.
BERT_LAYER = {
    "qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
    "out": ("attention.output.dense",), "attention_norm": ("attention.output.LayerNorm",),
    "up": ("intermediate.dense",), "down": ("output.dense",), "output_norm": ("output.LayerNorm",),
}  # fmt: skip


@dataclass(frozen=True)
class BertFamily:
    """How one family writes its config.json and names its tensors.

    Parameters
    ----------
    base : str
        Prefix of the names of the body's tensors.
    architectures : tuple of str
        Classes of transformers whose checkpoints have the body and the masked-LM head.
    transform, transform_norm, output_bias : str
        Names of the head's tensors.
    copies : dict of str to str
        Second name of a tied tensor to its first name; a checkpoint may hold it under both or under either one.
    unused : tuple of str
        Prefixes of the names of heads that predict no masked token.
    layers, layer : str and dict
        Prefix of the layers' tensors, and the names of a layer's parts.
    config_names : dict of str to str
        BERT's name of a field of config.json to the family's, where they differ.
    config_constants : dict
        Fields that the family's config.json does not state, under BERT's names.
    positions_after_padding : bool
        True where the position table begins with rows, up to the padding id's, that no text uses.
    has_token_types : bool
        False where the checkpoint has no embedding of token types; zeros are then added.
    """

    base: str
    architectures: tuple[str, ...]
    transform: str
    transform_norm: str
    output_bias: str
    copies: dict[str, str]
    unused: tuple[str, ...] = ()
    layers: str = "encoder.layer"
    layer: dict[str, tuple[str, ...]] = field(default_factory=lambda: BERT_LAYER)
    config_names: dict[str, str] = field(default_factory=dict)
    config_constants: dict[str, float] = field(default_factory=dict)
    positions_after_padding: bool = False
    has_token_types: bool = True


BERT_FAMILIES = {
    "bert": BertFamily(
        "bert", ("BertForMaskedLM", "BertForPreTraining"), "cls.predictions.transform.dense",
        "cls.predictions.transform.LayerNorm", "cls.predictions.bias",
        {"cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
         "cls.predictions.decoder.bias": "cls.predictions.bias"},
        ("bert.pooler.", "cls.seq_relationship."),
    ),
    "distilbert": BertFamily(
        "distilbert", ("DistilBertForMaskedLM",), "vocab_transform", "vocab_layer_norm", "vocab_projector.bias",
        {"vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight"},
        layers="transformer.layer",
        layer={"qkv": ("attention.q_lin", "attention.k_lin", "attention.v_lin"), "out": ("attention.out_lin",),
               "attention_norm": ("sa_layer_norm",), "up": ("ffn.lin1",), "down": ("ffn.lin2",),
               "output_norm": ("output_layer_norm",)},
        config_names={"hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
                      "intermediate_size": "hidden_dim", "hidden_act": "activation"},
        config_constants={"type_vocab_size": 1, "layer_norm_eps": 1e-12}, has_token_types=False,
    ),
    "roberta": BertFamily(
        "roberta", ("RobertaForMaskedLM",), "lm_head.dense", "lm_head.layer_norm", "lm_head.bias",
        {"lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
         "lm_head.decoder.bias": "lm_head.bias"},
        ("roberta.pooler.",), positions_after_padding=True,
    ),
    "electra": BertFamily(
        "electra", ("ElectraForMaskedLM",), "generator_predictions.dense", "generator_predictions.LayerNorm",
        "generator_lm_head.bias", {"generator_lm_head.weight": "electra.embeddings.word_embeddings.weight"},
    ),
}  # fmt: skip
REQUIRED = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
    "type_vocab_size",
    "layer_norm_eps",
)


def bert_config(config: dict, where: str) -> dict:
    """A family's config.json under BERT's names, with its numbers checked.

    `max_position_embeddings` becomes the number of positions that a text can use.

    Raises
    ------
    CheckpointError
        If a number is missing or unusable, or the activation is not GELU.
    """
    family = BERT_FAMILIES[config["model_type"]]
    named = {**config, **family.config_constants}
    named |= {ours: config.get(theirs) for ours, theirs in family.config_names.items()}
    missing = [name for name in REQUIRED if not isinstance(named.get(name), int | float)]
    if missing:
        raise CheckpointError(f"{where}: needs the numbers {', '.join(family.config_names.get(n, n) for n in missing)}")
    whole = [name for name in REQUIRED if name != "layer_norm_eps"]
    odd = [name for name in whole if not isinstance(named[name], int) or named[name] < 1]
    if odd or named["hidden_size"] % named["num_attention_heads"]:
        raise CheckpointError(
            f"{where}: {', '.join(odd) or 'hidden_size'} must be positive whole numbers, and the "
            "hidden size a multiple of the number of heads"
        )
    if named.get("hidden_act", "gelu") != "gelu":
        raise CheckpointError(f"{where}: has hidden_act {named['hidden_act']!r}; only 'gelu' is known")
    if family.positions_after_padding:
        named["max_position_embeddings"] -= (named.get("pad_token_id") or 0) + 1 if "pad_token_id" in named else 2
    return named


def build_bert(
    name: str,
    config: dict,
    patterns: dict[str, PatternSpec],
    default_pattern: PatternName,
    mask_id: int,
    start_id: int | None,
) -> BertBackbone:
    """An untrained network of the shape that `config` states under BERT's names (see `bert_config`)."""
    heads, size = config["num_attention_heads"], config["hidden_size"]
    spec = BackboneSpec(
        family=config["model_type"],
        name=name,
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=size // heads,
        hidden_size=size,
        vocab_size=config["vocab_size"],
        mask_id=mask_id,
        start_id=start_id,
        patterns=patterns,
        default_pattern=default_pattern,
    )
    return BertBackbone(
        spec,
        intermediate_size=config["intermediate_size"],
        num_positions=config["max_position_embeddings"],
        num_types=config["type_vocab_size"],
        layer_norm_eps=config["layer_norm_eps"],
        embedding_size=config.get("embedding_size"),
    )


def fill_bert(backbone: BertBackbone, weights: dict[str, Tensor], where: str, *, tied: bool = True) -> None:
    """Fill a network, which may be on the meta device, from tensors under its family's names. It becomes float32.

    `tied` is false where config.json states that the output head is not the token embedding. Such a head must then be
    stored, and must equal the embedding: other heads cannot be loaded.

    Raises
    ------
    CheckpointError
        If a tensor is missing, left over or of another shape, or the head differs from the embedding.
    """
    family = BERT_FAMILIES[backbone.spec.family]
    weights = {
        _modern_name(name): item
        for name, item in weights.items()
        if name != f"{family.base}.embeddings.position_ids" and not name.startswith(family.unused)
    }
    for copy, original in family.copies.items():
        if not tied and copy.endswith(".weight") and not {copy, original} <= set(weights):
            lacking = original if copy in weights else copy
            raise CheckpointError(
                f"{where}: tensor {lacking} is missing, and config.json has tie_word_embeddings = false; a separate "
                "output head was never trained or not stored"
            )
        if copy in weights and not torch.equal(weights[copy], weights.setdefault(original, weights[copy])):
            raise CheckpointError(f"{where}: {copy} differs from {original}; only a tied output head can be loaded")
        weights.pop(copy, None)
    positions = f"{family.base}.embeddings.position_embeddings.weight"
    if family.positions_after_padding and positions in weights:
        weights[positions] = weights[positions][-backbone.position_embedding.num_embeddings :]
    state: dict[str, Tensor] = {}
    missing: list[str] = []
    for ours, theirs in _names(backbone).items():
        parts = [weights.pop(name, None) for name in theirs]
        absent = [name for name, part in zip(theirs, parts, strict=True) if part is None]
        missing += absent
        if not absent:
            state[ours] = torch.cat([part.float() for part in parts if part is not None])
    if missing or weights:
        raise CheckpointError(
            f"{where}: tensors do not match a {backbone.spec.family} masked language model of "
            f"{backbone.spec.num_layers} layers; missing {sorted(missing)[:4]}, unexpected {sorted(weights)[:4]}"
        )
    if not family.has_token_types:
        shape = backbone.type_embedding.weight.shape
        state["type_embedding.weight"] = torch.zeros(shape, dtype=torch.float32, device="cpu")
    try:
        backbone.load_state_dict(state, strict=True, assign=True)
    except RuntimeError as error:
        raise CheckpointError(f"{where}: tensor shapes do not match config.json: {error}") from None


def state_in_bert_layout(backbone: BertBackbone) -> dict[str, Tensor]:
    """A BERT network's tensors under transformers' names: the inverse of `fill_bert`."""
    state = backbone.state_dict()
    stored: dict[str, Tensor] = {}
    for ours, theirs in _names(backbone).items():
        for name, part in zip(theirs, state[ours].chunk(len(theirs)), strict=True):
            stored[name] = part.detach().clone().contiguous()
    return stored


def _names(backbone: BertBackbone) -> dict[str, list[str]]:
    """Our name of each parameter to the family's names, whose tensors are stacked along the rows of ours."""
    family = BERT_FAMILIES[backbone.spec.family]
    embeddings = f"{family.base}.embeddings"
    names = {
        "token_embedding.weight": [f"{embeddings}.word_embeddings.weight"],
        "position_embedding.weight": [f"{embeddings}.position_embeddings.weight"],
        "output_bias": [family.output_bias],
    }
    if family.has_token_types:
        names["type_embedding.weight"] = [f"{embeddings}.token_type_embeddings.weight"]

    def pair(ours: str, *theirs: str) -> None:
        for kind in ("weight", "bias"):
            names[f"{ours}.{kind}"] = [f"{name}.{kind}" for name in theirs]

    pair("embedding_norm", f"{embeddings}.LayerNorm")
    pair("transform", family.transform)
    pair("transform_norm", family.transform_norm)
    if backbone.projection is not None:
        pair("projection", f"{family.base}.embeddings_project")
    for index in range(backbone.spec.num_layers):
        for ours, theirs in family.layer.items():
            pair(f"layers.{index}.{ours}", *(f"{family.base}.{family.layers}.{index}.{part}" for part in theirs))
    return names


def _modern_name(name: str) -> str:
    """Checkpoints converted from TensorFlow call a norm's weight and bias gamma and beta."""
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
