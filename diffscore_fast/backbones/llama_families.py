"""Checkpoints with Llama's layers that fill in masks: LLaDA, Dream, and Llama where it was trained to do so."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from diffscore_fast.backbones.llama import LlamaBackbone
from diffscore_fast.backbones.peft_adapter import PeftAdapter
from diffscore_fast.backbones.spec import BackboneSpec, PatternName, PatternSpec
from diffscore_fast.backbones.weights import StoredTensors
from diffscore_fast.errors import CheckpointError

# Fields of config.json that are whole numbers, under transformers' names.
WHOLE_NUMBERS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
    "mask_token_id",
)

# A larger field is a mistake, and building the network would take all memory.
MAX_NUMBER, MAX_LAYERS = 1 << 30, 1_000


@dataclass(frozen=True)
class LlamaFamily:
    """How one family writes its config.json and names its tensors.

    Parameters
    ----------
    architectures : tuple of str
        Classes whose checkpoints can be read.
    numbers : dict of str to tuple of str
        transformers' name of a field of config.json to the family's; of several, the first that is not null.
    fixed : dict
        Fields that must have this value: networks with another value are not supported.
    absent : tuple of str
        Fields that must be false, null or absent, for the same reason.
    token_embedding, norm, head, layers : str
        Names of tensors, and the prefix of the tensors of layer i before ".i.".
    layer : dict of str to tuple of str
        Our names of a layer's parts to the family's, whose tensors are stacked along the rows of ours.
    qkv_bias : str or bool
        Whether queries, keys and values have a bias: the field that states it, or the value for the whole family.
    tied_head : str
        The field that states whether the vocabulary projection is the token embedding.
    logit_shift : 0 or 1
        1 where the output at row i predicts token i + 1.
    tokenizer : str
        Class of transformers that reads the family's vocabulary where there is no tokenizer.json.
    states_patterns : bool
        True where config.json's section `diffscore_fast` states patterns and control tokens. A checkpoint without that
        section is a causal language model, and is refused. The mask token is outside the normaliser.
    head_norms : bool
        Whether queries and keys are normed head by head.
    mask_token : str
        Name of the mask token, where config.json does not state `mask_token_id`.
    block_size : int
        Tokens of a block, where neither config.json (`block_size`) nor the model's name (`-b8`) states them. 0: the
        family was not trained in blocks.
    full_unless : str
        The default pattern is `full` unless the model's name holds this word; "": the family has `block` alone.
    """

    architectures: tuple[str, ...]
    numbers: dict[str, tuple[str, ...]]
    fixed: dict[str, Any]
    absent: tuple[str, ...]
    token_embedding: str
    norm: str
    head: str
    layers: str
    layer: dict[str, tuple[str, ...]]
    qkv_bias: str | bool
    tied_head: str
    logit_shift: Literal[0, 1] = 0
    tokenizer: str = "AutoTokenizer"
    states_patterns: bool = False
    head_norms: bool = False
    mask_token: str = ""
    block_size: int = 0
    full_unless: str = ""


# transformers' names, which Llama and Dream use.
TRANSFORMERS_LAYER = {
    "attention_norm": ("input_layernorm",), "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",), "feed_forward_norm": ("post_attention_layernorm",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"), "down": ("mlp.down_proj",),
}  # fmt: skip

QWEN3_LAYER = {
    **TRANSFORMERS_LAYER, "query_norm": ("self_attn.q_norm",), "key_norm": ("self_attn.k_norm",),
}  # fmt: skip


def _transformers_family(architecture: str, layer: dict[str, tuple[str, ...]], **other: Any) -> LlamaFamily:
    """A family with transformers' names of fields and tensors."""
    return LlamaFamily(
        architectures=(architecture,),
        numbers={name: (name,) for name in (*WHOLE_NUMBERS, "rms_norm_eps", "rope_theta")},
        fixed={"hidden_act": "silu"},
        absent=("use_sliding_window", "attention_bias", "mlp_bias"),
        token_embedding="model.embed_tokens",
        norm="model.norm",
        head="lm_head",
        layers="model.layers",
        layer=layer,
        tied_head="tie_word_embeddings",
        **other,
    )


A2D = {"mask_token": "<|mask|>", "block_size": 32, "full_unless": "bd3lm"}
BLOCK_SIZES = (4, 8, 16, 32, 64)  # that models of one family are published with

