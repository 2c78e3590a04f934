from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from diffscore_fast.backbones.loader import load_model
from diffscore_fast.backbones.weights import load_weights, quantise_rows
from diffscore_fast.errors import CheckpointError
from diffscore_fast.training.evaluation import held_out_losses
from diffscore_fast.training.examples import Mixture
from diffscore_fast.training.export import export_checkpoint
from diffscore_fast.training.optimiser import Schedule, WeightAverage
from diffscore_fast.training.trainer import Settings, Trainer

SETTINGS = Settings(
    tokens_per_step=200,
    rows_per_step=60,
    evaluation_sequences=8,
    mixture=Mixture(prefix_lengths=(3, 30), window_lengths=(3, 20), run_lengths=(4, 40), long_share=0.0),
    schedule=Schedule(head_steps=2, warmup_steps=3, head=1e-3, body=1e-3, embeddings=1e-3),
)


@pytest.fixture
def trainer(model_folder, corpus, tmp_path):
    def make(run: str, settings: Settings = SETTINGS) -> Trainer:
        backbone = load_model(model_folder, dtype=torch.float32).backbone
        return Trainer(backbone, model_folder, *corpus.split(0.2), tmp_path / run, settings)

    return make


def test_resumed_run_makes_the_steps_of_an_uninterrupted_one(trainer):
    straight = trainer("straight")
    rows = [straight.step() for _ in range(7)]
    trainer("cut").run(steps=4)
    resumed = trainer("cut")
    assert resumed.step_number == 4
    assert [resumed.step() for _ in range(3)] == rows[4:]
    for name, weight in straight.average.weights.items():
        torch.testing.assert_close(resumed.average.weights[name], weight)


def test_a_run_goes_on_from_weights_alone_and_warms_up_again(trainer, tmp_path):
    first = trainer("run")
    first.run(steps=5)
    (tmp_path / "run" / "checkpoint" / "optimiser.pt").unlink()
    resumed = trainer("run")
    for name, parameter in resumed.backbone.named_parameters():
        assert torch.equal(parameter, dict(first.backbone.named_parameters())[name])
    resumed.step()
    rate = {group["name"]: group["lr"] for group in resumed.optimiser.param_groups}
    assert rate["body"] == pytest.approx(1e-3 / 3)  # the first of three warm-up steps


def test_a_checkpoint_with_other_names_is_refused(trainer, tmp_path):
    trainer("run").run(steps=1)
    raw = tmp_path / "run" / "checkpoint" / "raw.safetensors"
    weights = load_file(raw)
    weights["layers.0.old_name"] = weights.pop(sorted(weights)[0])
    save_file(weights, raw)
    with pytest.raises(CheckpointError, match="old_name.*start a new run"):
        trainer("run")


def test_changed_settings_are_recorded_with_the_step_they_apply_from(trainer, tmp_path):
    trainer("run").run(steps=3)
    trainer("run", replace(SETTINGS, rows_per_step=50))
    trainer("run", replace(SETTINGS, rows_per_step=50))
    history = json.loads((tmp_path / "run" / "settings.json").read_text())
    assert [(part["from_step"], part["rows_per_step"]) for part in history] == [(0, 60), (3, 50)]


def test_log_rows_after_the_checkpoint_are_written_again(trainer, tmp_path):
    """A process that is killed after a checkpoint leaves rows of later steps, and perhaps half a row."""
    trainer("run").run(steps=3)
    path = tmp_path / "run" / "log.csv"
    row = path.read_text().splitlines()[-1].split(",")
    with path.open("a") as file:
        file.write(",".join(["4", *row[1:]]) + "\n5,12")
    trainer("run").run(steps=5)
    assert [line.split(",")[0] for line in path.read_text().splitlines()] == ["step", "1", "2", "3", "4", "5"]


def test_a_cooldown_brings_the_rates_down_to_zero(trainer):
    run = trainer("run", replace(SETTINGS, schedule=replace(SETTINGS.schedule, cooldown=(6, 10))))
    rates = []
    for _ in range(10):
        run.step()
        rates += [group["lr"] for group in run.optimiser.param_groups if group["name"] == "body"][:1]
    assert rates[5:] == pytest.approx([1e-3, 1e-3, 0.75e-3, 0.5e-3, 0.25e-3])
    run.step()
    assert run.optimiser.param_groups[0]["lr"] == 0.0


