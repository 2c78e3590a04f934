"""What this package's own networks share: the products of the body, by `ops.linear`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from diffscore_fast.backbones.spec import BackboneSpec
from diffscore_fast.ops import AUTO, linear
from diffscore_fast.ops.linear import resolve_linear


class Network(nn.Module):
    """A network whose products run by one implementation, which may be asked for by name."""

    spec: BackboneSpec
    words: nn.Embedding

    def __init__(self) -> None:
        super().__init__()
        self.implementation = AUTO  # where `linear` has the one asked for

    @property
    def device(self) -> torch.device:
        return self.words.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.words.weight.dtype

    @property
    def linear_implementation(self) -> str:
        """What the products of the body resolve to when scoring."""
        return resolve_linear(self.device, self.dtype, self.implementation).name

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, **epilogue: Any) -> Tensor:
        return linear(x, weight, bias, implementation=self.implementation, **epilogue)

    def _heads(self, projected: Tensor) -> Tensor:
        """[N, H * d] to [N, H, d]."""
        return projected.view(projected.shape[0], -1, self.spec.head_dim)
