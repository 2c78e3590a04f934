"""Masked language models from elsewhere, against transformers' own tokenizer call and forward pass."""

from __future__ import annotations

import json
import shutil
import sys

import huggingface_hub
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from diffscore_fast import DiffScorer
from diffscore_fast.backbones.loader import load_model
from diffscore_fast.backbones.spec import OpaqueBackbone
from diffscore_fast.engine.plan import AttentionPattern, MaskPlan, Sequences
from diffscore_fast.engine.runner import Runner
from diffscore_fast.engine.windows import compose
from diffscore_fast.errors import CheckpointError, DeviceMemoryError, InputError, UnsupportedPatternError
from diffscore_fast.text.templates import Template
from diffscore_fast.text.tokenizer import TextTokenizer
from tests.support.checkpoints import BERT_FAMILIES, PADDED_ROWS, SENTENCES, save_checkpoint

SOURCES = ["The cat sat on the mat.", "Two people died.", ""]
CANDIDATES = ["A cat sat.", "Two people died on a cruise ship in Puerto Rico.", "The mat costs 3 €."]
FULL = AttentionPattern("full")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("families")
    return {family: save_checkpoint(family, root / family) for family in BERT_FAMILIES}


def ours(folder, sources, candidates, mask_of):
    """Log-probs of the masked tokens of each row; an empty source is no source."""
    loaded = load_model(folder, dtype=torch.float32)
    spec = loaded.backbone.spec
    contexts, targets = ([item.ids for item in loaded.tokenizer.encode(texts)] for texts in (sources, candidates))
    lengths = np.array([len(item) for item in targets])
    rows = np.arange(len(targets))
    masked = np.concatenate([mask_of(length) for length in lengths])
    plan = MaskPlan(rows, np.zeros_like(rows), lengths, masked)
    prefixes, windows = compose(spec, FULL, Sequences.build(contexts, rows, targets), plan)
    log_probs = Runner(loaded.backbone, token_budget=50).run(prefixes, windows, FULL)
    return np.split(log_probs, windows.wanted_offsets[1:-1])


def theirs(folder, sources, candidates, mask_of):
    """The same from transformers: its pair encoding, one padded batch, all logits."""
    from transformers import AutoModelForMaskedLM, PreTrainedTokenizerFast

    names = {"<mask>": "<pad>", "[MASK]": "[PAD]"}
    mask_token = json.loads((folder / "tokenizer_config.json").read_text())["mask_token"]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), mask_token=mask_token, pad_token=names[mask_token]
    )
    network = AutoModelForMaskedLM.from_pretrained(folder, attn_implementation="eager").eval()
    encoded = [
        tokenizer(*([source, candidate] if source else [candidate]), return_token_type_ids=True)
        for source, candidate in zip(sources, candidates, strict=True)
    ]
    expected, places = [], []
    for source, item in zip(sources, encoded, strict=True):
        number = 1 if source else 0
        target = np.flatnonzero([sequence == number for sequence in item.sequence_ids()])
        places.append(target[mask_of(len(target))])
        expected.append(np.array(item["input_ids"])[places[-1]])
        for place in places[-1]:
            item["input_ids"][place] = tokenizer.mask_token_id
    batch = tokenizer.pad(
        {key: [item[key] for item in encoded] for key in ("input_ids", "attention_mask", "token_type_ids")},
        return_tensors="pt",
    )
    if getattr(network.config, "type_vocab_size", 1) < 2 or network.config.model_type == "distilbert":
        del batch["token_type_ids"]
    with torch.no_grad():
        log_probs = network(**batch).logits.double().log_softmax(-1)
    return [log_probs[row, place, ids].numpy() for row, (place, ids) in enumerate(zip(places, expected, strict=True))]


def every_second(length):
    return np.arange(length) % 2 == 0


@pytest.mark.parametrize("family", BERT_FAMILIES)
def test_log_probs_equal_transformers(folders, family):
    got = ours(folders[family], SOURCES, CANDIDATES, every_second)
    expected = theirs(folders[family], SOURCES, CANDIDATES, every_second)
    for row, values in enumerate(expected):
        assert len(values) >= 2 and values.std() > 0.1
        np.testing.assert_allclose(got[row], values, atol=1e-5)


