"""Adapting a causal language model to masks: adapters, the run and its checkpoints, the commands."""

from __future__ import annotations

import csv
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from diffscore_fast import DiffScorer
from diffscore_fast.backbones.adapter import read_adapter
from diffscore_fast.backbones.loader import load_model
from diffscore_fast.errors import CheckpointError, InputError
from diffscore_fast.training.__main__ import main
from diffscore_fast.training.adaptation import (
    HELD_OUT_PAIRS,
    LEFT_TO_RIGHT,
    Adaptation,
    AdaptationSettings,
    read_checkpoint,
    respelled,
)
from diffscore_fast.training.corpus import load_corpus, prepare_corpus
from diffscore_fast.training.lora import AdaptedLlama, write_merged_folder
from diffscore_fast.training.objective import masked_losses
from diffscore_fast.training.patterns import lay_prefix, pack_layouts
from diffscore_fast.training.run import rewind
from tests.support.checkpoints import save_causal_prefix_model

WORDS = ["cat", "mat", "died", "ship", "cruise", "people", "The", "two", "sat", "on", "in", "Rico", "Puerto"]
MIXTURE = replace(HELD_OUT_PAIRS, prefix_lengths=(4, 40), window_lengths=(4, 24))
SETTINGS = AdaptationSettings(
    steps=8,
    warmup_steps=3,
    tokens_per_step=160,
    rows_per_step=40,
    rank=4,
    left_to_right=0.3,
    mixture=MIXTURE,
    checkpoint_steps=3,
    evaluation_steps=4,
    evaluation_pairs=6,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_causal_prefix_model(tmp_path_factory.mktemp("adapt") / "model")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """40 articles of a title and three paragraphs of three sentences."""
    rng = np.random.default_rng(0)
    sentence = lambda: " ".join(rng.choice(WORDS, 6)).capitalize() + "."  # noqa: E731
    articles = [
        "\n".join([f"Title {number}", *(" ".join(sentence() for _ in range(3)) for _ in range(3))])
        for number in range(40)
    ]
    path = tmp_path_factory.mktemp("text") / "corpus.txt"
    path.write_text("\n\n".join(articles) + "\n")
    return path


@pytest.fixture(scope="module")
def corpus(folder, text, tmp_path_factory):
    return prepare_corpus(text, load_model(folder).tokenizer, tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def adaptation(folder, corpus, tmp_path):
    def make(run: str, settings: AdaptationSettings = SETTINGS, **more) -> Adaptation:
        loaded = load_model(folder, dtype=torch.float32)
        return Adaptation(loaded.backbone, loaded.tokenizer, *corpus.split(0.2), tmp_path / run, settings, **more)

    return make


def random_adapter(folder, rank=4):
    network = AdaptedLlama(load_model(folder, dtype=torch.float32).backbone, rank)
    generator = torch.Generator().manual_seed(1)
    return {name: 0.1 * torch.randn(item.shape, generator=generator) for name, item in network.learnt().items()}


def losses_of(network, seed=0):
    rng = np.random.default_rng(seed)
    prefix, window = rng.integers(10, 300, 12), rng.integers(10, 300, 9)
    layout = lay_prefix(prefix, window, np.stack([rng.random(9) < 0.5, np.ones(9, dtype=bool)]), network.spec)
    return masked_losses(network, pack_layouts([layout])).tokens


def test_a_fresh_adapter_changes_nothing(folder):
    base = load_model(folder, dtype=torch.float32).backbone
    with torch.no_grad():
        torch.testing.assert_close(losses_of(AdaptedLlama(base)), losses_of(base), atol=2e-5, rtol=0)


def test_merged_weights_are_the_adapted_network(folder, tmp_path):
    adapter = random_adapter(folder)
    base = load_model(folder, dtype=torch.float32).backbone
    network = AdaptedLlama(base, 4)
    network.load_adapter(adapter)
    checksum = write_merged_folder(folder, adapter, tmp_path / "merged")
    merged = load_model(tmp_path / "merged", dtype=torch.float32)
    assert merged.weights_sha256 == checksum
    with torch.no_grad():
        expected = losses_of(network)
        torch.testing.assert_close(losses_of(merged.backbone), expected, atol=5e-5, rtol=0)
        assert (losses_of(base) - expected).abs().max() > 0.05
    key = "model.layers.1.self_attn.k_proj"  # W + 2 B A, rows of keys after those of queries
    change = 2 * adapter[f"{key}.lora_B"] @ adapter[f"{key}.lora_A"]
    before, after = (item.layers[1].qkv.weight[32:48] for item in (base, merged.backbone))
    torch.testing.assert_close(after, before + change)
    torch.testing.assert_close(merged.backbone.token_embedding.weight[merged.backbone.spec.mask_id], adapter["maskvec"])


def test_an_adapter_of_another_model_is_refused(folder, tmp_path):
    adapter = random_adapter(folder)
    network = AdaptedLlama(load_model(folder, dtype=torch.float32).backbone, 8)
    with pytest.raises(CheckpointError, match=r"is \[4, .*is the rank another"):
        network.load_adapter(adapter)
    missing = {name: item for name, item in adapter.items() if "layers.2.mlp.down_proj.lora_B" not in name}
    with pytest.raises(CheckpointError, match="missing .*down_proj.lora_B"):
        network.load_adapter(missing)
    with pytest.raises(CheckpointError, match="do not belong to this model: .*down_proj.lora_B"):
        write_merged_folder(folder, missing, tmp_path / "out")
    with pytest.raises(CheckpointError, match="do not belong"):
        write_merged_folder(folder, {**adapter, "a.lora_A": torch.ones(1), "a.lora_B": torch.ones(1)}, tmp_path / "out")
    (tmp_path / "odd").write_bytes(b"{}")
    for path, message in ((tmp_path / "odd", "not a readable safetensors"), (tmp_path / "none", "no such file")):
        with pytest.raises(CheckpointError, match=message):
            read_adapter(path)


def test_only_the_adapter_learns(adaptation, folder):
    run = adaptation("run")
    before = {name: item.detach().clone() for name, item in run.network.named_parameters()}
    for _ in range(3):
        run.step()
    after = dict(run.network.named_parameters())
    moved = {name for name, item in after.items() if not torch.equal(item, before[name])}
    assert moved == {name for name in after if "lora_" in name} | {"mask_embedding"}


def test_parts_of_a_pair_are_texts_of_their_own(adaptation, corpus):
    """No white space around them, a line break between paragraphs, one between prefix and window by the layout."""
    run = adaptation("run")
    texts = []
    for seed in range(60):
        example = respelled(run.tokenizer, run.sampler, np.random.default_rng(seed))
        for part in (example.prefix, example.window):
            text = run.tokenizer.decode(part)
            assert text == text.strip()
            np.testing.assert_array_equal(run.tokenizer.encode([text])[0].ids, part)
            texts.append(text)
    assert any(".\n" in text for text in texts) and "" in texts
    start, stop = corpus.article_tokens(0)
    assert run.tokenizer.decode(corpus.tokens[start:stop]).startswith("Title 0\n")


def rows(path):
    with path.open() as file:
        return [{name: value for name, value in row.items() if name != "seconds"} for row in csv.DictReader(file)]


@pytest.mark.parametrize("killed_at", [1, 4, 5])
def test_a_killed_run_goes_on_to_the_same_numbers(adaptation, tmp_path, monkeypatch, killed_at):
    straight = adaptation("straight")
    straight.run()
    cut = adaptation("cut")
    step = cut.step

    def killed():
        if cut.step_number == killed_at:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(cut, "step", killed)
    with pytest.raises(KeyboardInterrupt):
        cut.run()
    with (tmp_path / "cut" / "log.csv").open("a") as file:
        file.write("7,12")  # what a kill leaves of a row
    (tmp_path / "cut" / "checkpoint.pt.new").write_bytes(b"half a checkpoint")
    resumed = adaptation("cut")
    assert resumed.step_number == killed_at // 3 * 3
    resumed.run()
    for name in ("log.csv", "evaluation.csv"):
        assert rows(tmp_path / "cut" / name) == rows(tmp_path / "straight" / name)
    assert len(rows(tmp_path / "cut" / "log.csv")) == 8
    assert [row["step"] for row in rows(tmp_path / "cut" / "evaluation.csv")] == ["0", "4", "8"]
    for name, item in straight.network.learnt().items():
        assert torch.equal(item, resumed.network.learnt()[name])


def test_a_finished_run_stays_as_it_is(adaptation, tmp_path):
    adaptation("run").run()
    before = rows(tmp_path / "run" / "evaluation.csv")
    again = adaptation("run")
    again.run()
    assert again.step_number == 8 and rows(tmp_path / "run" / "evaluation.csv") == before


def test_a_damaged_checkpoint_is_named(adaptation, tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint yet"):
        read_checkpoint(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoint.pt").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="not a readable checkpoint"):
        adaptation("run")


def test_rows_after_the_checkpoint_are_dropped(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("step,a\n1,x\n2,y\n3,z\n4,")
    rewind(path, 2)
    assert path.read_text() == "step,a\n1,x\n2,y\n"
    path.write_text("ste")
    rewind(path, 2)
    assert not path.exists()


def test_rates_rise_and_fall_to_zero():
    settings = AdaptationSettings(steps=100, warmup_steps=10)
    assert settings.factor(0) == pytest.approx(0.1)
    assert settings.factor(50) == pytest.approx(0.5)
    assert settings.factor(99) == pytest.approx(0.01)
    late = replace(settings, cooldown_steps=20)
    assert [late.factor(step) for step in (50, 80, 90, 100)] == pytest.approx([1, 1, 0.5, 0])
    with pytest.raises(InputError, match="does not fit a run of 100"):
        replace(settings, cooldown_steps=101)
    with pytest.raises(InputError, match="share read left to right"):
        replace(settings, left_to_right=1.0)


def test_it_learns(adaptation):
    """The corpus has few words: masked and left-to-right losses both fall."""
    settings = replace(SETTINGS, steps=60, rate=1e-2, mask_rate=1e-2, left_to_right=0.3)
    run = adaptation("run", settings)
    before = run.evaluate()
    for _ in range(60):
        run.step()
    after = run.evaluate()
    assert after["prefix@0.5"] < before["prefix@0.5"] - 1 and after[LEFT_TO_RIGHT] < before[LEFT_TO_RIGHT] - 1


def test_the_base_is_measured_without_its_adapter(adaptation, folder, tmp_path):
    bare = adaptation("bare").evaluate()[LEFT_TO_RIGHT]
    run = adaptation("run", adapter=random_adapter(folder))
    run.measure_base()
    stored = json.loads((tmp_path / "run" / "base.json").read_text())
    assert stored == {LEFT_TO_RIGHT: pytest.approx(bare, abs=2e-4)}
    assert abs(run.evaluate()[LEFT_TO_RIGHT] - bare) > 0.01


def test_left_to_right_examples_are_a_share_of_all(adaptation):
    none = adaptation("none", replace(SETTINGS, left_to_right=0.0))
    assert none.step()[LEFT_TO_RIGHT] is None
    most = adaptation("most", replace(SETTINGS, left_to_right=0.9))
    assert all(most.step()[LEFT_TO_RIGHT] is not None for _ in range(3))


def test_the_commands_make_a_model_that_scores(folder, text, tmp_path):
    adapter = tmp_path / "adapter.safetensors"
    save_file(random_adapter(folder), adapter)

    def call(*arguments):
        result = CliRunner().invoke(main, [str(item) for item in arguments], catch_exceptions=False)
        assert result.exit_code == 0, result.output

    call("prepare", "--text", text, "--model", folder, "--out", tmp_path / "corpus")
    tokens = load_corpus(tmp_path / "corpus").num_tokens()
    assert tokens > 1000
    merged = {}
    call("merge", "--model", folder, "--adapter", adapter, "--out", tmp_path / "start")
    merged["start"] = DiffScorer(tmp_path / "start", dtype=torch.float32)
    call(
        "adapt",
        "--model",
        folder,
        "--corpus",
        tmp_path / "corpus",
        "--run",
        tmp_path / "run",
        "--steps",
        1,
        "--rank",
        4,
        "--adapter",
        adapter,
        "--copies",
        2,
        "--threads",
        1,
    )
    call("merge", "--model", folder, "--run", tmp_path / "run", "--out", tmp_path / "end")
    merged["end"] = DiffScorer(tmp_path / "end", dtype=torch.float32)
    scores = {name: item.score(["The cat sat."], ["A cat."]).scores[0] for name, item in merged.items()}
    assert scores["start"] != scores["end"] and abs(scores["start"] - scores["end"]) < 0.5  # one small step away
    with pytest.raises(Exception, match="one of --run and --adapter"):
        CliRunner().invoke(
            main,
            ["merge", "--model", str(folder), "--out", str(tmp_path / "x")],
            standalone_mode=False,
            catch_exceptions=False,
        )


def test_a_command_says_in_one_line_what_it_cannot_use(tmp_path):
    result = CliRunner().invoke(
        main, ["adapt", *(f"--{name}={tmp_path}" for name in ("model", "corpus", "run")), "--steps=3"]
    )
    assert result.exit_code == 2
    assert "no prepared corpus" in result.stderr and len(result.stderr.splitlines()) == 1
