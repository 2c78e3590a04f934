"""Small random masked language models of several families, saved by transformers in their own layouts."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from diffscore_fast.backbones.load import EMBEDDED_MODELS

SENTENCES = ["The cat sat on the mat.", "Two people died on a cruise ship in Puerto Rico.", "Ça coûte 3 €, non? 🙂"]
PADDED_ROWS = 11  # vocabulary rows beyond the tokenizer's
FAMILIES = ("bert", "distilbert", "roberta", "electra", "modernbert")


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
        "distilbert": lambda: transformers.DistilBertForMaskedLM(transformers.DistilBertConfig(
            dim=32, n_layers=2, n_heads=4, hidden_dim=48, max_position_embeddings=64, **size)),
        "roberta": lambda: transformers.RobertaForMaskedLM(transformers.RobertaConfig(
            num_hidden_layers=2, type_vocab_size=1, layer_norm_eps=1e-5,
            **{**body, "max_position_embeddings": 66}, pad_token_id=1)),
        "electra": lambda: transformers.ElectraForMaskedLM(transformers.ElectraConfig(
            embedding_size=16, num_hidden_layers=2, **body)),
        "modernbert": lambda: transformers.ModernBertForMaskedLM(transformers.ModernBertConfig(
            num_hidden_layers=4, local_attention=8, global_attn_every_n_layers=2, **body, **ids)),
    }  # fmt: skip
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
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")],
    )  # fmt: skip
    return tokenizer


def byte_level_tokenizer() -> Tokenizer:
    """RoBERTa's kind: byte-level pairs, <s> A </s></s> B </s>."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=["<s>", "<pad>", "</s>", "<unk>", AddedToken("<mask>", lstrip=True)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(SENTENCES * 3, trainer)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    return tokenizer
