"""`diffscore info`: what is installed, and what would run where."""

from __future__ import annotations

import platform
from importlib import metadata
from itertools import takewhile

import torch
from rich.table import Table

from diffscore_fast import ops
from diffscore_fast.backbones.config import EMBEDDED_MODELS, find_model, stated_licence
from diffscore_fast.backbones.loader import LoadedModel, load_model, multiplies_bfloat16
from diffscore_fast.cli.console import Console
from diffscore_fast.cli.model import FASTER_TYPE
from diffscore_fast.ops.extension import brgemm_unavailable, generated_code_unavailable, instruction_set
from diffscore_fast.version import __version__

PACKAGES = ("torch", "triton", "numpy", "tokenizers", "safetensors", "pyarrow", "transformers")


def print_info(model: str | None = None) -> None:
    """Print versions, devices, models, and the implementation of every operation with the reason.

    Raises
    ------
    CheckpointError
        If a model is named and cannot be loaded.
    """
    table = Table(show_header=False)
    table.add_row("diffscore_fast", __version__)
    table.add_row("python", platform.python_version())
    for package in PACKAGES:
        try:
            table.add_row(package, metadata.version(package))
        except metadata.PackageNotFoundError:
            table.add_row(package, "not installed")
    processor = [torch.backends.cpu.get_cpu_capability(), f"{torch.get_num_threads()} threads"]
    if (loops := instruction_set()) is not None:
        processor.append(f"C++ kernels: {loops} loops")
    table.add_row("processor", ", ".join(processor))
    if (denied := generated_code_unavailable()) is not None:
        table.add_row("generated code", f"{denied}; this package's loops run in place of oneDNN")
    devices = [torch.device("cpu")]
    for index in range(torch.cuda.device_count()):
        devices.append(torch.device("cuda", index))
        table.add_row(f"cuda:{index}", torch.cuda.get_device_name(index))
    for name in dict.fromkeys([*EMBEDDED_MODELS, *([model] if model else [])]):
        loaded = load_model(name)
        spec = loaded.backbone.spec
        shape = f"{spec.family}, {spec.num_layers} layers of {spec.hidden_size}, {spec.vocab_size} tokens"
        patterns = ", ".join(
            pattern + (f" {item.block_sizes}" if item.block_sizes else "") for pattern, item in spec.patterns.items()
        )
        runs = "own network" if loaded.is_own_network else "transformers"
        table.add_row(f"model {name}", f"{shape}; {runs}; attention {patterns}; weights {loaded.fingerprint[:12]}")
        table.add_row("reads", _reads(loaded))
        table.add_row("predicts", _predicts(loaded))
        if loaded.is_own_network:
            table.add_row("memory", _memory(loaded))
        if name not in EMBEDDED_MODELS:
            table.add_row("licence", stated_licence(find_model(name)[0]) or "the folder's README.md names none")
    for device in devices:
        dtype = "float32" if device.type == "cpu" else "the checkpoint's own"
        table.add_row(f"default dtype on {device}", dtype)
        if device.type == "cpu":
            units = FASTER_TYPE if multiplies_bfloat16() else "no faster: this processor has no units for it"
            table.add_row("--dtype bfloat16 on cpu", units)
            without = ops.int8_unavailable(device)
            table.add_row(
                "--dtype int8 on cpu", without or "for scores; 3 to 4 times as fast as float32 where it was measured"
            )
            reason = brgemm_unavailable(torch.bfloat16)
            made = "by brgemm" if reason is None else f"in float32: {reason}"
            table.add_row("bfloat16 logits, attention on cpu", made)
        for operation in ops.OPERATIONS:
            preferred = takewhile(lambda item: item[1] is not None, operation.reasons(device).items())
            unavailable = [f"{name}: {reason}" for name, reason in preferred]
            table.add_row(f"{operation.name} on {device}", "; ".join([operation.resolve(device).name, *unavailable]))
    Console().print(table)


def _reads(loaded: LoadedModel) -> str:
    """The layout of a source and a candidate under the default pattern, and how many tokens fit."""
    spec, name = loaded.backbone.spec, loaded.tokenizer.token_name
    pattern = spec.patterns[spec.default_pattern]
    start = () if spec.start_id is None else (spec.start_id,)
    parts = [*map(name, start), "source", *map(name, pattern.separator_ids), "candidate", *map(name, pattern.end_ids)]
    limit = f"up to {pattern.position_limit} tokens"
    return f"{' '.join(parts)}; " + (
        f"{limit} before the candidate, and {limit} from it on" if pattern.restart_positions else limit
    )


def _predicts(loaded: LoadedModel) -> str:
    """Default pattern, mask token, and what of the vocabulary stands in the softmax."""
    spec = loaded.backbone.spec
    size = spec.patterns[spec.default_pattern].default_block_size
    default = f"{spec.default_pattern} of {size} tokens" if size else spec.default_pattern
    mask = f"mask {loaded.tokenizer.token_name(spec.mask_id)} ({spec.mask_id})"
    never = "never predicted" if spec.mask_id in spec.excluded_ids else "in the softmax"
    shift = "; row i predicts token i + 1" if spec.logit_shift else ""
    return f"by {default} unless told otherwise; {mask}, {never}{shift}"


def _memory(loaded: LoadedModel) -> str:
    """What the weights of an own network take by dtype, and one cached token of a prefix."""
    spec, network = loaded.backbone.spec, loaded.backbone
    assert isinstance(network, torch.nn.Module)
    millions = sum(item.numel() for item in network.parameters()) / 1e6
    cached = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim
    weights = f"{millions:,.2f} million weights, {4 * millions:,.1f} MB in float32, {2 * millions:,.1f} in bfloat16"
    prefix = any(name != "full" for name in spec.patterns)
    return weights + (f"; {cached * 4 / 1e3:,.1f} kB per cached token in float32" if prefix else "")