@pytest.mark.parametrize("family", BERT_FAMILIES)
def test_every_position_can_be_used_and_no_more(folders, family):
    scorer = DiffScorer(folders[family], dtype=torch.float32)
    backbone = scorer.backbone
    assert isinstance(backbone, OpaqueBackbone) == (family == "modernbert")
    assert list(scorer.spec.patterns) == ["full"] and scorer.spec.pattern("full").position_limit == 64
    assert len(backbone.vocabulary_weight) == scorer.tokenizer.vocab_size + PADDED_ROWS
    room = 64 - 2
    long = [" ".join(["3"] * 100)[: 2 * n - 1] for n in (room, room + 1)]
    while len(scorer.tokenizer.encode([long[0]])[0].ids) > room:  # byte-level: a space may be a separate token
        long = [text[:-1] for text in long]
    long = [long[0], long[0] + " 3 3"]
    table = scorer.score(None, long, direction="marginal", draws=1)
    assert table.status == ["ok", "too_long"] and np.isnan(table.scores[1])
    np.testing.assert_allclose(
        ours(folders[family], [""], long[:1], every_second)[0],
        theirs(folders[family], [""], long[:1], every_second)[0],
        atol=1e-5,
    )
    half = room // 2
    pair = scorer.score(["3 " * half], ["3 " * half], draws=1)
    assert pair.status == ["too_long"]  # the separator needs room, too
    # The words of a template are a context by themselves, and so meet a separator.
    template = Template("words", "3{source}3{candidate}", "3{candidate}3{source}")
    filled = [" ".join(["3"] * count) for count in range(room - 12, room)]
    found = scorer.score(None, filled, direction="marginal", draws=1, template=template).status
    assert set(found) == {"ok", "too_long"} and found == sorted(found)
    with pytest.raises(UnsupportedPatternError):
        scorer.score(SOURCES, CANDIDATES, attention="prefix")


def test_scores_of_a_network_run_by_transformers_do_not_depend_on_neighbours(folders):
    scorer = DiffScorer(folders["modernbert"], dtype=torch.float32)
    together = scorer.score(SOURCES[:2], CANDIDATES[:2], draws=9)
    for row in range(2):
        alone = scorer.score(SOURCES[row : row + 1], CANDIDATES[row : row + 1], draws=9)
        np.testing.assert_allclose(alone.scores, together.scores[row], atol=1e-5)


def test_rotary_positions_stay_in_float32_whatever_the_type(folders):
    """transformers also keeps their frequencies in float32; 16 bits would rotate far positions by another angle."""
    network = load_model(folders["modernbert"], dtype=torch.bfloat16).backbone._network
    buffers = {name: item for name, item in network.named_buffers() if item.is_floating_point()}
    assert buffers and {item.dtype for item in buffers.values()} == {torch.float32}
    assert {item.dtype for item in network.parameters()} == {torch.bfloat16}
    wide, narrow = (
        DiffScorer(folders["modernbert"], dtype=item).score(SOURCES[:2], CANDIDATES[:2], draws=9).scores
        for item in (torch.float32, torch.bfloat16)
    )
    np.testing.assert_allclose(narrow, wide, atol=0.1)


@pytest.mark.parametrize("device", [None, 5, "meta", "cuda:99"])
def test_an_unusable_device_is_refused(device):
    with pytest.raises(InputError, match=f"device '{device}' cannot be used here"):
        DiffScorer("mini", device=device)


def test_a_device_without_room_for_the_weights_says_so(folders, monkeypatch):
    def full(*arguments, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("diffscore_fast.backbones.bert.BertBackbone.to", full)
    with pytest.raises(DeviceMemoryError, match="cpu has no room for the weights of 'bert'"):
        load_model(folders["bert"])


def test_old_names_poolers_and_tied_copies_load(folders, tmp_path):
    folder = shutil.copytree(folders["bert"], tmp_path / "old")
    weights = load_file(folder / "model.safetensors")
    renamed = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): item
        for name, item in weights.items()
    }
    bias = renamed.pop("cls.predictions.bias")
    renamed |= {
        "cls.predictions.decoder.bias": bias,
        "bert.pooler.dense.bias": torch.zeros(32),
        "cls.seq_relationship.bias": torch.zeros(2),
    }
    save_file(renamed, folder / "model.safetensors")
    np.testing.assert_array_equal(
        np.concatenate(ours(folder, SOURCES, CANDIDATES, every_second)),
        np.concatenate(ours(folders["bert"], SOURCES, CANDIDATES, every_second)),
    )


def test_byte_level_spans_lie_on_characters_and_control_names_stay_text(folders):
    tokenizer = load_model(folders["roberta"]).tokenizer
    text = "Ça coûte 3 €, 🙃 </s> <mask><s>"
    encoded = tokenizer.encode([text])[0]
    assert not set(encoded.ids.tolist()) & {0, 1, 2, 3, tokenizer.mask_id}
    covered = np.zeros(len(text), dtype=bool)
    for token, (start, end) in zip(encoded.ids, encoded.spans, strict=True):
        assert 0 <= start <= end <= len(text)
        assert start < end or tokenizer._tokenizer.decode([token]).isspace()
        covered[start:end] = True
    assert all(flag or character.isspace() for flag, character in zip(covered, text, strict=True))
    smiling = [tuple(span) for span in encoded.spans if text[span[0] : span[1]] == "🙃"]
    assert len(smiling) >= 2 and len(set(smiling)) == 1
    assert [len(item.ids) > 0 for item in tokenizer.encode(["", " \n", " a"])] == [False, False, True]


