"""The BERT family and its files, against transformers' own network and tokenizer."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from diffscore_fast.backbones.config import EMBEDDED_MODELS
from diffscore_fast.backbones.loader import load_model
from diffscore_fast.backbones.weights import load_weights, quantise_rows, save_weights
from diffscore_fast.engine.plan import AttentionPattern, MaskPlan, Sequences
from diffscore_fast.engine.runner import Runner
from diffscore_fast.engine.windows import compose
from diffscore_fast.errors import CheckpointError
from tests.support.networks import dense_log_probs

MINI = EMBEDDED_MODELS["mini"]


@pytest.fixture(scope="module")
def saved_bert(tmp_path_factory):
    """A small random network, saved by transformers in its own layout."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    vocab = json.loads((MINI / "tokenizer.json").read_text())["model"]["vocab"]
    network = BertForMaskedLM(
        BertConfig(
            vocab_size=len(vocab),
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=64,
            initializer_range=0.3,
        )
    ).eval()
    folder = tmp_path_factory.mktemp("bert")
    network.save_pretrained(folder)
    shutil.copy(MINI / "tokenizer.json", folder)
    return folder, network


def test_full_attention_equals_transformers(saved_bert):
    folder, network = saved_bert
    loaded = load_model(folder, dtype=torch.float32)
    spec = loaded.backbone.spec
    assert list(spec.patterns) == ["full"] and spec.default_pattern == "full"
    context, target = np.array([2000, 2001], np.int32), np.array([2005, 2006, 2007, 2008], np.int32)
    masked = np.array([True, False, True, True])
    plan = MaskPlan(np.array([0]), np.array([0]), np.array([4]), masked)
    sequences = Sequences.build([context], np.array([0]), [target])
    attention = AttentionPattern("full")
    got = Runner(loaded.backbone).run(*compose(spec, attention, sequences, plan), attention)
    line = [spec.start_id, 2000, 2001, *np.where(masked, spec.mask_id, target).tolist()]
    with torch.no_grad():
        log_probs = network(torch.tensor([line])).logits[0].double().log_softmax(-1)
    expected = [float(log_probs[3 + i, target[i]]) for i in np.flatnonzero(masked)]
    np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize(
    "attention", [AttentionPattern("full"), AttentionPattern("prefix"), AttentionPattern("block", 4)]
)
def test_embedded_model_patterns_equal_dense_computation(mini, attention):
    """Positions, token types and start token of each pattern are those of config.json."""
    backbone = mini.backbone
    context, target = [2023, 2003, 1037], [7592, 2088, 2003, 1037, 3231]
    masked = [True, False, True, True, False]
    start, stop = (1, 4) if attention.name == "block" else (0, 5)  # places 5, 6, 7 lie in the second block of 4
    flags = masked[start:stop]
    plan = MaskPlan(np.array([0]), np.array([start]), np.array([stop]), np.array(flags))
    sequences = Sequences.build([np.array(context, np.int32)], np.array([0]), [np.array(target, np.int32)])
    got = mini.runner.run(*compose(backbone.spec, attention, sequences, plan), attention)
    with torch.no_grad():
        expected = dense_log_probs(backbone, attention, context, target, flags, start, stop)
    np.testing.assert_allclose(got, expected, atol=1e-4)


def test_tokenizer_knows_words_and_reads_no_control_tokens_out_of_text(mini):
    """A tokenizer rebuilt from vocab.txt turned every word into [UNK]; the one read from tokenizer.json does not."""
    tokenizer = mini.tokenizer
    vocab = json.loads((MINI / "tokenizer.json").read_text())["model"]["vocab"]
    ids = tokenizer.encode(["The president visited two cities on Monday."])[0].ids
    assert vocab["[UNK]"] not in ids and len(ids) >= 8
    for control in ("[MASK]", "[CLS]", "[SEP]", "[PAD]"):
        encoded = tokenizer.encode([f"a {control} b"])[0]
        assert vocab[control] not in encoded.ids
        assert encoded.spans[0].tolist() == [0, 1] and encoded.spans[-1].tolist() == [len(control) + 3] + [
            len(control) + 4
        ]
    assert len(tokenizer.encode(["​ ﻿ \n"])[0].ids) == 0


