"""A tiny network, its model folder, and a corpus whose tokens say which article, paragraph and sentence they are of."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from diffscore_fast.backbones.bert import BertBackbone
from diffscore_fast.backbones.bert_families import build_bert, state_in_bert_layout
from diffscore_fast.backbones.loader import load_model
from diffscore_fast.backbones.weights import save_weights
from diffscore_fast.training.corpus import Corpus
from diffscore_fast.training.starting_body import PATTERNS

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{number}" for number in range(59))]
CONFIG = {
    "architectures": ["BertForMaskedLM"],
    "model_type": "bert",
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 64,
    "max_position_embeddings": 256,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "diffscore_fast": {"patterns": PATTERNS, "default_pattern": "prefix"},
}


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A model folder with random weights, large enough in scale that every row of attention differs."""
    from diffscore_fast.backbones.config import read_patterns

    folder = tmp_path / "start"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    tokenizer = Tokenizer(models.WordLevel({piece: number for number, piece in enumerate(PIECES)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = build_bert("tiny", CONFIG, *read_patterns(CONFIG), mask_id=4, start_id=2)
        for parameter in network.parameters():
            parameter.data += 0.3 * torch.randn(parameter.shape)
    save_weights(folder / "model.safetensors", state_in_bert_layout(network), eight_bit=False)
    return folder


@pytest.fixture
def network(model_folder: Path) -> BertBackbone:
    return load_model(model_folder, dtype=torch.float32).bert


@pytest.fixture
def corpus() -> Corpus:
    """40 articles; token value = 5 + article % 59, so that a range that crosses articles holds two values."""
    rng = np.random.default_rng(0)
    tokens: list[int] = []
    sentences, paragraphs, articles = [0], [0], [0]
    for article in range(40):
        for paragraph in range(int(rng.integers(3, 6))):
            for _ in range(1 if paragraph == 0 else int(rng.integers(1, 4))):
                tokens += [5 + article] * int(rng.integers(4, 12))
                sentences.append(len(tokens))
            paragraphs.append(len(sentences) - 1)
        articles.append(len(paragraphs) - 1)
    return Corpus(
        np.array(tokens, dtype=np.uint16), np.array(sentences), np.array(paragraphs), np.array(articles), 0, 40
    )
