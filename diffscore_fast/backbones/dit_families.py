"""Checkpoints of MDLM and BD3-LM: their config.json, their tensors' names, and adaLN folded into the weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from diffscore_fast.backbones.dit import WIDENING, DitBackbone
from diffscore_fast.backbones.spec import BackboneSpec, PatternSpec
from diffscore_fast.backbones.weights import StoredTensors
from diffscore_fast.errors import CheckpointError

# config.json's names of whole numbers.
WHOLE_NUMBERS = ("hidden_dim", "cond_dim", "n_blocks", "n_heads", "model_length", "vocab_size")
MAX_NUMBER, MAX_LAYERS = 1 << 30, 1_000
TOKENIZER = "openai-community/gpt2"  # the checkpoints hold no tokenizer of their own
START_TOKEN = "<|endoftext|>"
# Tensors that scores do not need: frequencies that are computed, and bounds of the noise in training.
UNUSED = ("rotary_emb.inv_freq", "sampling_eps_min", "sampling_eps_max")


@dataclass(frozen=True)
class DitFamily:
    """One kind of checkpoint: the classes that can be read, and whether it was trained in blocks."""

    architectures: tuple[str, ...]
    has_blocks: bool


DIT_FAMILIES = {
    "mdlm": DitFamily(architectures=("MDLM",), has_blocks=False),
    "bd3lm": DitFamily(architectures=("BD3LM",), has_blocks=True),
}


def build_dit(name: str, config: dict, start_id: int | None, where: str) -> DitBackbone:
    """A network without weights, of the shape that config.json states.

    The mask token is the last row of the vocabulary, and is never predicted. MDLM has `full`; BD3-LM has `block` with
    the block size of the file, on a grid that begins at the start token.

    Raises
    ------
    CheckpointError
        If the file lacks a number, or states something that cannot be folded or is not supported.
    """
    family = DIT_FAMILIES[config["model_type"]]
    if config.get("time_conditioning"):
        raise CheckpointError(
            f"{where}: time_conditioning = true: the network is conditioned on the noise level sigma, which a text "
            "with masks does not have; only checkpoints without it can be scored"
        )
    expected = {"adaln": True, "causal": False, "cross_attn": family.has_blocks}
    if other := [f"{item} = {config[item]!r}" for item, value in expected.items() if config.get(item, value) != value]:
        raise CheckpointError(f"{where}: {', '.join(other)}: not supported in models of type {config['model_type']!r}")
    numbers = (*WHOLE_NUMBERS, "block_size") if family.has_blocks else WHOLE_NUMBERS
    for item in numbers:
        value, limit = config.get(item), MAX_LAYERS if item == "n_blocks" else MAX_NUMBER
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= limit:
            raise CheckpointError(f"{where}: {item} must be a whole number above 0, at most {limit:,}, not {value!r}")
    size, heads, vocabulary = config["hidden_dim"], config["n_heads"], config["vocab_size"]
    if size % (2 * heads):
        raise CheckpointError(f"{where}: {size} dimensions and {heads} heads do not fit together")
    patterns = {"full": PatternSpec(config["model_length"])}
    if family.has_blocks:
        block = config["block_size"]
        patterns = {"block": PatternSpec(config["model_length"], block_sizes=(block,), default_block_size=block)}
    spec = BackboneSpec(
        family=config["model_type"],
        name=name,
        num_layers=config["n_blocks"],
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=size // heads,
        hidden_size=size,
        vocab_size=vocabulary,
        mask_id=mask_id(config),
        excluded_ids=(mask_id(config),),
        start_id=start_id,
        patterns=patterns,
        default_pattern="block" if family.has_blocks else "full",
    )
    with torch.device("meta"):  # no random numbers are drawn, and torch's default dtype has no effect
        return DitBackbone(spec).eval()


def mask_id(config: dict) -> int:
    """The token of a masked position: the row after the tokenizer's."""
    return int(config["vocab_size"]) - 1


def fill_dit(network: DitBackbone, config: dict, files: list[Path], device: torch.device, dtype: torch.dtype) -> None:
    """Fill a network from a checkpoint's files, one layer at a time, with adaLN folded in.

    Raises
    ------
    CheckpointError
        If a tensor is missing, left over, unreadable or of another shape.
    """
    stored = StoredTensors(files)
    expected = _shapes(config)
    missing = sorted(expected.keys() - stored.names)
    left = sorted(name for name in stored.names - expected.keys() if not name.endswith(UNUSED))
    if missing or left:
        raise CheckpointError(
            f"{files[0].parent}: tensors do not match a {network.spec.family} model of {network.spec.num_layers} "
            f"layers; missing {missing[:4]}, unexpected {left[:4]}"
        )

    def take(name: str) -> Tensor:
        tensor = stored.take(name)
        if list(tensor.shape) != expected[name]:
            raise CheckpointError(
                f"{files[0].parent}: tensor {name} is {list(tensor.shape)}, config.json wants {expected[name]}"
            )
        return tensor.double()

    state: dict[str, Tensor] = {}

    def place(prefix: str, tensors: dict[str, Tensor]) -> None:
        state.update({prefix + ours: item.to(device=device, dtype=dtype) for ours, item in tensors.items()})

    condition = constant_condition({name: take(name) for name in expected if ".sigma_map." in name})
    place("", {"token_embedding.weight": take("backbone.vocab_embed.embedding")})
    for index in range(network.spec.num_layers):
        prefix = f"backbone.blocks.{index}."
        layer = {name.removeprefix(prefix): take(name) for name in expected if name.startswith(prefix)}
        place(f"layers.{index}.", folded_layer(layer, condition))
    prefix = "backbone.output_layer."
    place(
        "",
        folded_head({name.removeprefix(prefix): take(name) for name in expected if name.startswith(prefix)}, condition),
    )
    network.load_state_dict(state, strict=True, assign=True)
    network.requires_grad_(False)


