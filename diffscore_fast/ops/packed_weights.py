"""Weights in the layout that products in blocks read, each packed once and kept."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MAX_PACKED_BYTES = 1 << 30  # that one network keeps; beyond, weights are packed at each call, which changes no number


class _Packed(NamedTuple):
    """A packed weight, and what it was made from. The storage is held, so that no other takes its address."""

    storage: torch.UntypedStorage
    version: int
    packed: Tensor


class PackedWeights:
    """The packed weights of one network, at most MAX_PACKED_BYTES of them.

    A weight that is changed in place or replaced is packed anew. A change through `weight.data`, which torch does not
    count, is not seen: `clear` afterwards.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[object, ...], _Packed] = {}

    def of(self, weight: Tensor, gated: bool) -> Tensor:
        """`weight` [M, K] (bfloat16, on the CPU) packed; `gated` packs it for the activation "swiglu"."""
        if torch.compiler.is_compiling() or weight.is_inference():  # torch does not count an inference tensor's changes
            return pack_weight(weight, gated)
        key = (weight.data_ptr(), weight.shape, weight.stride(), gated)
        found = self._kept.get(key)
        if found is not None and found.version == weight._version:
            return found.packed
        packed = pack_weight(weight, gated)
        self._kept.pop(key, None)
        if self.num_bytes + packed.nbytes <= MAX_PACKED_BYTES:
            self._kept[key] = _Packed(weight.untyped_storage(), weight._version, packed)
        return packed

    @property
    def num_bytes(self) -> int:
        return sum(item.packed.nbytes for item in self._kept.values())

    def clear(self) -> None:
        self._kept.clear()

    def __deepcopy__(self, memo: object) -> PackedWeights:
        return PackedWeights()

    def __reduce__(self) -> tuple[type[PackedWeights], tuple[()]]:
        return PackedWeights, ()


def pack_weight(weight: Tensor, gated: bool) -> Tensor:
    """A bfloat16 `weight` [M, K] as [blocks, K / 2, 48, 2]: 48 of its rows to a block, pairs of numbers side by side.

    With `gated`, the two halves of the rows are packed one after the other. Rows and depth are padded with zeros.
    """
    return torch.ops.diffscore_fast.pack_weight(weight.detach(), gated)
