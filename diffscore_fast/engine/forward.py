"""The forward pass of one pack: embedding, layers around attention, the last layer's wanted rows, the vocabulary.

`forward_pass` is the one place that asks which kind of backbone it is given.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diffscore_fast import ops
from diffscore_fast.backbones.spec import Backbone, OpaqueBackbone, SplitBackbone
from diffscore_fast.engine.cache import PrefixCache
from diffscore_fast.engine.packs import PrefixPack, WindowPack
from diffscore_fast.engine.profile import stage
from diffscore_fast.ops.registry import Operation
from diffscore_fast.ops.transfer import to_device


def forward_pass(backbone: SplitBackbone | OpaqueBackbone, cache: PrefixCache, implementation: str) -> ForwardPass:
    """The forward pass of a backbone of either kind.

    Raises
    ------
    ImplementationError
        If no operation of the pass has the implementation that is named.
    """
    if isinstance(backbone, OpaqueBackbone):
        return _WholeWindows(backbone, implementation)
    return _LayerByLayer(backbone, cache, implementation)


class ForwardPass(ABC):
    """A backbone with the engine's work around it: states of wanted rows, then log-probabilities or samples.

    Parameters
    ----------
    backbone : Backbone
    implementation : str
        "auto", or a name: operations that have it run by it, the others by "auto".
    """

    operations: tuple[Operation, ...] = (ops.MASKED_LOGPROB,)

    def __init__(self, backbone: Backbone, implementation: str) -> None:
        self._backbone = backbone
        self._wanted = ops.wanted_by_operation(self.operations, implementation)

    @property
    def implementations(self) -> dict[str, str]:
        """The implementation that each operation of a score resolves to, by the operation's name."""
        backbone = self._backbone
        names = {item.name: item.resolve(backbone.device, self._wanted[item.name]).name for item in self.operations}
        if backbone.linear_implementation is not None:
            names[ops.LINEAR.name] = backbone.linear_implementation
        return names

    @abstractmethod
    def window_states(self, pack: WindowPack) -> Tensor:
        """The last layer's states [M, D] of a pack's wanted rows."""

    @abstractmethod
    def fill_cache(self, pack: PrefixPack) -> None:
        """Compute the keys and values of a pack of prefixes and write them to the cache."""

    def log_probs(self, states: Tensor, targets: np.ndarray) -> Tensor:
        """Log-probability float32 [M] of the targets int [M] at states [M, D]; no logits are stored."""
        wanted = torch.from_numpy(targets.astype(np.int64))
        hidden, weight, bias = self._projection(states)
        options = self._options(self._wanted["masked_logprob"])
        codes = self._backbone.vocabulary_codes
        if codes is not None:
            return ops.int8_logprob(hidden, codes, weight, bias, wanted, **options)
        return ops.masked_logprob(hidden, weight, bias, wanted, **options)

    def sample(self, states: Tensor, numbers: np.ndarray) -> Tensor:
        """A token int64 [M] for each of the states [M, D], by uniform numbers float64 [M]."""
        return ops.sample_token(*self._projection(states), torch.from_numpy(numbers), **self._options(ops.AUTO))

    def best(self, states: Tensor) -> Tensor:
        """The most probable token int64 [M] at each of the states [M, D]."""
        return ops.best_token(*self._projection(states), **self._options(ops.AUTO))

    def _projection(self, states: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Transformed states [M, E], weight [V, E] and bias [V]."""
        backbone = self._backbone
        return backbone.head_transform(states), backbone.vocabulary_weight, backbone.vocabulary_bias

    def _options(self, implementation: str) -> dict[str, Any]:
        spec = self._backbone.spec
        return {
            "excluded_ids": spec.excluded_ids,
            "vocab_size": spec.vocab_size,
            "logit_scale": spec.logit_scale,
            "soft_cap": spec.soft_cap,
            "implementation": implementation,
        }


class _LayerByLayer(ForwardPass):
    """A split backbone: its layers, with `ops.prefix_attention` over the cache and the pack between their halves."""

    _backbone: SplitBackbone
    operations = (ops.MASKED_LOGPROB, ops.PREFIX_ATTENTION)

    def __init__(self, backbone: SplitBackbone, cache: PrefixCache, implementation: str) -> None:
        super().__init__(backbone, implementation)
        self._cache = cache
        self._last = backbone.spec.num_layers - 1  # index of the last layer

    def window_states(self, pack: WindowPack) -> Tensor:
        """In the last layer all rows have keys and values, and only the wanted rows go further."""
        wanted = to_device(pack.wanted, self._backbone.device)
        hidden, positions = self._embed(pack.tokens, pack.positions, pack.types)  # [N, D], [N]
        layout = ops.AttentionLayout(pack.offsets, pack.offsets, pack.prefix_starts, pack.visible)
        for layer in range(self._last):
            inputs = self._backbone.attention_inputs(layer, hidden, positions)
            hidden = self._rest_of_layer(layer, hidden, inputs, layout)
        inputs = self._backbone.attention_inputs(self._last, hidden, positions, wanted)
        hidden = hidden[wanted]  # [M, D]
        layout = ops.AttentionLayout(
            pack.offsets, pack.wanted_offsets, pack.prefix_starts, pack.visible, pack.wanted_places
        )
        return self._rest_of_layer(self._last, hidden, inputs, layout)

    def fill_cache(self, pack: PrefixPack) -> None:
        """The last layer computes only keys and values: nothing reads the states after it."""
        rows = to_device(pack.cache_rows, self._backbone.device)
        hidden, positions = self._embed(pack.tokens, pack.positions, pack.types)
        layout = ops.AttentionLayout(pack.offsets, pack.offsets, pack.prefix_starts, pack.visible, block=pack.block)
        for layer in range(self._last):
            query, key, value = self._backbone.attention_inputs(layer, hidden, positions)
            self._cache.write(layer, rows, key, value)
            hidden = self._rest_of_layer(layer, hidden, (query, key, value), layout)
        self._cache.write(self._last, rows, *self._backbone.keys_values(self._last, hidden, positions))

    def _embed(self, tokens: np.ndarray, positions: np.ndarray, types: int | np.ndarray) -> tuple[Tensor, Tensor]:
        """Hidden states [N, D] before the first layer, and positions [N] on the device."""
        device = self._backbone.device
        on_device = to_device(positions.astype(np.int64), device)
        ids = to_device(tokens.astype(np.int64), device)
        return self._backbone.embed(ids, on_device, _types(types, ids)), on_device

    def _rest_of_layer(
        self, layer: int, hidden: Tensor, inputs: tuple[Tensor, Tensor, Tensor], layout: ops.AttentionLayout
    ) -> Tensor:
        """Attention and what follows it, for the rows that have queries: [Q, D] to [Q, D]."""
        query, key, value = inputs
        prefix_key, prefix_value = (key[:0], key[:0]) if self._cache.is_empty else self._cache.layer(layer)
        with stage("attention"):
            attended = ops.prefix_attention(
                query, key, value, prefix_key, prefix_value, layout, implementation=self._wanted["prefix_attention"]
            )
        return self._backbone.attention_outputs(layer, hidden, attended)


class _WholeWindows(ForwardPass):
    """A backbone that runs whole windows: another library computes its attention, and no prefix is ever cached."""

    _backbone: OpaqueBackbone

    def window_states(self, pack: WindowPack) -> Tensor:
        ids = to_device(pack.tokens.astype(np.int64), self._backbone.device)
        wanted = to_device(pack.wanted, self._backbone.device)
        return self._backbone.window_states(ids, _types(pack.types, ids), pack.offsets, wanted)

    def fill_cache(self, pack: PrefixPack) -> None:
        raise AssertionError("the pattern `full` has no prefixes")


def _types(types: int | np.ndarray, tokens: Tensor) -> Tensor:
    """Token types [N] beside the tokens."""
    if isinstance(types, int):
        return torch.full_like(tokens, types)
    return to_device(types.astype(np.int64), tokens.device)
