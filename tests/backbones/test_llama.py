"""LLaDA and Dream, against transformers' Llama and Qwen2 of the same weights with the causal mask taken off."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from diffscore_fast import DiffScorer
from diffscore_fast.backbones.loader import load_model
from diffscore_fast.engine.plan import AttentionPattern, MaskPlan, Sequences
from diffscore_fast.engine.runner import Runner
from diffscore_fast.engine.windows import compose
from diffscore_fast.errors import CheckpointError, UnsupportedPatternError
from tests.support.checkpoints import PADDED_ROWS, save_diffusion_model

SOURCES = ["The cat sat on the mat.", "Two people died.", ""]
CANDIDATES = ["A cat sat.", "Two people died on a cruise ship.", "Ça coûte 3 €."]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("diffusion")
    return {family: save_diffusion_model(family, root / family) for family in ("llada", "Dream")}


def twin_log_probs(folder, spec, context, target, masked, attention):
    """One sequence, one boolean mask, all logits, by transformers."""
    import transformers

    network = transformers.AutoModelForCausalLM.from_pretrained(folder / "twin", attn_implementation="eager").eval()
    line = [*([] if spec.start_id is None else [spec.start_id]), *context, *target]
    base = len(line) - len(target)
    ids = [spec.mask_id if place >= base and masked[place - base] else token for place, token in enumerate(line)]
    blind = torch.zeros(len(line), len(line))
    if attention == "prefix":  # the rows before the window see one another alone
        first = max(base - spec.logit_shift, 0)
        blind[:first, first:] = torch.finfo(torch.float32).min
    with torch.no_grad():
        logits = network(torch.tensor([ids]), attention_mask=blind[None, None]).logits[0]
    log_probs = logits.double().log_softmax(-1)
    return np.array([float(log_probs[base + i - spec.logit_shift, target[i]]) for i in np.flatnonzero(masked)])


@pytest.mark.parametrize("attention", ["full", "prefix"])
@pytest.mark.parametrize("family", ["llada", "Dream"])
def test_log_probs_equal_those_of_transformers_without_its_causal_mask(folders, family, attention):
    loaded = load_model(folders[family], dtype=torch.float32)
    spec, pattern = loaded.backbone.spec, AttentionPattern(attention)
    contexts, targets = ([item.ids for item in loaded.tokenizer.encode(texts)] for texts in (SOURCES, CANDIDATES))
    rows, lengths = np.arange(3), np.array([len(item) for item in targets])
    masks = [np.arange(length) % 3 != 1 for length in lengths]
    plan = MaskPlan(rows, np.zeros_like(rows), lengths, np.concatenate(masks))
    laid_out = compose(spec, pattern, Sequences.build(contexts, rows, targets), plan)
    got = Runner(loaded.backbone, token_budget=20).run(*laid_out, pattern)
    expected = [
        twin_log_probs(folders[family], spec, list(context), list(target), mask, attention)
        for context, target, mask in zip(contexts, targets, masks, strict=True)
    ]
    assert np.concatenate(expected).std() > 0.1
    np.testing.assert_allclose(got, np.concatenate(expected), atol=2e-5)


def test_the_spec_of_each_family(folders):
    llada, dream = (load_model(folders[family], dtype=torch.float32) for family in ("llada", "Dream"))
    assert llada.backbone.spec.start_id is None and llada.backbone.spec.logit_shift == 0
    assert llada.backbone.spec.mask_id == 4 and llada.backbone.spec.default_pattern == "full"
    assert dream.tokenizer.token_name(dream.backbone.spec.start_id) == "<|beginoftext|>"
    assert dream.tokenizer.token_name(dream.backbone.spec.mask_id) == "<|mask|>"
    assert dream.backbone.spec.logit_shift == 1
    for loaded in (llada, dream):  # the normaliser goes over padded rows, too, as in the published code
        assert loaded.backbone.spec.vocab_size == loaded.tokenizer.vocab_size + PADDED_ROWS
        assert loaded.backbone.spec.pattern("prefix").position_limit == 64
        with pytest.raises(UnsupportedPatternError):
            loaded.backbone.spec.pattern("block", 4)
        with pytest.raises(CheckpointError, match="not a BERT network; it cannot be trained"):
            _ = loaded.bert


def test_a_vocabulary_without_tokenizer_json_spells_its_text(folders):
    tokenizer = load_model(folders["Dream"]).tokenizer
    for text in (*CANDIDATES, "I'll pay 300 €\n\n  now <|mask|> <|endoftext|>"):
        encoded = tokenizer.encode([text])[0]
        assert tokenizer._tokenizer.decode(encoded.ids.tolist()) == text
        assert tokenizer.mask_id not in encoded.ids


@pytest.mark.parametrize("family", ["llada", "Dream"])
@pytest.mark.parametrize("direction", ["conditional", "marginal", "pmi", "reverse"])
def test_scores_do_not_depend_on_neighbours(folders, family, direction):
    scorer = DiffScorer(folders[family], dtype=torch.float32)
    for attention in ("full", "prefix", "corrected"):
        if direction == "marginal" and attention == "corrected":
            continue
        together = scorer.score(SOURCES[:2], CANDIDATES[:2], direction=direction, attention=attention)
        assert together.status == ["ok", "ok"]
        for row in range(2):
            rows = slice(row, row + 1)
            alone = scorer.score(SOURCES[rows], CANDIDATES[rows], direction=direction, attention=attention)
            np.testing.assert_allclose(alone.scores, together.scores[rows], atol=1e-5)


@pytest.mark.parametrize("family", ["llada", "Dream"])
def test_bfloat16_is_near_float32(folders, family):
    wide, narrow = (DiffScorer(folders[family], dtype=item) for item in (torch.float32, torch.bfloat16))
    assert narrow.backbone.vocabulary_weight.dtype == torch.bfloat16
    difference = narrow.score(SOURCES[:2], CANDIDATES[:2]).scores - wide.score(SOURCES[:2], CANDIDATES[:2]).scores
    assert 0 < np.abs(difference).max() < 0.1


def test_logits_are_scaled_and_heads_tied_where_the_config_says_so(folders, tmp_path):
    scaled = save_diffusion_model("llada", tmp_path / "scaled", scale_logits=True)
    assert load_model(scaled).backbone.spec.logit_scale == pytest.approx(32**-0.5)
    with pytest.raises(
        CheckpointError, match="tensor model.transformer.ff_out.weight differs from model.transformer.wte"
    ):
        load_model(save_diffusion_model("llada", tmp_path / "tied", weight_tying=True))
    whole = {}
    for path in (tmp_path / "tied").glob("*.safetensors"):
        whole |= load_file(path)
        path.unlink()
    del whole["model.transformer.ff_out.weight"]
    save_file(whole, tmp_path / "tied" / "model.safetensors")
    backbone = load_model(tmp_path / "tied").backbone
    assert backbone.vocabulary_weight is backbone.token_embedding.weight


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llada", {"alibi": True}, "alibi = True: not supported in models of type 'llada'"),
        ("llada", {"block_type": "sequential"}, "block_type = 'sequential'"),
        ("llada", {"include_bias": True}, "include_bias"),
        ("llada", {"mlp_hidden_size": None}, "mlp_hidden_size must be a whole number above 0, at most .*, not None"),
        ("llada", {"n_heads": 5}, "do not fit together"),
        ("llada", {"d_model": 64}, "wants"),
        ("llada", {"n_layers": 3}, r"missing \['model.transformer.blocks.2"),
        ("llada", {"n_layers": 1}, r"unexpected \['model.transformer.blocks.1"),
        ("llada", {"mask_token_id": None}, "needs mask_token_id"),
        ("llada", {"mask_token_id": 100_000}, "no token 100000"),
        ("llada", {"mask_token_id": 1 << 40}, "no token"),
        ("llada", {"embedding_size": 10**30}, "embedding_size must be a whole number above 0, at most"),
        ("llada", {"n_layers": 10**6}, "at most 1,000"),
        ("llada", {"rope_theta": 10**30}, "rope_theta must be a number"),
        ("llada", {"architectures": 5}, "architectures must be a list of names"),
        ("Dream", {"mask_token_id": 3}, r"masks with '<\|mask\|>', token"),
        ("Dream", {"rope_scaling": {"type": "yarn"}}, "rope_scaling of type yarn: only plain rotary positions"),
        ("llada", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling of type linear"),
        ("Dream", {"rope_scaling": 2.0}, "rope_scaling must be an object or null"),
        (
            "llada",
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0}},
            "rope_parameters of type llama3",
        ),
        ("Dream", {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, "has rope_theta = 5.0, another"),
        ("Dream", {"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("Dream", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        ("Dream", {"rope_theta": None, "rope_parameters": {"rope_theta": "much"}}, "rope_theta must be a number"),
        ("Dream", {"tie_word_embeddings": True}, "lm_head.weight differs from model.embed_tokens.weight"),
        ("Dream", {"hidden_act": "gelu"}, "hidden_act"),
        ("Dream", {"architectures": ["Qwen2ForCausalLM"]}, "is a causal language model"),
    ],
)
def test_what_is_not_supported_is_refused(folders, tmp_path, family, changes, message):
    folder = shutil.copytree(folders[family], tmp_path / "changed", ignore=shutil.ignore_patterns("twin"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(CheckpointError, match=message):
        load_model(folder)


def test_a_shard_that_is_missing_or_damaged_is_named(folders, tmp_path):
    folder = shutil.copytree(folders["llada"], tmp_path / "shards", ignore=shutil.ignore_patterns("twin"))
    shard = folder / "model-00002-of-00002.safetensors"
    stored = shard.read_bytes()
    shard.write_bytes(stored[:100])
    with pytest.raises(CheckpointError, match="00002-of-00002.safetensors: not a readable safetensors file"):
        load_model(folder)
    shutil.copy(folder / "model-00001-of-00002.safetensors", shard)
    with pytest.raises(CheckpointError, match="is in another file, too"):
        load_model(folder)
    shard.unlink()
    with pytest.raises(CheckpointError, match="00002-of-00002.safetensors: no such file"):
        load_model(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    with pytest.raises(CheckpointError, match="names no files"):
        load_model(folder)
    (folder / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(CheckpointError, match="not an index of safetensors files"):
        load_model(folder)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"{}", b"[]", b'{"added_tokens": [1]}'])
def test_a_damaged_tokenizer_is_named(folders, tmp_path, content):
    folder = shutil.copytree(folders["llada"], tmp_path / "damaged", ignore=shutil.ignore_patterns("twin"))
    (folder / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tokenizer.json: not a readable tokenizer"):
        load_model(folder)


def rewritten(folder, change):
    """The folder with all its tensors in one file, after `change` to them by name."""
    whole = {}
    for path in folder.glob("*.safetensors"):
        whole |= load_file(path)
        path.unlink()
    change(whole)
    save_file(whole, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda item: item.int(), "is of torch.int32; weights must be float32"),
        (lambda item: item.to(torch.float8_e4m3fn), "is of torch.float8_e4m3fn"),
        (lambda item: item[:-2], r"q_proj.weight is \[30, 32\], config.json wants \[32, 32\]"),
        (lambda item: item[:, :5], r"q_proj.weight is \[32, 5\]"),
        (lambda item: item.flatten(), r"q_proj.weight is \[1024\]"),
    ],
)
def test_a_tensor_of_another_kind_or_shape_is_named(folders, tmp_path, change, message):
    folder = shutil.copytree(folders["llada"], tmp_path / "odd", ignore=shutil.ignore_patterns("twin"))
    name = "model.transformer.blocks.0.q_proj.weight"
    with pytest.raises(CheckpointError, match=message):
        load_model(rewritten(folder, lambda whole: whole.update({name: change(whole[name]).contiguous()})))


def test_a_stacked_part_may_not_make_up_for_another(folders, tmp_path):
    folder = shutil.copytree(folders["llada"], tmp_path / "swapped", ignore=shutil.ignore_patterns("twin"))

    def shift(whole):
        gate, up = (f"model.transformer.blocks.0.{name}.weight" for name in ("ff_proj", "up_proj"))
        whole[gate], whole[up] = whole[gate][:-2].clone(), torch.cat([whole[up], whole[gate][-2:]])

    with pytest.raises(CheckpointError, match="ff_proj.weight is"):
        load_model(rewritten(folder, shift))


def test_weights_do_not_change_with_their_file(folders, tmp_path):
    folder = shutil.copytree(folders["llada"], tmp_path / "mapped", ignore=shutil.ignore_patterns("twin"))
    rewritten(folder, lambda whole: None)
    backbone = load_model(folder, dtype=torch.float32).backbone
    before = {name: item.clone() for name, item in backbone.state_dict().items()}
    stored = (folder / "model.safetensors").stat().st_size
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(stored // 2)
        file.write(b"\0" * (stored - stored // 2))
    for name, item in backbone.state_dict().items():
        assert torch.equal(item, before[name])


def test_a_model_with_fewer_rows_than_tokens_is_refused(folders, tmp_path):
    folder = shutil.copytree(folders["llada"], tmp_path / "few", ignore=shutil.ignore_patterns("twin"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"embedding_size": 100}))

    def cut(whole):
        for name in ("model.transformer.wte.weight", "model.transformer.ff_out.weight"):
            whole[name] = whole[name][:100].clone()

    with pytest.raises(CheckpointError, match="tokens, the model only 100"):
        load_model(rewritten(folder, cut))


def test_no_text_spells_an_added_token_of_dream(folders, tmp_path):
    """Dream's own tokenizer encodes text to added tokens that its files do not mark as special, such as <tool_call>."""
    folder = shutil.copytree(folders["Dream"], tmp_path / "calls", ignore=shutil.ignore_patterns("twin"))
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    last = max(map(int, config["added_tokens_decoder"])) + 1
    config["added_tokens_decoder"][str(last)] = {
        **config["added_tokens_decoder"][str(last - 1)],
        "content": "<tool_call>",
        "special": False,
    }
    path.write_text(json.dumps(config))
    encoded = load_model(folder).tokenizer.encode(["a <tool_call> b"])[0]
    assert last not in encoded.ids and len(encoded.ids) > 5


