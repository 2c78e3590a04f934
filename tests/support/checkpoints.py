"""Small random masked language models of several families, saved by transformers in their own layouts."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from diffscore_fast.backbones.config import EMBEDDED_MODELS

SENTENCES = ["The cat sat on the mat.", "Two people died on a cruise ship in Puerto Rico.", "Ça coûte 3 €, non? 🙂"]
PADDED_ROWS = 11  # vocabulary rows beyond the tokenizer's
BERT_FAMILIES = ("bert", "distilbert", "roberta", "electra", "modernbert")


def save_checkpoint(family: str, folder: Path) -> Path:
    """A network of 32 dimensions with a tokenizer, as `save_pretrained` writes them."""
    import transformers

    tokenizer = byte_level_tokenizer() if family in ("roberta", "modernbert") else word_piece_tokenizer()
    control = {"mask_token": "<mask>"} if family in ("roberta", "modernbert") else {"mask_token": "[MASK]"}
    torch.manual_seed(0)
    size = dict(vocab_size=tokenizer.get_vocab_size() + PADDED_ROWS)
    body = dict(hidden_size=32, num_attention_heads=4, intermediate_size=48, max_position_embeddings=64, **size)
    ids = dict(pad_token_id=1, bos_token_id=0, eos_token_id=2, cls_token_id=0, sep_token_id=2)
    classes = {
        "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(num_hidden_layers=2, **body)),
        "distilbert": lambda: transformers.DistilBertForMaskedLM(
            transformers.DistilBertConfig(
                dim=32, n_layers=2, n_heads=4, hidden_dim=48, max_position_embeddings=64, **size
            )
        ),
        "roberta": lambda: transformers.RobertaForMaskedLM(
            transformers.RobertaConfig(
                num_hidden_layers=2,
                type_vocab_size=1,
                layer_norm_eps=1e-5,
                **{**body, "max_position_embeddings": 66},
                pad_token_id=1,
            )
        ),
        "electra": lambda: transformers.ElectraForMaskedLM(
            transformers.ElectraConfig(embedding_size=16, num_hidden_layers=2, **body)
        ),
        "modernbert": lambda: transformers.ModernBertForMaskedLM(
            transformers.ModernBertConfig(
                num_hidden_layers=4, local_attention=8, global_attn_every_n_layers=2, **body, **ids
            )
        ),
    }
    network = classes[family]().eval()
    for parameter in network.parameters():  # biases and norms are constants to begin with
        parameter.data += 0.3 * torch.randn(parameter.shape)
    folder.mkdir(parents=True, exist_ok=True)
    network.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **control}))
    return folder


def save_prefix_model(folder: Path) -> Path:
    """A BERT network that knows the embedded model's patterns."""
    save_checkpoint("bert", folder)
    config = json.loads((folder / "config.json").read_text())
    config["diffscore_fast"] = json.loads((EMBEDDED_MODELS["mini"] / "config.json").read_text())["diffscore_fast"]
    del config["diffscore_fast"]["weights_sha256"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def word_piece_tokenizer() -> Tokenizer:
    """The embedded model's pieces, with BERT's own template around texts."""
    tokenizer = Tokenizer.from_file(str(EMBEDDED_MODELS["mini"] / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")],
    )
    return tokenizer


def byte_level_tokenizer() -> Tokenizer:
    """RoBERTa's kind: byte-level pairs, <s> A </s></s> B </s>."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=["<s>", "<pad>", "</s>", "<unk>", AddedToken("<mask>", lstrip=True)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES * 3, trainer)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    return tokenizer


def save_diffusion_model(family: str, folder: Path, **changes: object) -> Path:
    """A small LLaDA or Dream in the layout of its checkpoints, in two shards.

    transformers' Llama or Qwen2 of the same weights is beside it, in `twin`; it has a causal mask of its own.
    """
    import transformers

    torch.manual_seed(0)
    shape = dict(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    folder.mkdir(parents=True, exist_ok=True)
    if family == "llada":
        tokenizer = byte_level_tokenizer()
        tokenizer.save(str(folder / "tokenizer.json"))
        size = tokenizer.get_vocab_size() + PADDED_ROWS
        rope = {"rope_type": "default", "rope_theta": 500000.0}
        network: transformers.PreTrainedModel = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**shape, vocab_size=size, rms_norm_eps=1e-5, rope_parameters=rope)
        )
        config = {
            "architectures": ["LLaDAModelLM"],
            "model_type": "llada",
            "block_type": "llama",
            "layer_norm_type": "rms",
            "activation_type": "silu",
            "rope": True,
            "rope_theta": 500000.0,
            "rms_norm_eps": 1e-5,
            "d_model": 32,
            "n_layers": 2,
            "n_heads": 4,
            "n_kv_heads": 2,
            "mlp_hidden_size": 48,
            "vocab_size": size - 1,
            "embedding_size": size,
            "max_sequence_length": 64,
            "mask_token_id": 4,
            "weight_tying": False,
            "scale_logits": False,
            "include_bias": False,
            "alibi": False,
        }
        names = {
            "model.embed_tokens": "model.transformer.wte",
            "model.norm": "model.transformer.ln_f",
            "lm_head": "model.transformer.ff_out",
            "model.layers": "model.transformer.blocks",
            "self_attn.o_proj": "attn_out",
            "self_attn.": "",
            "mlp.gate_proj": "ff_proj",
            "mlp.up_proj": "up_proj",
            "mlp.down_proj": "ff_out",
            "input_layernorm": "attn_norm",
            "post_attention_layernorm": "ff_norm",
        }
    else:
        size = _save_qwen_vocabulary(folder) + PADDED_ROWS
        network = transformers.Qwen2ForCausalLM(
            transformers.Qwen2Config(
                **shape,
                vocab_size=size,
                rms_norm_eps=1e-6,
                rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            )
        )
        config = {
            **shape,
            "architectures": ["DreamModel"],
            "model_type": "Dream",
            "vocab_size": size,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "rope_scaling": None,
            "use_sliding_window": False,
            "hidden_act": "silu",
            "mask_token_id": size - PADDED_ROWS - 1,
        }
        names = {}
    for parameter in network.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape)
    network.eval().save_pretrained(folder / "twin")
    state = {}
    for name, tensor in network.state_dict().items():
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        state[name] = tensor.clone()
    files = {f"model-0000{part + 1}-of-00002.safetensors": sorted(state)[part::2] for part in range(2)}
    for file, members in files.items():
        save_file({name: state[name] for name in members}, folder / file)
    index = {"weight_map": {name: file for file, members in files.items() for name in members}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def _save_qwen_vocabulary(folder: Path) -> int:
    """Dream's tokenizer files: a vocabulary, merges, and control tokens beyond them. Their number."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        SENTENCES * 3, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.model.save(str(folder))
    first = tokenizer.get_vocab_size()
    control = ["<|endoftext|>", "<|beginoftext|>", "<|mask|>"]
    added = {
        str(first + place): {
            "content": token,
            "special": True,
            "lstrip": False,
            "rstrip": False,
            "single_word": False,
            "normalized": False,
        }
        for place, token in enumerate(control)
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "DreamTokenizer",
                "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]},
                "bos_token": "<|beginoftext|>",
                "mask_token": "<|mask|>",
                "eos_token": "<|endoftext|>",
                "pad_token": "<|endoftext|>",
                "added_tokens_decoder": added,
            }
        )
    )
    return first + len(control)


def save_causal_prefix_model(folder: Path) -> Path:
    """A small Llama that reads a causal prefix, as this package writes them; transformers' own is in `twin`."""
    import transformers

    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_level_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    mask, size = tokenizer.token_to_id("<mask>"), tokenizer.get_vocab_size()
    network = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=48,
            max_position_embeddings=96,
            rms_norm_eps=1e-5,
            vocab_size=size,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        )
    ).eval()
    for parameter in network.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape)
    network.save_pretrained(folder / "twin")
    state = {name: item.clone() for name, item in network.state_dict().items() if name != "lm_head.weight"}
    save_file(state, folder / "model.safetensors")
    newline = tokenizer.encode("\n", add_special_tokens=False).ids
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 96,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "vocab_size": size,
        "mask_token_id": mask,
        "diffscore_fast": {
            "patterns": {
                "prefix": {"prefix_mask": "causal", "separator_ids": newline},
                "block": {
                    "prefix_mask": "causal",
                    "separator_ids": newline,
                    "block_sizes": [1, 2, 4, 64],
                    "default_block_size": 4,
                    "blocks_from_target": True,
                },
            },
            "default_pattern": "prefix",
            "start_token": "<s>",
            "mask_token": "<mask>",
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder
