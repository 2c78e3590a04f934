"""Reading and writing checkpoints: safetensors, large matrices optionally as 8-bit rows with one scale a row."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from diffscore_fast.errors import CheckpointError

SCALE_SUFFIX = ".row_scale"


def quantise_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round a matrix [R, C] to int8 rows: weight is about codes * scale[:, None], scale = max|row| / 127."""
    weight = weight.float()
    scale = weight.abs().amax(dim=1) / 127.0
    codes = torch.round(weight / scale.clamp_min(1e-30)[:, None]).to(torch.int8)
    return codes, scale


def save_weights(path: Path, weights: dict[str, Tensor], *, eight_bit: bool) -> None:
    """Write a safetensors file; with `eight_bit`, every matrix is stored as int8 rows and float32 scales.

    Vectors (biases and norms) stay float32: they are few, and they carry the outliers.
    """
    stored: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if eight_bit and tensor.dim() == 2:
            stored[name], stored[name + SCALE_SUFFIX] = quantise_rows(tensor)
        else:
            stored[name] = tensor.float().contiguous()
    save_file(stored, str(path), metadata={"format": "pt"})


def load_weights(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file to float tensors by name, 8-bit rows dequantised."""
    try:
        stored = load_file(str(path))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; a model folder needs model.safetensors") from None
    except SafetensorError as error:
        raise CheckpointError(f"{path}: not a readable safetensors file ({error})") from None
    weights: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        if name.endswith(SCALE_SUFFIX):
            continue
        if tensor.dtype == torch.int8:
            scale = stored.get(name + SCALE_SUFFIX)
            if scale is None or scale.shape != tensor.shape[:1]:
                raise CheckpointError(f"{path}: 8-bit tensor {name} lacks its {SCALE_SUFFIX} [{tensor.shape[0]}]")
            tensor = tensor.float() * scale[:, None]
        weights[name] = tensor
    return weights


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