def test_dream_without_a_start_token_is_refused(folders, tmp_path):
    folder = shutil.copytree(folders["Dream"], tmp_path / "startless", ignore=shutil.ignore_patterns("twin"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["bos_token"]
    for changed in (config, config | {"bos_token": "<|nope|>"}):  # which the conversion would invent
        (folder / "tokenizer_config.json").write_text(json.dumps(changed))
        with pytest.raises(CheckpointError, match="names no bos_token"):
            load_model(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000}},  # the same, stated twice
        {"rope_theta": None, "rope_scaling": {"type": "default", "rope_theta": 1e6}},
        {"rope_scaling": {"type": "default"}},
        {"rope_scaling": {"rope_type": "default", "type": "default"}, "rope_parameters": None},
    ],
)
def test_plain_rotary_positions_are_read_wherever_they_are_stated(folders, tmp_path, changes):
    expected = DiffScorer(folders["Dream"]).score(SOURCES[:2], CANDIDATES[:2], draws=5).scores
    folder = shutil.copytree(folders["Dream"], tmp_path / "stated", ignore=shutil.ignore_patterns("twin"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    got = DiffScorer(folder).score(SOURCES[:2], CANDIDATES[:2], draws=5).scores
    np.testing.assert_array_equal(got, expected)
    other = json.loads(json.dumps(config | changes).replace("1000000", "100"))
    (folder / "config.json").write_text(json.dumps(other))
    moved = DiffScorer(folder).score(SOURCES[:2], CANDIDATES[:2], draws=5).scores
    assert np.abs(moved - expected).max() > 1e-4  # a base that is stated is the one that turns


@pytest.mark.parametrize("family", ["llada", "Dream"])
def test_a_stored_head_that_equals_the_tied_one_is_accepted_and_an_untied_one_must_be_there(tmp_path, family):
    field = {"llada": "weight_tying", "Dream": "tie_word_embeddings"}[family]
    words, head = {
        "llada": ("model.transformer.wte.weight", "model.transformer.ff_out.weight"),
        "Dream": ("model.embed_tokens.weight", "lm_head.weight"),
    }[family]
    folder = save_diffusion_model(family, tmp_path / "tied", **{field: True})
    rewritten(folder, lambda whole: whole.update({head: whole[words].clone()}))
    backbone = load_model(folder).backbone
    assert backbone.vocabulary_weight is backbone.token_embedding.weight
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {field: False}))
    np.testing.assert_array_equal(load_model(folder).backbone.vocabulary_weight, backbone.vocabulary_weight)
    rewritten(folder, lambda whole: whole.pop(head))
    with pytest.raises(CheckpointError, match=rf"missing \['{head}'\]"):
        load_model(folder)
