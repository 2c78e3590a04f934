"""The prefix cache: keys and values of clean sequences, found by content."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from diffscore_fast.backbones.spec import BackboneSpec


class PrefixCache:
    """Key and value rows of every layer; a cached sequence is a run of rows.

    The content key of a sequence covers everything that its rows depend on: token ids (positions and types follow from
    the pattern), pattern and block size. When new sequences do not fit beside the cached ones, all cached ones are
    dropped; waves are planned so that the sequences of one wave fit together.

    Parameters
    ----------
    spec : BackboneSpec
    dtype, device
        Of the rows.
    capacity_bytes : int
        Size of the cache; only a single sequence that is longer makes it grow beyond.
    """

    def __init__(self, spec: BackboneSpec, dtype: torch.dtype, device: torch.device, capacity_bytes: int) -> None:
        self._shape = (spec.num_layers, 2, spec.num_kv_heads, spec.head_dim)
        self._dtype, self._device = dtype, device
        row_bytes = int(np.prod(self._shape)) * dtype.itemsize
        self.capacity_rows = max(1, capacity_bytes // row_bytes)
        self._rows: Tensor | None = None
        self._used = 0
        self._starts: dict[bytes, int] = {}

    def reserve(self, keys: list[bytes], lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Make room for sequences.

        Returns
        -------
        starts : int64 [n]
            First cache row of each sequence.
        missing : int64 [n']
            Indices of those whose rows must still be written.
        """
        missing = [i for i, key in enumerate(keys) if key not in self._starts]
        if self._used + int(lengths[missing].sum()) > self.capacity_rows:
            self._starts.clear()
            self._used = 0
            missing = list(range(len(keys)))
        needed = self._used + int(lengths[missing].sum())
        self._allocate(needed)
        for index in missing:
            self._starts[keys[index]] = self._used
            self._used += int(lengths[index])
        starts = np.array([self._starts[key] for key in keys], dtype=np.int64)
        return starts, np.array(missing, dtype=np.int64)

    def forget(self) -> None:
        """Drop every sequence, for instance after an evaluation that stopped halfway."""
        self._starts.clear()
        self._used = 0

    @property
    def is_empty(self) -> bool:
        """True until the first sequence is reserved: there are no rows to look at yet."""
        return self._rows is None

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Key and value rows [rows, Hkv, d] of one layer."""
        assert self._rows is not None
        return self._rows[index, 0], self._rows[index, 1]

    def write(self, index: int, rows: Tensor, key: Tensor, value: Tensor) -> None:
        """Write keys and values [N, Hkv, d] of one layer to the rows int64 [N]."""
        keys, values = self.layer(index)
        keys[rows], values[rows] = key, value

    def copy(self, source: np.ndarray, target: np.ndarray) -> None:
        """Copy rows int64 [N] of all layers to other rows."""
        assert self._rows is not None
        self._rows[:, :, torch.from_numpy(target)] = self._rows[:, :, torch.from_numpy(source)]

    def _allocate(self, needed: int) -> None:
        layers, two, heads, head_dim = self._shape
        rows = 0 if self._rows is None else self._rows.shape[2]
        if self._rows is not None and needed <= rows:
            return
        # Doubling keeps a small use small; rows that are not written are never read.
        size = max(needed, min(self.capacity_rows, max(2 * rows, 1024)))
        grown = torch.empty((layers, two, size, heads, head_dim), dtype=self._dtype, device=self._device)
        if self._rows is not None and self._used:
            grown[:, :, : self._used] = self._rows[:, :, : self._used]
        self._rows = grown
