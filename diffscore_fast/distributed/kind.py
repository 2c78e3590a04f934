"""What kind of worker a process is: workers of one kind give a row the same bits."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from importlib import metadata

import torch

from diffscore_fast.ops.extension import brgemm_unavailable, instruction_set
from diffscore_fast.version import __version__

PACKAGES = ("torch", "triton", "numpy", "tokenizers")


@dataclass(frozen=True)
class WorkerKind:
    """What the last bits of a score depend on besides its row and its signature.

    Parameters
    ----------
    device : str
        "cpu", or the name of the GPU.
    kernels : str
        Implementations of the operations, as in the signature.
    loops : str
        Instruction set of the C++ kernels; "none" without them.
    capability : str
        Instruction set of torch's own loops.
    bfloat16_units : bool
        Whether products in bfloat16 are made by the processor's units.
    versions : str
        Of this package, Python, torch, triton, numpy and tokenizers.
    """

    device: str
    kernels: str
    loops: str
    capability: str
    bfloat16_units: bool
    versions: str

    @staticmethod
    def here(device: torch.device, kernels: str) -> WorkerKind:
        """The kind of this process."""
        versions = {"diffscore_fast": __version__, "python": platform.python_version()}
        for package in PACKAGES:
            try:
                versions[package] = metadata.version(package)
            except metadata.PackageNotFoundError:
                versions[package] = "none"
        return WorkerKind(
            device="cpu" if device.type == "cpu" else torch.cuda.get_device_name(device),
            kernels=kernels,
            loops=instruction_set() or "none",
            capability=torch.backends.cpu.get_cpu_capability(),
            bfloat16_units=brgemm_unavailable(torch.bfloat16) is None,
            versions=", ".join(f"{name} {version}" for name, version in versions.items()),
        )

    def differences(self, other: WorkerKind) -> str:
        """In what another kind differs: "loops avx2, not portable"; "" where they are equal."""
        own, others = asdict(self), asdict(other)
        return "; ".join(f"{name} {own[name]}, not {others[name]}" for name in own if own[name] != others[name])

    def __str__(self) -> str:
        return f"{self.device}, kernels {self.kernels}, loops {self.loops}, torch's {self.capability}"