LLAMA_FAMILIES = {
    "llada": LlamaFamily(
        architectures=("LLaDAModelLM",),
        numbers={"hidden_size": ("d_model",), "num_hidden_layers": ("n_layers",), "num_attention_heads": ("n_heads",),
                 "num_key_value_heads": ("n_kv_heads", "n_heads"), "intermediate_size": ("mlp_hidden_size",),
                 "vocab_size": ("embedding_size", "vocab_size"), "max_position_embeddings": ("max_sequence_length",),
                 "mask_token_id": ("mask_token_id",), "rms_norm_eps": ("rms_norm_eps",), "rope_theta": ("rope_theta",)},
        fixed={"block_type": "llama", "layer_norm_type": "rms", "activation_type": "silu", "rope": True},
        absent=("alibi", "include_bias", "attention_layer_norm", "input_emb_norm", "clip_qkv", "bias_for_layer_norm",
                "multi_query_attention"),
        token_embedding="model.transformer.wte", norm="model.transformer.ln_f", head="model.transformer.ff_out",
        layers="model.transformer.blocks",
        layer={"attention_norm": ("attn_norm",), "qkv": ("q_proj", "k_proj", "v_proj"), "out": ("attn_out",),
               "feed_forward_norm": ("ff_norm",), "gate_up": ("ff_proj", "up_proj"), "down": ("ff_out",)},
        qkv_bias="include_qkv_bias", tied_head="weight_tying",
    ),
    "Dream": LlamaFamily(
        architectures=("DreamModel",),
        numbers={name: (name,) for name in (*WHOLE_NUMBERS, "rms_norm_eps", "rope_theta")},
        fixed={"hidden_act": "silu"}, absent=("use_sliding_window",),
        token_embedding="model.embed_tokens", norm="model.norm", head="lm_head", layers="model.layers",
        layer=TRANSFORMERS_LAYER,
        qkv_bias=True, tied_head="tie_word_embeddings", logit_shift=1, tokenizer="Qwen2Tokenizer",
    ),
    "llama": LlamaFamily(
        architectures=("LlamaForCausalLM",),
        numbers={name: (name,) for name in (*WHOLE_NUMBERS, "rms_norm_eps", "rope_theta")},
        fixed={"hidden_act": "silu"}, absent=("attention_bias", "mlp_bias"),
        token_embedding="model.embed_tokens", norm="model.norm", head="lm_head", layers="model.layers",
        layer=TRANSFORMERS_LAYER,
        qkv_bias=False, tied_head="tie_word_embeddings", logit_shift=1, states_patterns=True,
    ),
    "sdar": _transformers_family("SDARForCausalLM", QWEN3_LAYER, qkv_bias=False, head_norms=True,
                                 mask_token="<|MASK|>", block_size=4),
    "a2d-qwen3": _transformers_family("A2DQwen3LMHeadModel", QWEN3_LAYER, qkv_bias=False, head_norms=True, **A2D),
    "a2d-qwen2": _transformers_family("A2DQwen2LMHeadModel", TRANSFORMERS_LAYER, qkv_bias=True, **A2D),
    "a2d-llama": _transformers_family("A2DLlamaLMHeadModel", TRANSFORMERS_LAYER, qkv_bias=False, **A2D),
}  # fmt: skip


