"""Lower-casing and accents where tokenizer_config.json and tokenizer.json disagree, against transformers itself."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from diffscore_fast.backbones.loader import load_model
from diffscore_fast.errors import CheckpointError
from tests.support.checkpoints import save_checkpoint

TEXT = "Éva's Café sold 中文 books In PARIS."


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return save_checkpoint("bert", tmp_path_factory.mktemp("normaliser") / "bert")


def changed(bert, tmp_path, stated, normaliser):
    """The folder with that tokenizer_config.json and that normaliser in tokenizer.json."""
    folder = shutil.copytree(bert, tmp_path / "changed")
    (folder / "tokenizer_config.json").write_text(json.dumps({"mask_token": "[MASK]", **stated}))
    content = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(content | {"normalizer": normaliser}))
    return folder


def bert_normaliser(lowercase, strip_accents=None):
    return {
        "type": "BertNormalizer",
        "clean_text": True,
        "handle_chinese_chars": True,
        "strip_accents": strip_accents,
        "lowercase": lowercase,
    }


@pytest.mark.parametrize("stored", [bert_normaliser(True), bert_normaliser(False), bert_normaliser(False, True)])
@pytest.mark.parametrize(
    "stated",
    [
        {"tokenizer_class": "BertTokenizer", "do_lower_case": False},
        {"tokenizer_class": "BertTokenizerFast", "do_lower_case": True, "strip_accents": None},
        {"tokenizer_class": "DistilBertTokenizerFast", "do_lower_case": True, "strip_accents": False},
        {"tokenizer_class": "ElectraTokenizer", "do_lower_case": False, "strip_accents": True},
        {
            "tokenizer_class": "BertTokenizer",
            "do_lower_case": True,
            "tokenize_chinese_chars": False,
            "strip_accents": None,
        },
        {"tokenizer_class": "BertTokenizer"},  # whose defaults hold then
        {"do_lower_case": False, "strip_accents": None},  # the class of its model type
        {"tokenizer_class": "PreTrainedTokenizerFast", "do_lower_case": True},  # which takes tokenizer.json as it is
    ],
    ids=str,
)
def test_texts_have_the_tokens_that_transformers_gives_them(bert, tmp_path, stored, stated):
    import transformers

    folder = changed(bert, tmp_path, stated, stored)
    expected = transformers.AutoTokenizer.from_pretrained(folder)(TEXT, add_special_tokens=False)["input_ids"]
    tokenizer = load_model(folder).tokenizer
    np.testing.assert_array_equal(tokenizer.encode([TEXT])[0].ids, expected)
    if any(
        stored[field] != stated.get(name, stored[field])
        for name, field in (("do_lower_case", "lowercase"), ("strip_accents", "strip_accents"))
    ) and (stated.get("tokenizer_class") != "PreTrainedTokenizerFast"):
        as_stored = load_model(changed(bert, tmp_path / "other", {}, stored)).tokenizer
        assert tokenizer.sha256 != as_stored.sha256  # signatures tell them apart


def test_settings_that_cannot_be_set_are_a_conflict_by_name(bert, tmp_path):
    stated = {"tokenizer_class": "BertTokenizer", "do_lower_case": True}
    nothing = changed(bert, tmp_path / "nothing", stated, None)
    with pytest.raises(CheckpointError, match=r"do_lower_case = True, and the normaliser of tokenizer.json does"):
        load_model(nothing)
    parts = [{"type": "Lowercase"}, {"type": "NFD"}, {"type": "StripAccents"}]
    silent = changed(bert, tmp_path / "silent", {"tokenizer_class": "BertTokenizer"}, None)
    assert load_model(silent).tokenizer.sha256  # nothing is stated that tokenizer.json could contradict
    same = changed(
        bert,
        tmp_path / "same",
        stated | {"tokenize_chinese_chars": False},
        {"type": "Sequence", "normalizers": parts[1:] + parts[:1]},
    )
    assert load_model(same).tokenizer.vocab_size == load_model(bert).tokenizer.vocab_size
    odd = changed(bert, tmp_path / "odd", stated | {"do_lower_case": "no"}, bert_normaliser(True))
    with pytest.raises(CheckpointError, match="do_lower_case must be true or false, not 'no'"):
        load_model(odd)