def constant_condition(sigma_map: dict[str, Tensor]) -> Tensor:
    """The condition [C] of every adaLN at noise level 0: silu of the two layers over the embedding of 0.

    That embedding is cosines of 0, then sines of 0.
    """
    first, second = (
        tuple(sigma_map[f"backbone.sigma_map.mlp.{place}.{kind}"] for kind in ("weight", "bias")) for place in (0, 2)
    )
    half = first[0].shape[1] // 2
    embedded = torch.zeros(first[0].shape[1], dtype=first[0].dtype)
    embedded[:half] = 1.0
    return functional.silu(functional.linear(functional.silu(functional.linear(embedded, *first)), *second))


def folded_layer(layer: dict[str, Tensor], condition: Tensor) -> dict[str, Tensor]:
    """A layer's tensors under our names, its six modulations multiplied into them.

    A norm's output w n is modulated to w n (1 + scale) + shift, which is a norm with weight w (1 + scale) and bias
    shift; a branch's output is multiplied by a gate, which is its last product with rows times the gate.
    """
    shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = _modulations(layer, condition, 6)
    return {
        "attention_norm.weight": layer["norm1.weight"] * (1 + scale),
        "attention_norm.bias": shift,
        "qkv.weight": layer["attn_qkv.weight"],
        "out.weight": layer["attn_out.weight"] * gate[:, None],
        "feed_forward_norm.weight": layer["norm2.weight"] * (1 + mlp_scale),
        "feed_forward_norm.bias": mlp_shift,
        "up.weight": layer["mlp.0.weight"],
        "up.bias": layer["mlp.0.bias"],
        "down.weight": layer["mlp.2.weight"] * mlp_gate[:, None],
        "down.bias": layer["mlp.2.bias"] * mlp_gate,
    }


def folded_head(head: dict[str, Tensor], condition: Tensor) -> dict[str, Tensor]:
    """The last norm and the vocabulary projection under our names, the norm's two modulations multiplied in."""
    shift, scale = _modulations(head, condition, 2)
    return {
        "norm.weight": head["norm_final.weight"] * (1 + scale),
        "norm.bias": shift,
        "head.weight": head["linear.weight"],
        "head.bias": head["linear.bias"],
    }


def _modulations(tensors: dict[str, Tensor], condition: Tensor, count: int) -> tuple[Tensor, ...]:
    weight, bias = tensors["adaLN_modulation.weight"], tensors["adaLN_modulation.bias"]
    return functional.linear(condition, weight, bias).chunk(count)


def _shapes(config: dict[str, Any]) -> dict[str, list[int]]:
    """Shape of every tensor that is read, by the checkpoint's name."""
    size, condition, vocabulary = config["hidden_dim"], config["cond_dim"], config["vocab_size"]
    inner, frequencies = WIDENING * size, 256
    found = {
        "vocab_embed.embedding": [vocabulary, size],
        "sigma_map.mlp.0.weight": [condition, frequencies],
        "sigma_map.mlp.0.bias": [condition],
        "sigma_map.mlp.2.weight": [condition, condition],
        "sigma_map.mlp.2.bias": [condition],
        "output_layer.norm_final.weight": [size],
        "output_layer.linear.weight": [vocabulary, size],
        "output_layer.linear.bias": [vocabulary],
        "output_layer.adaLN_modulation.weight": [2 * size, condition],
        "output_layer.adaLN_modulation.bias": [2 * size],
    }
    layer = {
        "norm1.weight": [size],
        "attn_qkv.weight": [3 * size, size],
        "attn_out.weight": [size, size],
        "norm2.weight": [size],
        "mlp.0.weight": [inner, size],
        "mlp.0.bias": [inner],
        "mlp.2.weight": [size, inner],
        "mlp.2.bias": [size],
        "adaLN_modulation.weight": [6 * size, condition],
        "adaLN_modulation.bias": [6 * size],
    }
    for index in range(config["n_blocks"]):
        found |= {f"blocks.{index}.{name}": shape for name, shape in layer.items()}
    return {f"backbone.{name}": shape for name, shape in found.items()}
