"""A model folder (config.json, model.safetensors, tokenizer.json) to a backbone and its tokenizer."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch

from diffscore_fast.backbones.bert import BertBackbone, build_bert, load_state
from diffscore_fast.backbones.spec import PatternName, PatternSpec
from diffscore_fast.backbones.weights import file_sha256, load_weights
from diffscore_fast.errors import CheckpointError
from diffscore_fast.text.tokenizer import TextTokenizer

EMBEDDED_MODELS = {"mini": Path(__file__).parent / "mini"}
REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size",
            "max_position_embeddings", "type_vocab_size", "layer_norm_eps")  # fmt: skip
PACKAGE_SECTION = "diffscore_fast"  # our part of config.json: patterns, default pattern, control tokens, checksum


@dataclass(frozen=True)
class LoadedModel:
    """A backbone ready to score, with what its signature needs.

    `fingerprint` is a hash of weights and config.json together: heads, patterns and token types change scores, too.
    """

    backbone: BertBackbone
    tokenizer: TextTokenizer
    weights_sha256: str
    fingerprint: str


def load_model(name_or_path: str | Path = "mini", *, device: str | torch.device = "cpu",
               dtype: torch.dtype | None = None) -> LoadedModel:  # fmt: skip
    """Load an embedded model by name, or a model folder by path.

    Parameters
    ----------
    name_or_path : str or Path
        "mini", or a folder in the layout of transformers' `BertForMaskedLM` with a tokenizer.json.
    device : str or torch.device
        Where the weights go.
    dtype : torch.dtype, optional
        Type of weights and hidden states; `default_dtype(device)` if not given.

    Raises
    ------
    CheckpointError
        If a file is missing, a tensor is missing or left over, or a checksum differs.
    """
    folder = EMBEDDED_MODELS.get(str(name_or_path), Path(name_or_path))
    if not folder.is_dir():
        raise CheckpointError(
            f"no model {str(name_or_path)!r}: neither an embedded model ({', '.join(EMBEDDED_MODELS)}) nor a folder"
        )
    config = read_config(folder)
    own = config.get(PACKAGE_SECTION, {})
    tokenizer = TextTokenizer(
        folder / "tokenizer.json", own.get("mask_token", "[MASK]"), own.get("start_token", "[CLS]")
    )
    if tokenizer.vocab_size > config["vocab_size"]:
        raise CheckpointError(
            f"{folder}: tokenizer.json has {tokenizer.vocab_size} tokens, config.json's vocab_size is only "
            f"{config['vocab_size']}"
        )
    name = str(name_or_path) if str(name_or_path) in EMBEDDED_MODELS else folder.resolve().name
    patterns, default_pattern = read_patterns(config)
    assert tokenizer.start_id is not None
    backbone = build_bert(name, config, patterns, default_pattern, tokenizer.mask_id, tokenizer.start_id)
    weights_path = folder / "model.safetensors"
    load_state(backbone, load_weights(weights_path), str(weights_path))
    weights_sha256 = file_sha256(weights_path)
    if own.get("weights_sha256", weights_sha256) != weights_sha256:
        raise CheckpointError(f"{weights_path}: SHA-256 differs from config.json's; the file is damaged or replaced")
    backbone.to(device=device, dtype=dtype or default_dtype(device)).eval().requires_grad_(False)
    canonical = json.dumps(config, sort_keys=True)
    fingerprint = hashlib.sha256(f"{weights_sha256}{canonical}".encode()).hexdigest()
    return LoadedModel(backbone, tokenizer, weights_sha256, fingerprint)


def read_config(folder: Path) -> dict:
    """The folder's config.json, checked to name a BERT masked language model."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; a model folder needs config.json") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON ({error})") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: a JSON {type(config).__name__}, not an object")
    if config.get("model_type") != "bert" or "BertForMaskedLM" not in config.get("architectures", ["BertForMaskedLM"]):
        raise CheckpointError(
            f"{path}: model_type {config.get('model_type')!r}, architectures {config.get('architectures')}; "
            "only BERT masked language models (BertForMaskedLM) can be loaded"
        )
    missing = [name for name in REQUIRED if not isinstance(config.get(name), int | float)]
    if missing or not isinstance(config.get(PACKAGE_SECTION, {}), dict):
        raise CheckpointError(f"{path}: needs the numbers {', '.join(missing or REQUIRED)}")
    return config


def read_patterns(config: dict) -> tuple[dict[str, PatternSpec], PatternName]:
    """The attention patterns that config.json states, and the default one.

    A model from elsewhere states none: it was trained with `full` alone.
    """
    own, limit = config.get(PACKAGE_SECTION, {}), config["max_position_embeddings"]
    default = own.get("default_pattern", "full")
    try:
        patterns = {
            name: PatternSpec(**{"position_limit": limit, **item, "block_sizes": tuple(item.get("block_sizes", ()))})
            for name, item in own.get("patterns", {"full": {}}).items()
        }
        fits = all(
            item.position_limit <= limit and max(item.prefix_type, item.window_type) < config["type_vocab_size"]
            for item in patterns.values()
        )
    except (AttributeError, TypeError) as error:
        raise CheckpointError(f"config.json: patterns are not as they should be: {error}") from None
    if not fits or default not in patterns:
        raise CheckpointError("config.json: a pattern uses positions or token types that the model lacks, or the "
                              f"default pattern {default!r} is none of {', '.join(patterns)}")  # fmt: skip
    return patterns, default


def default_dtype(device: str | torch.device) -> torch.dtype:
    """bfloat16 where the processor multiplies it natively, else float32."""
    if torch.device(device).type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    capabilities = torch.backends.cpu.get_cpu_capability()
    native = "AVX512" in capabilities and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return torch.bfloat16 if native else torch.float32
