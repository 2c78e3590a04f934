"""Low-rank adapters (LoRA, arXiv 2106.09685) in a file, and merging one into a model's weights.

An adapter file holds, under transformers' names, `...q_proj.lora_A` [r, in] and `...q_proj.lora_B` [out, r] of every
product, and `maskvec` [D], the embedding of a masked token. A product's weight becomes W + SCALE * B @ A.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from diffscore_fast.backbones.weights import load_weights
from diffscore_fast.errors import CheckpointError

SCALE = 2.0
GRID = 2.0**-20
MASK_NAME = "maskvec"


def read_adapter(path: Path) -> dict[str, Tensor]:
    """An adapter file's tensors, 8-bit rows dequantised.

    Raises
    ------
    CheckpointError
        If the file is missing or damaged.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; an adapter in safetensors is needed")
    return load_weights(path)


def merged_weights(
    weights: Mapping[str, Tensor], adapter: Mapping[str, Tensor], token_embedding: str, mask_id: int
) -> dict[str, Tensor]:
    """The weights, under transformers' names, with an adapter merged; what it changes is float32.

    Parameters
    ----------
    weights, adapter : dict of str to Tensor
    token_embedding : str
        Name of the embedding's weight, whose row `mask_id` becomes the adapter's.

    Raises
    ------
    CheckpointError
        If a tensor of the adapter has no weight in the model, or does not fit it.
    """
    products = {name.removesuffix(".lora_A") for name in adapter if name.endswith(".lora_A")}
    expected = {f"{name}.lora_{factor}" for name in products for factor in "AB"} | {MASK_NAME}
    missing = [name for name in products if f"{name}.weight" not in weights]
    if expected != adapter.keys() or missing:
        named = sorted(expected ^ adapter.keys())[:4] or sorted(missing)[:4]
        raise CheckpointError(f"the adapter's tensors do not belong to this model: {named}")
    merged = dict(weights)
    for name in sorted(products):
        change = SCALE * adapter[f"{name}.lora_B"].double() @ adapter[f"{name}.lora_A"].double()
        if change.shape != weights[f"{name}.weight"].shape:
            raise CheckpointError(
                f"the adapter's {name} is {list(change.shape)}, the model's {list(weights[f'{name}.weight'].shape)}"
            )
        # On a grid that is coarser than any rounding of the sums: the same bits on every machine.
        merged[f"{name}.weight"] = torch.round((weights[f"{name}.weight"].double() + change) / GRID).mul(GRID).float()
    words = weights[token_embedding].float().clone()
    if adapter[MASK_NAME].shape != words.shape[1:]:
        raise CheckpointError(f"the adapter's {MASK_NAME} is {list(adapter[MASK_NAME].shape)}, not {[words.shape[1]]}")
    words[mask_id] = adapter[MASK_NAME].float()
    merged[token_embedding] = words
    return merged