def test_a_mask_that_its_file_does_not_call_special_is_refused(folders, tmp_path):
    """`encode_special_tokens` protects only special tokens: a mask typed in a text would become the mask token."""
    stored = json.loads((folders["bert"] / "tokenizer.json").read_text())
    for token in stored["added_tokens"]:
        token["special"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(stored))
    with pytest.raises(CheckpointError, match="out of ordinary text"):
        TextTokenizer(tmp_path / "tokenizer.json", "[MASK]", "[CLS]")


def test_a_tokenizer_that_reads_control_tokens_out_of_text_is_refused(tmp_path):
    """As XLM-R's: control tokens are pieces of the unigram vocabulary, with the best score of all pieces."""
    letters = [(letter, -5.0) for letter in "▁abcdefghijklmnopqrstuvwxyz<>/"]
    tokenizer = Tokenizer(models.Unigram([("<s>", 0.0), ("<unk>", 0.0), *letters, ("<mask>", 0.0)], 1))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.add_special_tokens(["<s>", "<unk>", AddedToken("<mask>", lstrip=True)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="out of ordinary text"):
        TextTokenizer(tmp_path / "tokenizer.json", "<mask>", "<s>")


def test_a_word_list_is_converted_and_an_empty_folder_is_not(folders, tmp_path):
    folder = shutil.copytree(folders["bert"], tmp_path / "words")
    vocab = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.txt").write_text("\n".join(sorted(vocab, key=vocab.get)), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer", "do_lower_case": false}')
    texts = SENTENCES[:2]
    for got, expected in zip(
        *(load_model(item).tokenizer.encode(texts) for item in (folder, folders["bert"])), strict=True
    ):
        np.testing.assert_array_equal(got.ids, expected.ids)
        np.testing.assert_array_equal(got.spans, expected.spans)


@pytest.mark.parametrize(
    ("architecture", "model_type", "message"),
    [
        ("GPT2LMHeadModel", "gpt2", "is a causal language model; a masked language model .* is needed"),
        ("LlamaForCausalLM", "llama", "is a causal language model"),
        ("RobertaForSequenceClassification", "roberta", r"is a sequence classifier; .*\(RobertaForMaskedLM\)"),
        ("ElectraForPreTraining", "electra", "without a masked-LM head"),
        ("BartForConditionalGeneration", "bart", "is a sequence-to-sequence model"),
        ("DistilBertModel", "distilbert", "is an encoder without a masked-LM head"),
        ("SEDD", "sedd", "SEDD is conditioned on the noise level sigma"),
        ("DiffusionGemmaForBlockDiffusion", "diffusion_gemma", r"uniform noise\) and has no mask token"),
        ("LLaDAMoEModelLM", "llada", "LLaDAMoEModelLM is a mixture of experts"),
        ("LLaDA2MoeModelLM", "llada2_moe", "is a mixture of experts"),
        ("Fast_dLLM_QwenForCausalLM", "Fast_dLLM_Qwen", "a block's first token from the block before it"),
    ],
)
def test_other_kinds_of_checkpoints_are_refused_by_name(tmp_path, architecture, model_type, message):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], "model_type": model_type}))
    with pytest.raises(CheckpointError, match=message):
        load_model(tmp_path)


def test_a_head_that_was_never_trained_is_refused(folders, tmp_path):
    """transformers would fill it with random numbers."""
    folder = shutil.copytree(folders["modernbert"], tmp_path / "headless")
    weights = load_file(folder / "model.safetensors")
    del weights["head.dense.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="missing or of another shape: head.dense.weight"):
        load_model(folder)


def test_without_transformers_its_models_are_refused_and_the_others_load(folders, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(CheckpointError, match=r"pip install 'diffscore_fast\[transformers\]'"):
        load_model(folders["modernbert"])
    assert load_model(folders["roberta"]).backbone.spec.family == "roberta"


def test_a_name_is_looked_up_in_the_local_cache_by_revision(folders, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("socket.socket", None)  # any use of the network fails
    repository = tmp_path / "models--some--model"
    for revision, family in (("a" * 40, "bert"), ("b" * 40, "electra")):
        shutil.copytree(folders[family], repository / "snapshots" / revision)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    (repository / "refs" / "v2").write_text("b" * 40)
    specs = [load_model(f"some/model{revision}").backbone.spec for revision in ("", "@v2", "@" + "b" * 40)]
    assert [spec.family for spec in specs] == ["bert", "electra", "electra"]
    assert {spec.name for spec in specs} == {"some/model"}
    with pytest.raises(CheckpointError, match="nothing is downloaded here, `hf download some/other` would"):
        load_model("some/other")
