"""MDLM and BD3-LM: folding, what is read and refused, bounds."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from diffscore_fast import DiffScorer, LikelihoodBounds
from diffscore_fast.backbones.loader import load_model
from diffscore_fast.errors import CheckpointError, UnsupportedPatternError
from diffscore_fast.ops import int8_unavailable
from tests.support.dit_checkpoints import CONDITION, HEADS, LAYERS, LENGTH, SIZE, save_dit_model

TEXTS = ["The cat sat on the mat.", "Two people died.", "Ça coûte 3 €."]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("dit")
    found = {family: save_dit_model(family, root / family) for family in ("mdlm", "bd3lm")}
    return found | {"bd3lm-8": save_dit_model("bd3lm", root / "bd3lm-8", 8)}


def rotated(x):
    """Queries or keys [n, H, d] at positions 0 to n - 1."""
    half = x.shape[-1] // 2
    frequencies = 1.0 / 10_000 ** (torch.arange(0, 2 * half, 2).float() / (2 * half))
    angles = torch.arange(len(x)).float()[:, None, None] * frequencies  # in float32, as the engine has them
    first, second = x.chunk(2, dim=-1)
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
    )


def attended(query, key, value):
    weights = torch.einsum("qhd,khd->hqk", query, key).div(math.sqrt(query.shape[-1])).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value)


def unfolded_logits(state, ids):
    """The conditioned network as the papers define it, at noise level 0; float64."""
    state = {name.removeprefix("backbone."): tensor.double() for name, tensor in state.items()}

    def linear(name, x):
        return functional.linear(x, state[f"{name}.weight"], state.get(f"{name}.bias"))

    def normed(name, x, shift, scale):
        return functional.layer_norm(x, [SIZE], eps=1e-5) * state[f"{name}.weight"] * (1 + scale) + shift

    frequencies = torch.exp(-math.log(10_000) * torch.arange(128).double() / 128)
    embedded = torch.cat([torch.cos(0 * frequencies), torch.sin(0 * frequencies)])
    condition = functional.silu(linear("sigma_map.mlp.2", functional.silu(linear("sigma_map.mlp.0", embedded))))
    x = state["vocab_embed.embedding"][ids]
    for index in range(LAYERS):
        at = f"blocks.{index}."
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = linear(f"{at}adaLN_modulation", condition).chunk(6)
        query, key, value = (
            linear(f"{at}attn_qkv", normed(f"{at}norm1", x, shift, scale)).view(-1, 3, HEADS, 8).unbind(1)
        )
        x = x + gate * linear(f"{at}attn_out", attended(rotated(query), rotated(key), value).flatten(1))
        inner = linear(f"{at}mlp.0", normed(f"{at}norm2", x, mlp_shift, mlp_scale))
        x = x + mlp_gate * linear(f"{at}mlp.2", functional.gelu(inner, approximate="tanh"))
    shift, scale = linear("output_layer.adaLN_modulation", condition).chunk(2)
    return linear("output_layer.linear", normed("output_layer.norm_final", x, shift, scale))


def test_folded_and_unfolded_weights_agree_in_float64(folders):
    network = load_model(folders["mdlm"], dtype=torch.float64).backbone
    ids = torch.arange(5, 29)
    positions = torch.arange(len(ids))
    hidden = network.embed(ids, positions, torch.zeros_like(ids))
    for layer in range(LAYERS):
        hidden = network.attention_outputs(layer, hidden, attended(*network.attention_inputs(layer, hidden, positions)))
    folded = functional.linear(network.head_transform(hidden), network.vocabulary_weight, network.vocabulary_bias)
    expected = unfolded_logits(load_file(folders["mdlm"] / "model.safetensors"), ids)
    assert expected.dtype == torch.float64 and expected.std() > 0.5
    assert (folded - expected).abs().max() < 1e-12


def test_patterns_mask_and_start(folders):
    mdlm, bd3lm = (load_model(folders[family]).backbone.spec for family in ("mdlm", "bd3lm-8"))
    assert list(mdlm.patterns) == ["full"] and mdlm.pattern("full").position_limit == LENGTH
    assert list(bd3lm.patterns) == ["block"] and bd3lm.pattern("block", 8).default_block_size == 8
    for spec in (mdlm, bd3lm):
        assert spec.mask_id == spec.vocab_size - 1 and spec.excluded_ids == (spec.mask_id,)
        assert spec.start_id == spec.mask_id - 1
        assert spec.logit_shift == 0
    with pytest.raises(UnsupportedPatternError, match="not trained with block size 4; it has: 8"):
        bd3lm.pattern("block", 4)


def test_the_start_token_takes_a_place_of_block_0(folders):
    """Block 0 holds L' - 1 tokens of text."""
    scorer = LikelihoodBounds(folders["bd3lm"], block_size=4)
    tokens = len(scorer.tokenize(TEXTS[:1])[0])
    table = scorer.exact(TEXTS[:1])
    assert tokens == 7 and table.blocks.num_tokens.tolist() == [3, 4]


@pytest.mark.parametrize("family", ["bd3lm", "bd3lm-8"])
def test_bounds_hold_the_exact_value(folders, family):
    size = 8 if family.endswith("8") else 4
    scorer = LikelihoodBounds(folders[family], block_size=size)
    exact = scorer.exact(TEXTS).exact
    table = scorer.estimate(TEXTS, orders=64, surrogate_orders=64)
    assert (table.lower - 4 * table.stderr_lower <= exact).all() and (
        table.upper + 4 * table.stderr_upper >= exact
    ).all()


