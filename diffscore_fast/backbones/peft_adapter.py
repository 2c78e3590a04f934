"""Low-rank adapters in PEFT's layout (adapter_config.json, adapter_model.safetensors), merged while a model is read."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffscore_fast.backbones.weights import StoredTensors, check_no_pointer, file_sha256
from diffscore_fast.errors import CheckpointError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
# Fields that must be absent, false, empty or as here: other kinds of adapters add something else than a product.
PLAIN = {"bias": "none", "peft_type": "LORA"}
ABSENT = ("use_dora", "modules_to_save", "rank_pattern", "alpha_pattern", "fan_in_fan_out", "layer_replication",
          "trainable_token_indices", "lora_bias", "target_parameters")  # fmt: skip


class PeftAdapter:
    """A LoRA adapter: W becomes W + s B A, with s = alpha / r (alpha / sqrt(r) with `use_rslora`).

    Parameters
    ----------
    folder : Path
    base : str
        Name of the model, as the user gave it.

    Raises
    ------
    CheckpointError
        If the folder has no such adapter, it is of another kind, or was made for another model.
    """

    def __init__(self, folder: Path, base: str) -> None:
        self._folder = folder
        path = folder / WEIGHTS
        if not path.is_file():
            pickled = [item.name for item in sorted(folder.glob("adapter_model.*"))]
            found = f"; {pickled[0]} may run code when it is read, and is not" if pickled else ""
            raise CheckpointError(f"{path}: no such file; an adapter must be in safetensors{found}")
        check_no_pointer(path)
        config = _read_config(folder / CONFIG)
        made_for = str(config.get("base_model_name_or_path") or "")
        repository = base.partition("@")[0]
        if (
            made_for.count("/") == 1
            and repository.count("/") == 1
            and not Path(base).exists()
            and made_for != repository
        ):
            raise CheckpointError(f"{folder}: an adapter of {made_for}, not of {repository}")
        rank, alpha = config["r"], config["lora_alpha"]
        self._rank, self._scale = rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        self._stored = StoredTensors([path])
        self.sha256 = file_sha256(path)

    def merged(self, name: str, weight: Tensor) -> Tensor:
        """The weight `name`, with the adapter's product added in float64 if it has one; float32 then.

        Raises
        ------
        CheckpointError
            If the product is of another shape.
        """
        first, second = (f"{PREFIX}{name.removesuffix('.weight')}.lora_{factor}.weight" for factor in "AB")
        if not {first, second} <= self._stored.names:
            return weight
        a, b = self._stored.take(first), self._stored.take(second)
        if list(a.shape) != [self._rank, weight.shape[-1]] or list(b.shape) != [weight.shape[0], self._rank]:
            raise CheckpointError(
                f"{self._folder}: {first} and its pair are {list(a.shape)} and {list(b.shape)}, rank {self._rank}; the "
                f"model's {name} is {list(weight.shape)}: the adapter was made for another model"
            )
        return (weight.double() + self._scale * (b.double() @ a.double())).float()

    def check_all_merged(self) -> None:
        """Refuse an adapter with tensors that no weight of the model has taken.

        Raises
        ------
        CheckpointError
            If there are some.
        """
        if self._stored.names:
            raise CheckpointError(
                f"{self._folder}: no weight of this model takes {min(self._stored.names)}: the adapter was made for "
                "another model"
            )


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path}: cannot be read as JSON ({error}); an adapter in PEFT's layout needs it"
        ) from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: a JSON {type(config).__name__}, not an object")
    other = [f"{item} = {config[item]!r}" for item, value in PLAIN.items() if config.get(item, value) != value]
    other += [f"{item} = {config[item]!r}" for item in ABSENT if config.get(item)]
    if other:
        raise CheckpointError(f"{path}: {', '.join(other)}: only plain LoRA can be merged")
    for item in ("r", "lora_alpha"):
        value = config.get(item)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < torch.inf:
            raise CheckpointError(f"{path}: {item} must be a number above 0, not {value!r}")
    return config