def test_only_the_head_moves_in_its_own_stage(trainer):
    run = trainer("run")
    before = {name: parameter.detach().clone() for name, parameter in run.backbone.named_parameters()}
    run.step(), run.step()
    moved = {name for name, parameter in run.backbone.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved == {
        "transform.weight",
        "transform.bias",
        "transform_norm.weight",
        "transform_norm.bias",
        "output_bias",
    }
    run.step()
    assert not torch.equal(run.backbone.layers[0].up.weight, before["layers.0.up.weight"])


def test_it_learns_what_the_prefix_tells(trainer, corpus):
    """In this corpus the prefix names the one token of the article: the right prefix must come to beat a wrong one."""
    rates = replace(SETTINGS.schedule, body=3e-3, embeddings=3e-3, head=3e-3)
    run = trainer("run", replace(SETTINGS, schedule=rates, evaluation_sequences=16))
    run.held_out = run.sampler.corpus  # no article's token occurs in another
    for _ in range(100):
        run.step()
    run.average = WeightAverage(run.backbone)
    losses = run.evaluate()
    assert losses["wrong prefix"] - losses["right prefix"] > 1.0
    assert losses["full@0.15"] < losses["full@0.85"]


def test_average_looks_back_over_a_fifth_of_the_run_and_the_horizon_at_most():
    """On weights equal to the step number, the average lags by its mean look-back."""
    model = torch.nn.Linear(1, 1, bias=False)
    average = WeightAverage(model, every=1, horizon=40)
    model.weight.data.fill_(-1000.0)  # a start far off is forgotten at the first update
    lags = {}
    for step in range(1, 1001):
        model.weight.data.fill_(step)
        average.update(model, step)
        lags[step] = step - average.weights["weight"].item()
    assert lags[60] == pytest.approx(60 / 6, rel=0.2)  # weights n^4 have their mean at 5/6 of the way
    assert lags[1000] == pytest.approx(39, rel=0.01)


def test_export_is_the_averaged_checkpoint_in_eight_bits(trainer, tmp_path, corpus):
    run = trainer("run")
    run.run(steps=6)
    folder = tmp_path / "exported"
    arguments = tmp_path / "run", run.sampler.corpus, run.held_out, folder
    with pytest.raises(CheckpointError, match="in 8 bits"):  # random weights of this scale do not take rounding
        export_checkpoint(*arguments, sequences=8, max_change=1e-6)
    assert not folder.exists()
    checksum = export_checkpoint(*arguments, sequences=8, max_change=1.0)
    card = (folder / "MODEL_CARD.md").read_text()
    assert checksum in card
    assert "$" not in card
    assert "| full@0.15 |" in card
    exact = load_weights(tmp_path / "run" / "checkpoint" / "model" / "model.safetensors")
    for name, rounded in load_weights(folder / "model.safetensors").items():
        if rounded.dim() == 2:
            bound = exact[name].abs().amax(dim=1, keepdim=True) / 254 * 1.0001
            assert ((rounded - exact[name]).abs() <= bound).all(), name
        else:
            assert torch.equal(rounded, exact[name]), name
    assert load_model(folder).tokenizer.sha256 == load_model(run.source).tokenizer.sha256


def test_eight_bit_rows_keep_their_largest_value_and_zero_rows():
    weight = torch.tensor([[0.0, 0.0, 0.0], [1e-3, -2e-3, 0.0], [50.0, -0.1, 0.2]])
    codes, scale = quantise_rows(weight)
    restored = codes.float() * scale[:, None]
    torch.testing.assert_close(restored.abs().amax(1), weight.abs().amax(1))
    assert torch.equal(restored[0], torch.zeros(3))


def test_evaluation_is_the_same_every_time_and_bootstraps_around_its_mean(network, corpus):
    _, held_out = corpus.split(0.2)
    first, second = (held_out_losses(network, held_out, sequences=8) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one.sums, other.sums)
        low, high = one.interval()
        assert low <= one.mean <= high
    settings = {item.setting: item for item in first}
    assert settings["block@1"].mean == pytest.approx(settings["block@1 nelbo"].mean)
