"""Small random MDLM and BD3-LM in the layout of their checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.support.checkpoints import SENTENCES

SIZE, CONDITION, LAYERS, HEADS, LENGTH = 32, 12, 2, 4, 64


def save_dit_model(family: str, folder: Path, block_size: int = 4, **changes: object) -> Path:
    """config.json, safetensors and GPT-2's kind of tokenizer.

    All tensors, the modulations among them, are random: a fold that is left out changes every number.
    """
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = _save_tokenizer(folder) + 1
    config = {
        "model_type": family,
        "architectures": [family.upper()],
        "hidden_dim": SIZE,
        "cond_dim": CONDITION,
        "n_blocks": LAYERS,
        "n_heads": HEADS,
        "model_length": LENGTH,
        "vocab_size": vocabulary,
        "dropout": 0.1,
        "time_conditioning": False,
        "return_dict": False,
    }
    if family == "bd3lm":
        config |= {"block_size": block_size, "cross_attn": True, "adaln": True, "causal": False, "var_min": True}
        config |= {"attn_backend": "sdpa", "sampling_eps_min": 1e-3, "sampling_eps_max": 0.999}
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, about: float = 0.0) -> torch.Tensor:
        return about + 0.3 * torch.randn(shape, generator=generator)

    state = {
        "vocab_embed.embedding": random(vocabulary, SIZE),
        "rotary_emb.inv_freq": 1.0 / 10_000 ** (torch.arange(0, SIZE // HEADS, 2).float() / (SIZE // HEADS)),
        "output_layer.norm_final.weight": random(SIZE, about=1.0),
        "output_layer.linear.weight": random(vocabulary, SIZE),
        "output_layer.linear.bias": random(vocabulary),
        "output_layer.adaLN_modulation.weight": random(2 * SIZE, CONDITION),
        "output_layer.adaLN_modulation.bias": random(2 * SIZE),
        "sigma_map.mlp.0.weight": random(CONDITION, 256),
        "sigma_map.mlp.0.bias": random(CONDITION),
        "sigma_map.mlp.2.weight": random(CONDITION, CONDITION),
        "sigma_map.mlp.2.bias": random(CONDITION),
    }
    for index in range(LAYERS):
        state |= {
            f"blocks.{index}.{name}": tensor
            for name, tensor in {
                "norm1.weight": random(SIZE, about=1.0),
                "attn_qkv.weight": random(3 * SIZE, SIZE),
                "attn_out.weight": random(SIZE, SIZE),
                "norm2.weight": random(SIZE, about=1.0),
                "mlp.0.weight": random(4 * SIZE, SIZE),
                "mlp.0.bias": random(4 * SIZE),
                "mlp.2.weight": random(SIZE, 4 * SIZE),
                "mlp.2.bias": random(SIZE),
                "adaLN_modulation.weight": random(6 * SIZE, CONDITION),
                "adaLN_modulation.bias": random(6 * SIZE),
            }.items()
        }
    state = {f"backbone.{name}": tensor for name, tensor in state.items()}
    if family == "bd3lm":
        state |= {"sampling_eps_min": torch.tensor(1e-3), "sampling_eps_max": torch.tensor(0.999)}
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def _save_tokenizer(folder: Path) -> int:
    """Byte-level pairs with `<|endoftext|>` as their last token, as GPT-2 has it. The number of tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        SENTENCES * 3, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer.get_vocab_size()
