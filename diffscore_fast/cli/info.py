"""`diffscore info`: what is installed, and what would run."""

from __future__ import annotations

import platform
from importlib import metadata

import torch
from rich.console import Console
from rich.table import Table

from diffscore_fast import ops
from diffscore_fast.backbones.load import EMBEDDED_MODELS, default_dtype, load_model
from diffscore_fast.ops.extension import brgemm_unavailable
from diffscore_fast.version import __version__

PACKAGES = ("torch", "triton", "numpy", "tokenizers", "safetensors")


def print_info() -> None:
    """Print versions, devices, models, and the implementation of every operation with the reason."""
    table = Table(show_header=False)
    table.add_row("diffscore_fast", __version__)
    table.add_row("python", platform.python_version())
    for package in PACKAGES:
        try:
            table.add_row(package, metadata.version(package))
        except metadata.PackageNotFoundError:
            table.add_row(package, "not installed")
    table.add_row("processor", f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads")
    devices = [torch.device("cpu")]
    for index in range(torch.cuda.device_count()):
        devices.append(torch.device("cuda", index))
        table.add_row(f"cuda:{index}", torch.cuda.get_device_name(index))
    for name in EMBEDDED_MODELS:
        loaded = load_model(name)
        spec = loaded.backbone.spec
        shape = f"{spec.family}, {spec.num_layers} layers of {spec.hidden_size}, {spec.vocab_size} tokens"
        patterns = ", ".join(
            pattern + (f" {item.block_sizes}" if item.block_sizes else "") for pattern, item in spec.patterns.items()
        )
        table.add_row(f"model {name}", f"{shape}; attention {patterns}; weights {loaded.weights_sha256[:12]}")
    for device in devices:
        table.add_row(f"default type on {device}", str(default_dtype(device)).removeprefix("torch."))
        if device.type == "cpu":
            reason = brgemm_unavailable(torch.bfloat16)
            table.add_row("bfloat16 logits on cpu", "by brgemm" if reason is None else f"made in float32: {reason}")
        for operation in ops.OPERATIONS:
            chosen = operation.resolve(device)
            passed_over = []
            for item in operation.implementations.values():
                if item is chosen:
                    break
                passed_over.append(f"{item.name}: {item.unavailable(device)}")
            table.add_row(f"{operation.name} on {device}", "; ".join([chosen.name, *passed_over]))
    Console().print(table)
