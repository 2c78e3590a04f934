"""The checkpoint of a `Trainer`: the averaged model as a model folder, and what a run needs to go on.

checkpoint/           in the run's folder; replaced as a whole, so that it is always complete
    model/            config.json, model.safetensors, tokenizer.json: the averaged weights
    raw.safetensors   the weights that the optimiser works on
    optimiser.pt      the optimiser's state; without it a run goes on from fresh moments
    progress.json     step, tokens, seconds
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from diffscore_fast.backbones.bert import BertBackbone
from diffscore_fast.backbones.bert_families import state_in_bert_layout
from diffscore_fast.backbones.config import PACKAGE_SECTION
from diffscore_fast.backbones.weights import file_sha256, save_weights
from diffscore_fast.errors import CheckpointError
from diffscore_fast.training.optimiser import WeightAverage


def write_model_folder(backbone: BertBackbone, source: Path, folder: Path, *, eight_bit: bool) -> str:
    """Write a model folder: the backbone's weights, config and tokenizer of `source`. Returns the checksum."""
    folder.mkdir(parents=True, exist_ok=True)
    weights_path = folder / "model.safetensors"
    save_weights(weights_path, state_in_bert_layout(backbone), eight_bit=eight_bit)
    checksum = file_sha256(weights_path)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config[PACKAGE_SECTION]["weights_sha256"] = checksum
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    shutil.copyfile(source / "tokenizer.json", folder / "tokenizer.json")
    return checksum


def save_checkpoint(
    folder: Path,
    source: Path,
    model: BertBackbone,
    average: WeightAverage,
    optimiser: torch.optim.Optimizer,
    progress: dict[str, Any],
) -> None:
    """Write `folder`/checkpoint; the old one is replaced when the new one is complete."""
    fresh, final, old = folder / "checkpoint.new", folder / "checkpoint", folder / "checkpoint.old"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    raw = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    save_file(raw, str(fresh / "raw.safetensors"))
    torch.save(optimiser.state_dict(), fresh / "optimiser.pt")
    (fresh / "progress.json").write_text(json.dumps({**progress, "average_updates": average.updates}), encoding="utf-8")
    with swapped_weights(model, average):
        write_model_folder(model, source, fresh / "model", eight_bit=False)
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    fresh.rename(final)
    shutil.rmtree(old, ignore_errors=True)


def restore_checkpoint(
    folder: Path, model: BertBackbone, average: WeightAverage, optimiser: torch.optim.Optimizer
) -> dict[str, Any] | None:
    """Load `folder`/checkpoint in place; returns its progress, or None where there is no checkpoint.

    `progress["optimiser_restored"]` is False if there is no optimiser.pt: the caller then warms the rates up again.
    """
    saved = folder / "checkpoint"
    if not saved.is_dir():
        return None
    load_parameters(model, load_file(str(saved / "raw.safetensors")))
    progress = json.loads((saved / "progress.json").read_text(encoding="utf-8"))
    averaged = load_model_weights(saved / "model", model)
    for name, weight in averaged.items():
        average.weights[name].copy_(weight)
    average.updates = progress.pop("average_updates")
    state = saved / "optimiser.pt"
    progress["optimiser_restored"] = state.is_file()
    if state.is_file():
        optimiser.load_state_dict(torch.load(state, weights_only=True))
    return progress


def load_parameters(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Copy weights into the model's parameters, strictly by name."""
    parameters = dict(model.named_parameters())
    if parameters.keys() != weights.keys():
        differing = ", ".join(sorted(parameters.keys() ^ weights.keys())[:4])
        raise CheckpointError(
            f"the checkpoint's weights have other names than this version's model ({differing}, ...); go on with the "
            "version that wrote it, or start a new run from its model folder (checkpoint/model)"
        )
    with torch.no_grad():
        for name, weight in weights.items():
            parameters[name].copy_(weight)


def load_model_weights(folder: Path, like: BertBackbone) -> dict[str, torch.Tensor]:
    """Parameters of a model folder, by the backbone's own names."""
    from diffscore_fast.backbones.loader import load_model

    loaded = load_model(folder, dtype=like.dtype).bert
    return {name: parameter.detach() for name, parameter in loaded.named_parameters()}


class swapped_weights:  # noqa: N801 - reads as a statement: with swapped_weights(model, average)
    """Within the block the model holds the averaged weights; afterwards its own again."""

    def __init__(self, model: nn.Module, average: WeightAverage) -> None:
        self.model = model
        self.average = average

    def __enter__(self) -> None:
        self._own = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
        load_parameters(self.model, self.average.weights)

    def __exit__(self, *exception: object) -> None:
        load_parameters(self.model, self._own)
