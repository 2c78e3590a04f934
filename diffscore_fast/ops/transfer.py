"""Arrays to a device and numbers back, while the host goes on working.

A GPU works through its stream while the host prepares the next pack. A copy from or to pageable memory would block the
host until everything launched before is done; a pinned copy takes its turn in the stream of the kernels, so that no
kernel reads a half-made copy. A pack's arrays are a few MiB: a second stream for copies would gain little.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def to_device(array: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """An array or host tensor on a device; on a CPU it stays where it is."""
    host = torch.from_numpy(array) if isinstance(array, np.ndarray) else array
    if device.type != "cuda" or host.is_pinned():  # the caller may overwrite its own pinned memory at once
        return host.to(device)
    # torch keeps the pinned copy until the stream has passed it.
    return host.pin_memory().to(device, non_blocking=True)


class Arriving:
    """A tensor on its way to the host; `numpy()` waits for the copy."""

    def __init__(self, tensor: Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        if tensor.device.type != "cuda":
            self._host = tensor.cpu()
            return
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        self._arrived = torch.cuda.Event()
        self._arrived.record(torch.cuda.current_stream(tensor.device))

    def numpy(self) -> np.ndarray:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host.numpy()
