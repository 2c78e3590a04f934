"""What this package's own networks share: their products run by `ops.linear`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from diffscore_fast.backbones.spec import BackboneSpec
from diffscore_fast.ops import (
    AUTO,
    INT8_LINEAR,
    Int8Layer,
    Int8Weight,
    ResidualNorm,
    int8_feed_forward,
    int8_linear,
    linear,
)
from diffscore_fast.ops.linear import resolve_linear
from diffscore_fast.ops.packed_weights import PackedWeights


class Network(nn.Module):
    """A network whose products run by one implementation of `ops.linear`, which can be chosen by name.

    After `to_int8` its layers have int8 weights, and their products run by `ops.int8_linear`.
    """

    spec: BackboneSpec
    token_embedding: nn.Embedding

    def __init__(self) -> None:
        super().__init__()
        self._implementation = AUTO
        self.vocabulary_codes: Int8Weight | None = None
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
        if any(isinstance(getattr(module, "weight", None), Int8Weight) for module in self.modules()):
            return INT8_LINEAR.resolve(self.device, self._implementation).name
        return resolve_linear(self.device, self.dtype, self._implementation).name

    def choose_linear(self, implementation: str) -> None:
        self._implementation = implementation

    def _linear(self, x: Tensor, weight: Tensor | Int8Weight, bias: Tensor | None, **epilogue: Any) -> Tensor:
        if isinstance(weight, Int8Weight):
            return int8_linear(x, weight, bias, implementation=self._implementation, **epilogue)
        return linear(
            x, weight, bias, packed_weights=self._packed_weights, implementation=self._implementation, **epilogue
        )

    def _feed_forward(
        self, x: Tensor, up: nn.Linear, down: nn.Linear, activation: str, residual_norm: ResidualNorm | None = None
    ) -> Tensor:
        """Two layers with an activation between them."""
        weights: tuple[Any, Any] = up.weight, down.weight  # `Int8Linear` stands in a layer's place in int8
        if isinstance(weights[0], Int8Weight):
            return int8_feed_forward(
                x,
                Int8Layer(weights[0], up.bias),
                Int8Layer(weights[1], down.bias),
                activation=activation,
                residual_norm=residual_norm,
                implementation=self._implementation,
            )
        inner = self._linear(x, up.weight, up.bias, activation=activation)
        return self._linear(inner, down.weight, down.bias, residual_norm=residual_norm)

    def _heads(self, projected: Tensor) -> Tensor:
        """[N, H * d] to [N, H, d]."""
        return projected.view(projected.shape[0], -1, self.spec.head_dim)