def build_llama(
    name: str,
    config: dict,
    start_id: int | None,
    where: str,
    patterns: dict[str, PatternSpec] | None = None,
    default_pattern: PatternName = "full",
) -> LlamaBackbone:
    """A network without weights, of the shape that a family's config.json states.

    If no patterns are given, it has those of its family: `full`, which it was trained with, and `prefix` with the same
    positions; or `block`, on a grid that begins at the first token of the line.

    Raises
    ------
    CheckpointError
        If the file lacks a number, or states something that is not supported.
    """
    family = LLAMA_FAMILIES[config["model_type"]]
    other = [f"{item} = {config.get(item)!r}" for item, value in family.fixed.items() if config.get(item) != value]
    other += [f"{item} = {config[item]!r}" for item in family.absent if config.get(item)]
    if other:
        raise CheckpointError(f"{where}: {', '.join(other)}: not supported in models of type {config['model_type']!r}")
    found = _numbers({**config, **_rope_theta(config, where)}, family, where)
    size, heads, key_heads = (found[item] for item in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    head_dim = config.get("head_dim")
    if head_dim is not None and (isinstance(head_dim, bool) or not isinstance(head_dim, int) or head_dim < 1):
        raise CheckpointError(f"{where}: head_dim must be a whole number above 0, not {head_dim!r}")
    head_dim = head_dim or size / heads
    if head_dim % 2 or heads % key_heads or found["mask_token_id"] >= found["vocab_size"]:
        raise CheckpointError(
            f"{where}: {size} dimensions, {heads} heads, {key_heads} key-value heads, mask token "
            f"{found['mask_token_id']} of {found['vocab_size']} do not fit together"
        )
    stated, stated_default = _patterns(family, name, config, found["max_position_embeddings"], where)
    spec = BackboneSpec(
        family=config["model_type"],
        name=name,
        num_layers=found["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=key_heads,
        head_dim=int(head_dim),
        hidden_size=size,
        vocab_size=found["vocab_size"],
        mask_id=found["mask_token_id"],
        start_id=start_id,
        logit_shift=family.logit_shift,
        logit_scale=1 / math.sqrt(size) if config.get("scale_logits") else 1.0,
        patterns=patterns or stated,
        default_pattern=default_pattern if patterns else stated_default,
        excluded_ids=(found["mask_token_id"],) if family.states_patterns else (),
    )
    has_bias = family.qkv_bias if isinstance(family.qkv_bias, bool) else bool(config.get(family.qkv_bias))
    with torch.device("meta"):  # eight billion random numbers would take a minute
        return LlamaBackbone(
            spec,
            intermediate_size=found["intermediate_size"],
            eps=found["rms_norm_eps"],
            rotary_base=found["rope_theta"],
            qkv_bias=has_bias,
            head_norms=family.head_norms,
            tied_head=bool(config.get(family.tied_head)),
        ).eval()


def _patterns(
    family: LlamaFamily, name: str, config: dict, limit: int, where: str
) -> tuple[dict[str, PatternSpec], PatternName]:
    """The patterns that a family was trained with, and the default one."""
    pattern = PatternSpec(limit)
    if not family.block_size:
        return {"full": pattern, "prefix": pattern}, "full"
    named = re.search(r"-b(\d+)\b", name)
    size = config.get("block_size", int(named[1]) if named else family.block_size)
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise CheckpointError(f"{where}: block_size must be a whole number above 0, not {size!r}")
    sizes = (size,) if "block_size" in config else tuple(sorted({size, *BLOCK_SIZES}))
    block = PatternSpec(limit, block_sizes=sizes, default_block_size=size)
    if not family.full_unless:
        return {"block": block}, "block"
    return {"full": pattern, "block": block}, "block" if family.full_unless in name else "full"


def _rope_theta(config: dict, where: str) -> dict[str, Any]:
    """The base of rotary positions if `rope_parameters` or `rope_scaling` state it, otherwise nothing.

    transformers 5 writes `rope_parameters`: {"rope_type": "default", "rope_theta": 10000.0}.

    Raises
    ------
    CheckpointError
        If they ask for other rotary positions than the plain ones, or for another base than `rope_theta`.
    """
    found: dict[str, Any] = {}
    for field in ("rope_parameters", "rope_scaling"):
        stated = config.get(field)
        if stated is None:
            continue
        if not isinstance(stated, dict):
            raise CheckpointError(f"{where}: {field} must be an object or null, not {stated!r}")
        kinds = {str(stated[item]) for item in ("rope_type", "type") if stated.get(item) is not None}
        others = [
            item
            for item in stated
            if item not in ("rope_type", "type", "rope_theta")
            and not (item == "partial_rotary_factor" and stated[item] in (None, 1))
        ]
        if kinds - {"default"} or others:
            kind = ", ".join(sorted(kinds - {"default"})) or f"default with {', '.join(map(str, others))}"
            raise CheckpointError(
                f"{where}: {field} of type {kind}: only plain rotary positions (type default) are known here"
            )
        theta = stated.get("rope_theta")
        before = found.get("rope_theta", config.get("rope_theta"))
        if theta is not None and before is not None and theta != before:
            raise CheckpointError(f"{where}: {field} has rope_theta = {theta!r}, another place of the file {before!r}")
        if theta is not None:
            found["rope_theta"] = theta
    return found


def _numbers(config: dict, family: LlamaFamily, where: str) -> dict[str, Any]:
    """The family's fields under transformers' names, checked to be numbers above 0."""
    found: dict[str, Any] = {}
    for ours, theirs in family.numbers.items():
        value = next((config[item] for item in theirs if config.get(item) is not None), None)
        kinds = (int,) if ours in WHOLE_NUMBERS else (int, float)
        limit = MAX_LAYERS if ours == "num_hidden_layers" else MAX_NUMBER
        if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value <= limit:
            kind = "a whole number" if ours in WHOLE_NUMBERS else "a number"
            raise CheckpointError(f"{where}: {theirs[0]} must be {kind} above 0, at most {limit:,}, not {value!r}")
        found[ours] = value
    return found


def fill_llama(
    backbone: LlamaBackbone,
    files: list[Path],
    device: torch.device,
    dtype: torch.dtype,
    adapter: PeftAdapter | None = None,
) -> None:
    """Fill a network from its family's files, one tensor at a time, so that memory holds little more than the model.

    An adapter is merged into each tensor before it is cast.

    Raises
    ------
    CheckpointError
        If a tensor is missing, left over, unreadable or of another shape, or a tied head differs from the embedding.
    """
    stored = StoredTensors(files)
    expected = backbone.state_dict()
    _check_tied_head(backbone, stored, files[0].parent)
    state: dict[str, torch.Tensor] = {}
    missing: list[str] = []
    for ours, theirs in _names(backbone):
        absent = [name for name in theirs if name not in stored.names]
        missing += absent
        if absent:
            continue
        parts = [stored.take(name) for name in theirs]
        rows, others = _rows(backbone.spec, ours, expected[ours]), list(expected[ours].shape[1:])
        for name, part, count in zip(theirs, parts, rows, strict=True):
            if list(part.shape) != [count, *others]:
                raise CheckpointError(
                    f"{files[0].parent}: tensor {name} is {list(part.shape)}, config.json wants {[count, *others]}"
                )
        if adapter is not None:
            parts = [adapter.merged(name, part) for name, part in zip(theirs, parts, strict=True)]
        tensor = parts[0] if len(parts) == 1 else torch.cat([part.to(dtype) for part in parts])
        placed = tensor.to(device=device, dtype=dtype)
        # Copied: a mapped tensor would change with its file.
        state[ours] = placed.clone() if placed is parts[0] else placed
    left = [name for name in stored.names if not name.endswith("rotary_emb.inv_freq")]
    if missing or left:
        raise CheckpointError(
            f"{files[0].parent}: tensors do not match a {backbone.spec.family} model of {backbone.spec.num_layers} "
            f"layers; missing {sorted(missing)[:4]}, unexpected {sorted(left)[:4]}"
        )
    if adapter is not None:
        adapter.check_all_merged()
    backbone.load_state_dict(state, strict=True, assign=True)
    backbone.requires_grad_(False)


def _check_tied_head(backbone: LlamaBackbone, stored: StoredTensors, where: Path) -> None:
    """Refuse a head that is stored beside the embedding that it is tied to, and differs from it."""
    family = LLAMA_FAMILIES[backbone.spec.family]
    embedding, head = f"{family.token_embedding}.weight", f"{family.head}.weight"
    if backbone.head is not None or not {embedding, head} <= stored.names:
        return
    if not torch.equal(stored.take(head), stored.look(embedding)):
        raise CheckpointError(
            f"{where}: tensor {head} differs from {embedding}, but config.json has {family.tied_head} = true"
        )


def _rows(spec: BackboneSpec, ours: str, whole: torch.Tensor) -> list[int]:
    """Number of rows of each of the tensors that one of our parameters is stacked from."""
    if ".qkv." in ours:
        return [spec.num_heads * spec.head_dim, *[spec.num_kv_heads * spec.head_dim] * 2]
    return [len(whole) // 2] * 2 if ".gate_up." in ours else [len(whole)]


def _names(backbone: LlamaBackbone) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Our name of each parameter, and the family's names, whose tensors are stacked along the rows of ours."""
    family = LLAMA_FAMILIES[backbone.spec.family]
    for ours in backbone.state_dict():
        module, _, kind = ours.rpartition(".")
        top = {"token_embedding": family.token_embedding, "norm": family.norm, "head": family.head}.get(module)
        if top is not None:
            yield ours, (f"{top}.{kind}",)
        else:
            _, index, part = module.split(".")
            yield ours, tuple(f"{family.layers}.{index}.{name}.{kind}" for name in family.layer[part])
