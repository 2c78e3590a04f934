"""Loading a model of any family: dtype, torch's global state, Git LFS pointers and quantised weights."""

from __future__ import annotations

import json
import random
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from diffscore_fast import DiffScorer, LikelihoodBounds
from diffscore_fast.backbones import loader as load
from diffscore_fast.backbones.config import EMBEDDED_MODELS
from diffscore_fast.backbones.loader import default_dtype, load_model
from diffscore_fast.backbones.rotary import rotary_frequencies
from diffscore_fast.backbones.weights import save_weights, weight_files
from diffscore_fast.errors import CheckpointError, DeviceMemoryError, InputError
from tests.support.checkpoints import BERT_FAMILIES, save_checkpoint, save_diffusion_model

DIFFUSION = ("llada", "Dream")
SOURCES = ["The cat sat on the mat.", "Two people died."]
CANDIDATES = ["A cat sat.", "Two people died on a cruise ship."]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("load")
    found = {family: save_checkpoint(family, root / family) for family in BERT_FAMILIES}
    return found | {family: save_diffusion_model(family, root / family) for family in DIFFUSION}


@pytest.fixture
def torch_defaults():
    """Leaves torch's defaults as they were."""
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)


def copied(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "copy", ignore=shutil.ignore_patterns("twin"))


def scores(model):
    return DiffScorer(model, dtype=torch.float32).score(SOURCES, CANDIDATES, draws=5).scores


def random_streams():
    kind, keys, *rest = np.random.get_state(legacy=True)
    return [torch.get_rng_state().tolist(), random.getstate(), kind, np.array(keys).tolist(), rest]


def change_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def change_weights(folder, change):
    """Apply `change` to the dict of tensors of the file that holds the most of them."""
    path = max(folder.glob("*.safetensors"), key=lambda item: item.stat().st_size)
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})


@pytest.mark.parametrize("native", [False, True])
def test_the_default_dtype_of_a_cpu_is_float32_whatever_the_processor(monkeypatch, folders, native):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512" if native else "AVX2")
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: native)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: native)
    assert load.multiplies_bfloat16() is native
    assert load_model("mini").backbone.dtype == torch.float32
    assert load_model(folders["llada"]).backbone.dtype == torch.float32


def test_the_default_dtype_of_another_device_is_that_of_most_weights(folders, tmp_path):
    device = torch.device("xpu")
    assert default_dtype(device, weight_files(folders["llada"])) == torch.float32
    assert default_dtype(device, weight_files(EMBEDDED_MODELS["mini"])) == torch.float32  # scales of 8-bit rows
    for dtype in (torch.bfloat16, torch.float16):
        path = tmp_path / f"{dtype}.safetensors"
        save_file({"a": torch.zeros(9, 9, dtype=dtype), "b": torch.zeros(80), "c": torch.zeros(99).long()}, path)
        assert default_dtype(device, [path]) == dtype
        assert default_dtype("cpu", [path]) == torch.float32


@pytest.mark.parametrize("family", [*BERT_FAMILIES, *DIFFUSION, "mini"])
def test_torch_defaults_change_no_score_and_loading_changes_no_random_stream(folders, family, torch_defaults):
    model = folders.get(family, family)
    expected = scores(model)
    before = random_streams()
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        rotary_frequencies.cache_clear()
        torch.set_default_dtype(dtype)
        np.testing.assert_array_equal(scores(model), expected)
        assert torch.get_default_dtype() == dtype
    torch.set_default_dtype(torch.float32)
    rotary_frequencies.cache_clear()
    torch.set_default_device("meta")
    np.testing.assert_array_equal(scores(model), expected)
    torch.set_default_device(None)
    for context in (torch.inference_mode(), torch.no_grad()):
        with context:
            np.testing.assert_array_equal(scores(model), expected)
    assert random_streams() == before


def test_torch_defaults_change_no_bound(torch_defaults):
    def found():
        bounds = LikelihoodBounds("mini", block_size=4, dtype=torch.float32)
        table, exact = bounds.estimate(CANDIDATES, orders=4, surrogate_orders=4), bounds.exact(CANDIDATES)
        return np.array([table.lower, table.upper, exact.exact])

    expected, before = found(), random_streams()
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("meta")
    np.testing.assert_array_equal(found(), expected)
    assert random_streams() == before


@pytest.mark.parametrize("model", [5, None, "", " ", b"mini", ["mini"], 0.5, True])
@pytest.mark.parametrize("load_it", [DiffScorer, LikelihoodBounds, load_model], ids=lambda item: item.__name__)
def test_what_names_no_model_is_refused(load_it, model):
    with pytest.raises(InputError, match="model must be a folder or a name such as 'mini', not"):
        load_it(model)


