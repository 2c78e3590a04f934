"""What this package's own networks share: their products run by `ops.linear`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from diffscore_fast.backbones.spec import BackboneSpec
from diffscore_fast.ops import AUTO, linear
from diffscore_fast.ops.linear import resolve_linear
from diffscore_fast.ops.packed_weights import PackedWeights


class Network(nn.Module):
    """A network whose products run by one implementation of `ops.linear`, which can be chosen by name."""

    spec: BackboneSpec
    token_embedding: nn.Embedding

    def __init__(self) -> None:
        super().__init__()
        self._implementation = AUTO
        self._packed_weights = PackedWeights()

    @property
    def device(self) -> torch.device:
        return self.token_embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.token_embedding.weight.dtype

    @property
    def linear_implementation(self) -> str:
        """The implementation that the products resolve to when scoring."""
        return resolve_linear(self.device, self.dtype, self._implementation).name

    def choose_linear(self, implementation: str) -> None:
        self._implementation = implementation

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, **epilogue: Any) -> Tensor:
        return linear(
            x, weight, bias, packed_weights=self._packed_weights, implementation=self._implementation, **epilogue
        )

    def _heads(self, projected: Tensor) -> Tensor:
        """[N, H * d] to [N, H, d]."""
        return projected.view(projected.shape[0], -1, self.spec.head_dim)
