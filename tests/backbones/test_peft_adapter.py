"""LoRA adapters in PEFT's layout: merged as the definition says, in the signature, refused where they do not belong."""

from __future__ import annotations

import json
import math
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file

from diffscore_fast import DiffScorer
from diffscore_fast.backbones.loader import load_model
from diffscore_fast.errors import CheckpointError, InputError
from tests.support.block_checkpoints import save_block_model

RANK, ALPHA = 3, 8
NAMES = [
    "model.layers.0.self_attn.k_proj",
    "model.layers.1.mlp.down_proj",
    "model.layers.1.self_attn.q_proj",
    "lm_head",
]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_block_model("sdar", tmp_path_factory.mktemp("base") / "model")


def save_adapter(folder, base, names=NAMES, rank=RANK, **changes):
    """A random adapter to those weights of the base, as `PeftModel.save_pretrained` writes it."""
    torch.manual_seed(1)
    weights, state = load_file(base / "model.safetensors"), {}
    for name in names:
        rows, columns = weights[f"{name}.weight"].shape
        state[f"base_model.model.{name}.lora_A.weight"] = 0.3 * torch.randn(rank, columns)
        state[f"base_model.model.{name}.lora_B.weight"] = 0.3 * torch.randn(rows, rank)
    folder.mkdir(parents=True)
    save_file(state, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": ALPHA,
        "bias": "none",
        "base_model_name_or_path": "org/base",
    }
    (folder / "adapter_config.json").write_text(json.dumps({**config, **changes}))
    return folder


@pytest.mark.parametrize("slope", [{}, {"use_rslora": True}])
def test_a_merged_model_is_the_base_with_the_products_added(base, tmp_path, slope):
    adapter = save_adapter(tmp_path / "adapter", base, **slope)
    scale = ALPHA / (math.sqrt(RANK) if slope else RANK)
    weights, added = load_file(base / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name in NAMES:
        a, b = (added[f"base_model.model.{name}.lora_{factor}.weight"].double() for factor in "AB")
        change = scale * b @ a
        assert change.abs().max() > 0.1
        weights[f"{name}.weight"] = (weights[f"{name}.weight"].double() + change).float()
    merged = save_block_model("sdar", tmp_path / "model")
    save_file(weights, merged / "model.safetensors")
    found, expected = load_model(base, adapter=adapter).backbone.state_dict(), load_model(merged).backbone.state_dict()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_the_adapter_is_in_the_signature_and_a_pickled_scorer_has_it(base, tmp_path):
    adapter = save_adapter(tmp_path / "adapter", base)
    plain, adapted = DiffScorer(base), DiffScorer(base, adapter=adapter)
    texts = ["The cat sat on the mat."], ["A cat sat."]
    without, with_it = plain.score(*texts), adapted.score(*texts)
    assert without.signature.adapter is None and "adapter" not in str(without.signature)
    assert len(with_it.signature.adapter) == 12 and f"adapter:{with_it.signature.adapter}" in str(with_it.signature)
    assert abs(without.scores[0] - with_it.scores[0]) > 0.01
    again = pickle.loads(pickle.dumps(adapted)).score(*texts)
    assert again.scores[0] == with_it.scores[0] and again.signature == with_it.signature
    kept = pickle.dumps(adapted)
    state = load_file(adapter / "adapter_model.safetensors")
    save_file({name: 2 * tensor for name, tensor in state.items()}, adapter / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="than when the scorer was pickled"):
        pickle.loads(kept)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"use_dora": True}, "use_dora = True: only plain LoRA"),
        ({"peft_type": "IA3"}, "peft_type = 'IA3'"),
        ({"bias": "all"}, "bias = 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"r": 0}, "r must be a number above 0, not 0"),
        ({"lora_alpha": None}, "lora_alpha must be a number above 0, not None"),
        ({"rank": 2}, r"rank 3; the model's .* is \[.*\]: the adapter was made for another model"),
    ],
)
def test_what_cannot_be_merged_is_refused(base, tmp_path, arguments, message):
    adapter = save_adapter(tmp_path / "adapter", base, **arguments)
    with pytest.raises(CheckpointError, match=message):
        load_model(base, adapter=adapter)


def test_an_adapter_of_another_model_is_refused(base, tmp_path, monkeypatch):
    other = save_block_model("a2d-qwen2", tmp_path / "other")
    adapter = save_adapter(tmp_path / "adapter", other, ["model.layers.0.self_attn.k_proj"])
    with pytest.raises(CheckpointError, match="the adapter was made for another model"):
        load_model(base, adapter=adapter)
    deeper = save_adapter(tmp_path / "deeper", base)
    state = load_file(deeper / "adapter_model.safetensors")
    save_file(
        {name.replace("layers.1", "layers.2"): item for name, item in state.items()},
        deeper / "adapter_model.safetensors",
    )
    with pytest.raises(CheckpointError, match=r"no weight of this model takes base_model.model.model.layers.2"):
        load_model(base, adapter=deeper)
    monkeypatch.setattr("diffscore_fast.backbones.config.cached_folder", lambda repository, revision=None: base)
    named = save_adapter(tmp_path / "named", base)
    assert load_model("org/base@main", adapter=named).adapter_sha256
    with pytest.raises(CheckpointError, match="an adapter of org/base, not of org/instruct"):
        load_model("org/instruct", adapter=named)


def test_pickled_weights_and_other_networks_are_refused(base, tmp_path):
    adapter = save_adapter(tmp_path / "adapter", base)
    with pytest.raises(InputError, match="an adapter cannot be merged into 'mini'"):
        load_model("mini", adapter=adapter)
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="must be in safetensors; adapter_model.bin may run code"):
        load_model(base, adapter=adapter)
    with pytest.raises(CheckpointError, match="no such file; an adapter must be in safetensors"):
        load_model(base, adapter=tmp_path / "none")