def test_the_exact_value_of_a_short_text_is_the_mean_over_all_orders(folders):
    """A text of L' - 1 tokens is block 0; every order's likelihood is a product of the network's conditionals."""
    scorer = LikelihoodBounds(folders["bd3lm"], block_size=4)
    text = next(item for item in ("abc", "cat", "a b") if len(scorer.tokenize([item])[0]) == 3)
    ids = scorer.tokenize([text])[0].tolist()
    state = load_file(folders["bd3lm"] / "model.safetensors")
    spec = scorer.spec
    likelihoods = []
    for order in itertools.permutations(range(3)):
        line, total = [spec.start_id, *[spec.mask_id] * 3], 0.0
        for place in order:
            logits = unfolded_logits(state, torch.tensor(line))[place + 1]
            logits[spec.mask_id] = -torch.inf
            total += float(logits.log_softmax(-1)[ids[place]])
            line[place + 1] = ids[place]
        likelihoods.append(total)
    assert np.std(likelihoods) > 0.1
    assert scorer.exact([text]).exact[0] == pytest.approx(np.log(np.mean(np.exp(likelihoods))), abs=2e-5)


@pytest.mark.parametrize("family", ["mdlm", "bd3lm"])
def test_scores_do_not_depend_on_neighbours(folders, family):
    scorer = DiffScorer(folders[family], dtype=torch.float32)
    together = scorer.score(TEXTS, TEXTS[::-1], draws=9)
    assert together.status == ["ok"] * 3
    for row in range(3):
        alone = scorer.score(TEXTS[row : row + 1], TEXTS[::-1][row : row + 1], draws=9)
        np.testing.assert_allclose(alone.scores, together.scores[row], atol=1e-6)


@pytest.mark.skipif(int8_unavailable(torch.device("cpu")) is not None, reason="int8 needs AVX-512 VNNI")
@pytest.mark.parametrize("family", ["mdlm", "bd3lm"])
def test_int8_is_near_float32(folders, family):
    wide, narrow = (DiffScorer(folders[family], dtype=item) for item in ("float32", "int8"))
    difference = narrow.score(TEXTS, TEXTS[::-1]).scores - wide.score(TEXTS, TEXTS[::-1]).scores
    assert 0 < np.abs(difference).max() < 0.2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"time_conditioning": True}, "conditioned on the noise level sigma"),
        ({"causal": True}, "causal = True: not supported"),
        ({"adaln": False}, "adaln = False: not supported"),
        ({"n_blocks": None}, "n_blocks must be a whole number above 0"),
        ({"block_size": 0}, "block_size must be a whole number above 0"),
        ({"n_heads": 5}, "32 dimensions and 5 heads do not fit together"),
        ({"cond_dim": CONDITION + 1}, r"sigma_map.mlp.0.weight is \[12, 256\], config.json wants \[13, 256\]"),
        ({"n_blocks": LAYERS + 1}, "missing .*blocks.2"),
        ({"n_blocks": LAYERS - 1}, "unexpected .*blocks.1"),
        ({"architectures": ["SEDD"]}, "SEDD is conditioned on the noise level sigma"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(tmp_path, changes, message):
    with pytest.raises(CheckpointError, match=message):
        load_model(save_dit_model("bd3lm", tmp_path / "model", **changes))


def test_gpt2s_tokenizer_is_found_in_the_cache_or_asked_for(folders, tmp_path, monkeypatch):
    folder = save_dit_model("mdlm", tmp_path / "model")
    expected = load_model(folder).tokenizer
    content = (folder / "tokenizer.json").read_bytes()
    (folder / "tokenizer.json").unlink()
    monkeypatch.setattr("diffscore_fast.backbones.tokenizer.cached_folder", lambda name: None)
    with pytest.raises(CheckpointError, match="`hf download openai-community/gpt2 tokenizer.json`"):
        load_model(folder)
    (tmp_path / "cached").mkdir()
    (tmp_path / "cached" / "tokenizer.json").write_bytes(content)
    monkeypatch.setattr("diffscore_fast.backbones.tokenizer.cached_folder", {"gpt2": tmp_path / "cached"}.get)
    assert load_model(folder).tokenizer.sha256 == expected.sha256
    ids = expected.encode(["<|mask|> and <|endoftext|>"])[0].ids
    assert expected.mask_id not in ids and expected.start_id not in ids


def test_another_dtype_of_the_file_is_read(folders, tmp_path):
    """Weights in bfloat16 are folded in float64 all the same, and rounded once."""
    folder = save_dit_model("mdlm", tmp_path / "model")
    state = {name: item.bfloat16() for name, item in load_file(folder / "model.safetensors").items()}
    save_file(state, folder / "model.safetensors")
    layer = load_model(folder, dtype=torch.float32).backbone.layers[0]
    exact = load_model(folder, dtype=torch.float64).backbone.layers[0]
    assert torch.equal(layer.attention_norm.weight, exact.attention_norm.weight.float())
    assert json.loads((folder / "config.json").read_text())["model_type"] == "mdlm"
