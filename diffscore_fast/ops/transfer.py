"""Arrays to a device and numbers back, without the host waiting for either.

A GPU works through its stream while the host lays out what comes next; a copy from or to pageable memory would hold the
host until all that was launched before it is done. Pinned copies take their turn in the stream of the kernels, so that
none can meet a half-made copy; a pack's arrays are a few MiB, and a stream of their own would gain little.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def to_device(array: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """An array or host tensor on a device; on a CPU it stays where it is."""
    host = torch.from_numpy(array) if isinstance(array, np.ndarray) else array
    if device.type != "cuda" or host.is_pinned():  # the caller may write to pinned memory of its own at once
        return host.to(device)
    # torch keeps the pinned copy until the stream has passed it.
    return host.pin_memory().to(device, non_blocking=True)


class Arriving:
    """A tensor on its way to the host: the copy is under way, and `numpy()` waits for it."""

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
