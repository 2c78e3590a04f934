"""A model that costs next to nothing: what is left of time and memory is the engine's and the files'."""

from __future__ import annotations

import json
import string
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from diffscore_fast.backbones.bert_families import build_bert, state_in_bert_layout
from diffscore_fast.backbones.config import EMBEDDED_MODELS, read_patterns


def tiny_model(folder: Path, words: Sequence[str] | None = None) -> Path:
    """Make a random BERT of one layer of width 16, with the embedded model's tokenizer and patterns.

    With `words` the vocabulary is these, ASCII characters and the control tokens: logits cost next to nothing, too.
    """
    shape = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": 512,
    }
    config, tokenizer = (
        json.loads((EMBEDDED_MODELS["mini"] / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("config", "tokenizer")
    )
    config |= shape
    del config["diffscore_fast"]["weights_sha256"]
    folder.mkdir(parents=True, exist_ok=True)
    if words is not None:
        control = [token["content"] for token in tokenizer["added_tokens"]]  # the first of the vocabulary
        characters = string.ascii_lowercase + string.digits + string.punctuation
        pieces = dict.fromkeys([*control, *characters, *(f"##{one}" for one in characters), *words])
        tokenizer["model"]["vocab"] = {piece: number for number, piece in enumerate(pieces)}
        config["vocab_size"] = len(pieces)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    torch.manual_seed(0)
    backbone = build_bert("tiny", config, *read_patterns(config), mask_id=4, start_id=2)
    save_file(state_in_bert_layout(backbone), folder / "model.safetensors")
    return folder
