"""Small random SDAR and A2D in the layout of their checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.support.checkpoints import PADDED_ROWS, byte_level_tokenizer

# Name of the mask token and of the class, and what config.json states of the layers.
FAMILIES = {
    "sdar": ("<|MASK|>", "SDARForCausalLM"),
    "a2d-qwen3": ("<|mask|>", "A2DQwen3LMHeadModel"),
    "a2d-qwen2": ("<|mask|>", "A2DQwen2LMHeadModel"),
    "a2d-llama": ("<|mask|>", "A2DLlamaLMHeadModel"),
}


def save_block_model(family: str, folder: Path, **changes: object) -> Path:
    """config.json, safetensors and a tokenizer, whose last token is the mask.

    Heads are wider than hidden size / number of heads where the family is Qwen3's, as in the published ones.
    """
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    mask, architecture = FAMILIES[family]
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens([mask])
    tokenizer.save(str(folder / "tokenizer.json"))
    shape = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "vocab_size": tokenizer.get_vocab_size() + PADDED_ROWS,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
    }
    is_qwen3 = family in ("sdar", "a2d-qwen3")
    if is_qwen3:
        shape["head_dim"] = 16
    kind = "Qwen3" if is_qwen3 else family.removeprefix("a2d-").capitalize()
    rotary = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**shape, **rotary)
    state = {
        name: (tensor + 0.3 * torch.randn(tensor.shape)).contiguous()
        for name, tensor in getattr(transformers, f"{kind}ForCausalLM")(config).state_dict().items()
    }
    save_file(state, folder / "model.safetensors")
    stated = {"model_type": family, "architectures": [architecture], **shape, "rope_theta": 1e6, "rope_scaling": None}
    if family == "sdar":
        stated |= {
            "fuse_cross_entropy": True,
            "attention_bias": False,
            "use_sliding_window": False,
            "sliding_window": None,
        }
    (folder / "config.json").write_text(json.dumps({**stated, **changes}))
    return folder