@pytest.mark.parametrize(
    "error",
    [RuntimeError("DefaultCPUAllocator: can't allocate memory"), MemoryError(), RuntimeError("std::bad_alloc")],
    ids=repr,
)
@pytest.mark.parametrize("family", ["bert", "llada", "modernbert"])
def test_memory_that_runs_out_while_loading_is_the_typed_error(folders, monkeypatch, family, error):
    def full(*arguments, **options):
        raise error

    target = {
        "bert": "backbones.loader.fill_bert",
        "llada": "backbones.weights.StoredTensors.take",
        "modernbert": "backbones.transformers_adapter.TransformersAdapter.__init__",
    }[family]
    monkeypatch.setattr(f"diffscore_fast.{target}", full)
    with pytest.raises(DeviceMemoryError, match=f"cpu has no room for the weights of '{family}' in torch.float32"):
        load_model(folders[family])


def test_memory_that_transformers_lacks_is_the_typed_error(folders, monkeypatch):
    import transformers

    def full(*arguments, **options):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(transformers.AutoModelForMaskedLM, "from_pretrained", full)
    with pytest.raises(DeviceMemoryError, match="no room for the weights"):
        load_model(folders["modernbert"])


@pytest.mark.parametrize("family", [*BERT_FAMILIES, *DIFFUSION])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2])
def test_quantised_weights_without_scales_are_refused_by_name(folders, tmp_path, family, dtype):
    folder = copied(folders[family], tmp_path)
    chosen = []

    def quantise(weights):
        chosen.append(next(name for name, item in sorted(weights.items()) if item.dim() == 2))
        weights[chosen[0]] = weights[chosen[0]].to(dtype)

    change_weights(folder, quantise)
    with pytest.raises(CheckpointError) as caught:
        load_model(folder)
    assert chosen[0] in str(caught.value)
    if dtype != torch.int8:
        assert "of a quantised checkpoint, load the original one" in str(caught.value)


def test_eight_bit_rows_with_their_scales_and_old_position_ids_load(folders, tmp_path):
    folder = copied(folders["bert"], tmp_path)
    weights = load_file(folder / "model.safetensors")
    save_weights(folder / "model.safetensors", weights, eight_bit=True)
    change_weights(folder, lambda item: item.update({"bert.embeddings.position_ids": torch.arange(64)[None]}))
    np.testing.assert_allclose(scores(folder), scores(folders["bert"]), atol=0.1)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"


@pytest.mark.parametrize("family", ["bert", "modernbert", "llada"])
@pytest.mark.parametrize("name", ["weights", "tokenizer.json", "config.json", "tokenizer_config.json"])
def test_a_git_lfs_pointer_is_called_one(folders, tmp_path, family, name):
    folder = copied(folders[family], tmp_path)
    if name == "weights":
        name = min(path.name for path in folder.glob("*.safetensors"))
    (folder / name).write_text(POINTER)
    with pytest.raises(CheckpointError, match=f"{name}: a Git LFS pointer, not the file itself; fetch it with"):
        load_model(folder)


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "vocab.json", "merges.txt"])
def test_a_pointer_beside_them_is_called_one(folders, tmp_path, name):
    folder = copied(folders["Dream"], tmp_path)
    (folder / name).write_text(POINTER)
    with pytest.raises(CheckpointError, match=f"{name}: a Git LFS pointer"):
        load_model(folder)
    readme = copied(folders["bert"], tmp_path / "other")
    (readme / "pytorch_model.bin").write_text(POINTER)  # not needed
    assert load_model(readme).backbone.dtype == torch.float32


HEADS = {
    "bert": "cls.predictions.decoder.weight",
    "distilbert": "vocab_projector.weight",
    "roberta": "lm_head.decoder.weight",
    "electra": "generator_lm_head.weight",
    "modernbert": "decoder.weight",
}
WORDS = {
    "bert": "bert.embeddings.word_embeddings.weight",
    "distilbert": "distilbert.embeddings.word_embeddings.weight",
    "roberta": "roberta.embeddings.word_embeddings.weight",
    "electra": "electra.embeddings.word_embeddings.weight",
    "modernbert": "model.embeddings.tok_embeddings.weight",
}


@pytest.mark.parametrize("family", list(HEADS))
def test_an_untied_head_must_be_stored_and_an_equal_one_is_accepted(folders, tmp_path, family):
    head, words = HEADS[family], WORDS[family]
    expected = scores(folders[family])
    folder = copied(folders[family], tmp_path)
    change_weights(folder, lambda weights: weights.update({head: weights[words].clone()}))
    np.testing.assert_array_equal(scores(folder), expected)  # tied, and stored twice
    change_config(folder, tie_word_embeddings=False)
    if family != "modernbert":
        np.testing.assert_array_equal(scores(folder), expected)  # of its own, and equal
    change_weights(folder, lambda weights: weights.pop(head))
    with pytest.raises(CheckpointError, match=f"missing.*{head}|{head} is missing"):
        load_model(folder)
    change_config(folder, tie_word_embeddings=True)
    np.testing.assert_array_equal(scores(folder), expected)
    if family != "modernbert":
        change_weights(folder, lambda weights: weights.update({head: weights[words] + 1}))
        with pytest.raises(CheckpointError, match=f"{head} differs from {words}"):
            load_model(folder)
