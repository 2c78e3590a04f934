"""What a model family does differently, stated once (`BackboneSpec`), and what a network must offer (`Backbone`).

The engine reads the spec and calls the protocol, so that it never asks which family a model belongs to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from diffscore_fast.errors import UnsupportedPatternError
from diffscore_fast.ops import Int8Weight

PatternName = Literal["full", "prefix", "block"]
PrefixMask = Literal["bidirectional", "causal"]


@dataclass(frozen=True)
class PatternSpec:
    """How a model was trained to see one attention pattern.

    Parameters
    ----------
    position_limit : int
        Number of positions that a cached sequence or a window may use.
    restart_positions : bool
        True if a window's positions start again at 0; False if they continue those of its prefix.
    prefix_type, window_type : int
        Token type of the cached prefix and of the window. With `full`: of the context and of the target. A target
        without context counts as a single text and has `prefix_type`.
    separator_ids, end_ids : tuple of int
        Control tokens between a context and its target, and after the target: visible, never masked, never scored.
        Without a context there is no separator.
    block_sizes : tuple of int
        Block sizes of the `block` pattern; empty for the others.
    default_block_size : int
        Block size of a score under `block` where the caller names none; 0 if the caller must.
    blocks_from_target : bool
        Where the blocks of `block` begin: at the target's first token, or at place 0 of the line, so that the target's
        first block may hold the end of its context.
    prefix_mask : {"bidirectional", "causal"}
        What a token of the clean prefix sees. "causal": the prefix up to itself. "bidirectional": under `prefix` the
        whole prefix, under `block` its own block and those before it. The window sees all of the prefix and of itself
        in every case.
    """

    position_limit: int
    restart_positions: bool = False
    prefix_type: int = 0
    window_type: int = 0
    separator_ids: tuple[int, ...] = ()
    end_ids: tuple[int, ...] = ()
    block_sizes: tuple[int, ...] = ()
    default_block_size: int = 0
    blocks_from_target: bool = False
    prefix_mask: PrefixMask = "bidirectional"

    def prefix_block(self, block_size: int) -> int:
        """Block size of the causal order inside a clean prefix, given that of the pattern; 0: every token sees all."""
        return 1 if self.prefix_mask == "causal" else block_size


@dataclass(frozen=True)
class BackboneSpec:
    """All differences between models and families that the rest of the package needs to know.

    Parameters
    ----------
    family : str
        `model_type` of the checkpoint's config.json: a key of `BERT_FAMILIES` or `LLAMA_FAMILIES` ("bert", "Dream") for
        this package's own networks, any other type ("modernbert") for those that transformers runs.
    name : str
        The name the model goes by in signatures and messages.
    num_layers, num_heads, num_kv_heads, head_dim, hidden_size : int
        Shapes of the body. Query head h reads key-value head h // (num_heads // num_kv_heads).
    vocab_size : int
        Real vocabulary rows; rows of the weight beyond it are padding and outside the normaliser.
    mask_id : int
        Token that stands for a masked position.
    excluded_ids : tuple of int
        Tokens that the model never predicts: their logit is -inf before the softmax.
    start_id : int or None
        Token at place 0 of every sequence; visible, never masked, never scored.
    logit_shift : 0 or 1
        1 where the hidden state at row i predicts token i + 1 (Dream, causal models).
    logit_scale : float
        Factor on the logits (LLaDA's `scale_logits`).
    soft_cap : float or None
        Logits become soft_cap * tanh(logits / soft_cap) after the scale.
    patterns : dict of str to PatternSpec
        The attention patterns that the model was trained with. Asking for another is an error.
    default_pattern : str
        The pattern that is used when the caller names none.
    """

    family: str
    name: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    mask_id: int
    patterns: dict[str, PatternSpec]
    excluded_ids: tuple[int, ...] = ()
    start_id: int | None = None
    logit_shift: Literal[0, 1] = 0
    logit_scale: float = 1.0
    soft_cap: float | None = None
    default_pattern: PatternName = "full"

    def pattern(self, name: str, block_size: int = 0) -> PatternSpec:
        """The pattern of that name.

        Raises
        ------
        UnsupportedPatternError
            If the model was not trained with it, or not with that block size.
        """
        if name not in self.patterns:
            known = ", ".join(sorted(self.patterns))
            raise UnsupportedPatternError(
                f"model {self.name!r} was not trained with attention {name!r}; it has: {known}"
            )
        pattern = self.patterns[name]
        if name == "block" and block_size not in pattern.block_sizes:
            known = ", ".join(map(str, pattern.block_sizes))
            raise UnsupportedPatternError(
                f"model {self.name!r} was not trained with block size {block_size}; it has: {known}"
            )
        return pattern

    def block_size_near(self, wanted: int) -> int:
        """That block size if the model has it, otherwise the one that it was trained with; 0 if there is none."""
        found = self.patterns.get("block", PatternSpec(0))
        return wanted if wanted in found.block_sizes else found.default_block_size

    def start_in_block(self, block_size: int) -> bool:
        """Whether the start token is the first token of the first block, under `block`, of a text without context."""
        return self.start_id is not None and not self.pattern("block", block_size).blocks_from_target


class Backbone(Protocol):
    """What every network offers. It is either a `SplitBackbone` or an `OpaqueBackbone`, which adds how states are made.

    All tensors are packed: N rows of many windows laid end to end, without padding. The last layer's states of the
    wanted rows pass `head_transform`, and `ops.masked_logprob` multiplies them with `vocabulary_weight`.
    """

    @property
    def spec(self) -> BackboneSpec: ...

    @property
    def vocabulary_weight(self) -> Tensor:
        """Vocabulary projection [V, E]."""
        ...

    @property
    def vocabulary_bias(self) -> Tensor | None:
        """Bias [V] of the vocabulary projection; None if it has none."""
        ...

    @property
    def vocabulary_codes(self) -> Int8Weight | None:
        """The first `vocab_size` rows of the vocabulary projection in int8, if the network computes in int8."""
        ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def linear_implementation(self) -> str | None:
        """Implementation of `ops.linear` that multiplies the layers' weights; None where another library does that."""
        ...

    def choose_linear(self, implementation: str) -> None:
        """Ask for an implementation of `ops.linear` by name ("auto" for the best one); no effect where none is used."""
        ...

    def head_transform(self, hidden: Tensor) -> Tensor:
        """What stands between the last layer and the vocabulary weight; [M, D] to [M, E], E = D in most families."""
        ...


class SplitBackbone(Backbone, Protocol):
    """A network that is split around attention, so that the engine can cache prefixes and drop rows.

    The engine calls `embed`, then for each layer `attention_inputs`, its own attention, and `attention_outputs`.
    """

    def embed(self, tokens: Tensor, positions: Tensor, types: Tensor) -> Tensor:
        """Hidden states [N, D] before the first layer, for int64 tokens, positions and types [N]."""
        ...

    def attention_inputs(
        self, layer: int, hidden: Tensor, positions: Tensor, query_rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [Q, H, d], keys and values [N, Hkv, d] of one layer, positions applied.

        `query_rows` [Q] (int64) limits the queries to those rows; None asks for all of them.
        """
        ...

    def keys_values(self, layer: int, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Only keys and values, each [N, Hkv, d]: a prefix's last layer needs nothing else."""
        ...

    def attention_outputs(self, layer: int, hidden: Tensor, attended: Tensor) -> Tensor:
        """The rest of the layer for rows whose attention result is known.

        `hidden` [Q, D] is the layer's input at the same rows as `attended` [Q, H, d].
        """
        ...


@runtime_checkable
class OpaqueBackbone(Backbone, Protocol):
    """A network that cannot be split around its attention: it runs whole windows, and has only the pattern `full`."""

    def window_states(self, tokens: Tensor, types: Tensor, offsets: np.ndarray, wanted: Tensor) -> Tensor:
        """The last layer's states [M, D] of the rows `wanted` int64 [M].

        Windows are runs of int64 tokens and types [N] at `offsets` int64 [W + 1]; a window sees only itself.
        """
        ...
