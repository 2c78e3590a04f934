"""Reading and writing weights: safetensors files, matrices optionally as 8-bit rows with one scale per row."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from diffscore_fast.errors import CheckpointError, is_out_of_memory

SCALE_SUFFIX = ".row_scale"
# safetensors' names of the dtypes that weights may have, and the dtype that a network computes in with them.
FLOATS = {"F32": torch.float32, "F64": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
INDICES = ("I64", "I32", "BOOL")  # dtypes of the position tables that older checkpoints hold beside their weights
POINTER = b"version https://git-lfs.github.com/spec/"


def quantise_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round a matrix [R, C] to int8 rows: weight is about codes * scale[:, None], scale = max|row| / 127."""
    weight = weight.float()
    scale = weight.abs().amax(dim=1) / 127.0
    codes = torch.round(weight / scale.clamp_min(1e-30)[:, None]).to(torch.int8)
    return codes, scale


def save_weights(path: Path, weights: dict[str, Tensor], *, eight_bit: bool) -> None:
    """Write a safetensors file; with `eight_bit`, every matrix is stored as int8 rows and float32 scales.

    Vectors (biases and norms) stay float32: they are small, and they hold the outliers.
    """
    stored: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if eight_bit and tensor.dim() == 2:
            stored[name], stored[name + SCALE_SUFFIX] = quantise_rows(tensor)
        else:
            stored[name] = tensor.float().contiguous()
    save_file(stored, str(path), metadata={"format": "pt"})


def load_weights(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file to float tensors by name, 8-bit rows dequantised.

    Raises
    ------
    CheckpointError
        If it cannot be read, or a tensor has a dtype that has no meaning without scales.
    """
    try:
        stored = load_file(str(path))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; a model folder needs model.safetensors") from None
    except (SafetensorError, AttributeError, KeyError) as error:  # the last two: a dtype that torch lacks
        if is_out_of_memory(error):
            raise
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
        elif not _is_readable(tensor.dtype) and not name.endswith("position_ids"):
            raise CheckpointError(_unreadable(f"{path}: tensor {name}", tensor.dtype))
        weights[name] = tensor
    return weights


class StoredTensors:
    """Tensors of several safetensors files; each is read when it is taken, 8-bit rows dequantised.

    Parameters
    ----------
    files : list of Path

    Raises
    ------
    CheckpointError
        If a file cannot be read, or two files have a tensor of the same name.
    """

    def __init__(self, files: list[Path]) -> None:
        self._where: dict[str, Any] = {}
        for path in files:
            try:
                opened: Any = safe_open(str(path), framework="pt")
            except (SafetensorError, OSError) as error:
                if is_out_of_memory(error):
                    raise
                raise CheckpointError(f"{path}: not a readable safetensors file ({error})") from None
            if twice := self.names.intersection(opened.keys()):
                raise CheckpointError(f"{path}: {min(twice)} is in another file, too")
            self._where |= dict.fromkeys(opened.keys(), opened)
        scaled = [name for name in self._where if name + SCALE_SUFFIX in self._where]
        self._scales = {name: self._where.pop(name + SCALE_SUFFIX) for name in scaled}

    @property
    def names(self) -> set[str]:
        """Names of the tensors that have not been taken."""
        return set(self._where)

    def take(self, name: str) -> Tensor:
        """Read a tensor of floats and remove it from the names.

        Its memory may be the file itself, mapped into memory.
        """
        tensor = self.look(name)
        del self._where[name]
        return tensor

    def look(self, name: str) -> Tensor:
        """Read a tensor of floats; it stays among the names."""
        try:
            tensor: Tensor = self._where[name].get_tensor(name)
            if tensor.dtype == torch.int8 and name in self._scales:
                scale = self._scales[name].get_tensor(name + SCALE_SUFFIX)
                return tensor.float() * scale[:, None]
        except (SafetensorError, AttributeError, RuntimeError) as error:  # a dtype that torch lacks
            if is_out_of_memory(error):
                raise
            raise CheckpointError(f"tensor {name} cannot be read ({error})") from None
        if not _is_readable(tensor.dtype):
            raise CheckpointError(_unreadable(f"tensor {name}", tensor.dtype))
        return tensor


def check_stored(files: list[Path]) -> None:
    """Refuse files with a weight in a dtype that has no meaning without scales, before another library casts it.

    Raises
    ------
    CheckpointError
        If there is one; it names the first.
    """
    for path in files:
        for name, kind, _ in _headers(path):
            is_index = kind in INDICES and not name.endswith((".weight", ".bias"))
            if kind not in FLOATS and not is_index:
                raise CheckpointError(_unreadable(f"{path}: tensor {name}", kind))


def stored_dtype(files: list[Path]) -> torch.dtype:
    """The dtype of most floating-point numbers in the files; 8-bit rows count as float32, the dtype of their scales."""
    numbers: dict[torch.dtype, int] = {}
    for path in files:
        for _, kind, count in _headers(path):
            dtype = torch.float32 if kind == "I8" else FLOATS.get(kind)
            if dtype is not None:
                numbers[dtype] = numbers.get(dtype, 0) + count
    return max(numbers, key=lambda dtype: numbers[dtype], default=torch.float32)


def check_no_pointer(path: Path) -> None:
    """Refuse the pointer that Git LFS leaves in place of a file that it has not fetched.

    Raises
    ------
    CheckpointError
        If the file is such a pointer.
    """
    if not path.is_file():
        return
    with path.open("rb") as file:
        if file.read(len(POINTER)) == POINTER:
            raise CheckpointError(
                f"{path}: a Git LFS pointer, not the file itself; fetch it with `git lfs pull`, or "
                "the model with `hf download`"
            )


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder: model.safetensors, or those that its index names.

    Raises
    ------
    CheckpointError
        If there are none, the index is damaged, or a file that it names is missing.
    """
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    check_no_pointer(index)
    if whole.is_file() or not index.is_file():
        files = [whole]
    else:
        try:
            named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            files = [folder / Path(name).name for name in sorted(named)]
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{index}: not an index of safetensors files ({error!r})") from None
        if not files:
            raise CheckpointError(f"{index}: names no files")
    for path in files:
        if not path.is_file():
            raise CheckpointError(f"{path}: no such file; a model folder needs its weights in safetensors")
    return files


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _headers(path: Path) -> Iterator[tuple[str, str, int]]:
    """Name, dtype (safetensors' name) and number of elements of every tensor of a file; no tensor is read."""
    try:
        with safe_open(str(path), framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118, it is no dict
                part = opened.get_slice(name)
                yield name, str(part.get_dtype()), math.prod(part.get_shape())
    except (SafetensorError, OSError) as error:
        if is_out_of_memory(error):
            raise
        raise CheckpointError(f"{path}: not a readable safetensors file ({error})") from None


def _is_readable(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize >= 2


def _unreadable(what: str, dtype: Any) -> str:
    return (
        f"{what} is of {dtype}; weights must be float32, bfloat16 or float16: of a quantised checkpoint, load the "
        "original one"
    )
