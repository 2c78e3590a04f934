"""A small Llama in a GGUF file, beside the same network in transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer as Pieces
from tokenizers import models, pre_tokenizers, trainers

from tests.support.checkpoints import SENTENCES

HEADS, KEY_HEADS, WIDTH = 4, 2, 16
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def pieces() -> Pieces:
    tokenizer = Pieces(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        SENTENCES * 3,
        trainers.BpeTrainer(vocab_size=340, special_tokens=CONTROL, initial_alphabet=alphabet, show_progress=False),
    )
    return tokenizer


def write_gguf_llama(path: Path) -> tuple[Any, list[str]]:
    """Write a GGUF file of a small Llama in Q4_1 and Q8_0.

    Returns the same Llama in transformers, its weights rounded as in the file, and the file's tokens.
    """
    import gguf
    import transformers
    from gguf import GGMLQuantizationType as Kind

    torch.manual_seed(0)
    listed = pieces()
    stored = json.loads(listed.to_str())["model"]
    tokens = sorted(stored["vocab"], key=stored["vocab"].__getitem__)
    config = transformers.LlamaConfig(
        hidden_size=HEADS * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        intermediate_size=96,
        vocab_size=len(tokens),
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    twin = transformers.LlamaForCausalLM(config).eval()
    for parameter in twin.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape)

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HEADS * WIDTH)
    writer.add_block_count(2)
    writer.add_feed_forward_length(96)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(WIDTH)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in CONTROL else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in stored["merges"]])

    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "model.layers.": "blk.",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for name, parameter in twin.named_parameters():
        theirs = name
        for one, other in names.items():
            theirs = theirs.replace(one, other)
        weight = parameter.detach().numpy()
        if weight.ndim == 1:
            writer.add_tensor(theirs, weight)
            continue
        kind = Kind.Q8_0 if name == "model.embed_tokens.weight" else Kind.Q4_1
        rounded = gguf.dequantize(gguf.quantize(weight, kind), kind)
        parameter.data = torch.from_numpy(np.array(rounded))
        for part, heads in (("attn_q", HEADS), ("attn_k", KEY_HEADS)):
            if part in theirs:  # as llama.cpp's converter does
                weight = weight.reshape(heads, 2, WIDTH // 2, -1).swapaxes(1, 2).reshape(weight.shape)
        writer.add_tensor(theirs, gguf.quantize(np.ascontiguousarray(weight), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    twin.tie_weights()
    return twin, tokens