def test_eight_bit_rows_round_trip(tmp_path):
    weight = torch.randn(7, 33)
    weight[3] = 0
    codes, scale = quantise_rows(weight)
    assert codes.dtype == torch.int8
    assert ((codes * scale[:, None] - weight).abs() <= scale[:, None] * 0.500001).all()
    save_weights(tmp_path / "w.safetensors", {"m": weight, "v": weight[0]}, eight_bit=True)
    back = load_weights(tmp_path / "w.safetensors")
    assert torch.equal(back["m"], codes * scale[:, None]) and torch.equal(back["v"], weight[0])


def test_an_untied_output_head_is_refused_and_a_copy_is_not(saved_bert, tmp_path):
    copy = damaged(saved_bert[0], tmp_path)
    weights = load_file(copy / "model.safetensors")
    words = weights["bert.embeddings.word_embeddings.weight"]
    save_file({**weights, "cls.predictions.decoder.weight": words.clone()}, copy / "model.safetensors")
    assert load_model(copy).backbone.spec.vocab_size == len(words)
    save_file({**weights, "cls.predictions.decoder.weight": words + 1}, copy / "model.safetensors")
    with pytest.raises(CheckpointError, match="only a tied output head"):
        load_model(copy)


def test_the_fingerprint_covers_config_json(saved_bert, tmp_path):
    copy = damaged(saved_bert[0], tmp_path)
    edit(copy, num_attention_heads=2)
    before, after = load_model(saved_bert[0]), load_model(copy)
    assert before.weights_sha256 == after.weights_sha256 and before.fingerprint != after.fingerprint


def damaged(folder, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    return copy


def test_a_missing_tensor_and_a_left_over_one_are_named(saved_bert, tmp_path):
    copy = damaged(saved_bert[0], tmp_path)
    weights = load_file(copy / "model.safetensors")
    norm = weights.pop("bert.encoder.layer.1.output.LayerNorm.weight")
    save_file({**weights, "extra.weight": norm}, copy / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing \['bert.encoder.layer.1.*unexpected \['extra.weight'\]"):
        load_model(copy)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "config.json: no such file"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json: no such file"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors: no such file"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"junk"), "not a readable safetensors"),
        (lambda folder: (folder / "config.json").write_text("{"), "not JSON"),
        (lambda folder: edit(folder, model_type="gpt2"), "transformers loads no masked language model of type 'gpt2'"),
        (lambda folder: edit(folder, architectures=["BertForSequenceClassification"]), "is a sequence classifier"),
        (lambda folder: edit(folder, hidden_size=48), "shapes do not match"),
        (lambda folder: edit(folder, vocab_size=100), "tokenizer.json has"),
        (lambda folder: edit(folder, diffscore_fast={"weights_sha256": "0"}), "SHA-256 differs"),
        (lambda folder: edit(folder, diffscore_fast={"mask_token": "<mask>"}), "no token '<mask>'"),
        (lambda folder: edit(folder, vocab_size=None), "needs the numbers vocab_size"),
        (lambda folder: (folder / "config.json").write_text("[]"), "a JSON list, not an object"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "not a readable tokenizer"),
        (lambda folder: edit(folder, diffscore_fast={"patterns": {"full": {"x": 1}}}), "patterns are not"),
        (lambda folder: edit(folder, diffscore_fast={"patterns": {"full": {"position_limit": 999}}}), "positions or"),
        (lambda folder: edit(folder, diffscore_fast={"patterns": {"full": {"window_type": 2}}}), "token types"),
        (lambda folder: edit(folder, diffscore_fast={"default_pattern": "prefix"}), "default pattern"),
    ],
)
def test_unusable_model_folders_say_why(saved_bert, tmp_path, fault, message):
    copy = damaged(saved_bert[0], tmp_path)
    fault(copy)
    with pytest.raises(CheckpointError, match=message):
        load_model(copy)


def edit(folder, **fields):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))


def test_unknown_model_names_the_known_ones():
    with pytest.raises(
        CheckpointError, match="neither an embedded model \\(mini, small\\) nor a folder, nor in the local"
    ):
        load_model("mimi")
