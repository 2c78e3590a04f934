"""Networks for tests: one whose log-probs are a closed form, and one as unlike BERT as the protocol allows."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from diffscore_fast.backbones.spec import BackboneSpec, PatternSpec
from diffscore_fast.engine.plan import AttentionPattern


class BagOfTokens:
    """log p(target | row) depends on the row's position and on the multiset of tokens it can see, and on nothing else.

    One layer of uniform attention over one-hot values: z = position_table[:, position] + bag_table @ mean one-hot.
    """

    def __init__(self, *, restart_positions: bool, logit_shift: int = 0, vocab_size: int = 40) -> None:
        limit = 64
        pattern = PatternSpec(limit, restart_positions=restart_positions)
        self.spec = BackboneSpec(
            family="bag",
            name="bag",
            num_layers=1,
            num_heads=1,
            num_kv_heads=1,
            head_dim=vocab_size,
            hidden_size=limit + vocab_size,
            vocab_size=vocab_size,
            mask_id=1,
            start_id=2,
            logit_shift=logit_shift,
            patterns={"full": pattern, "prefix": pattern, "block": PatternSpec(limit, block_sizes=(1, 2, 3, 4))},
            default_pattern="prefix",
        )
        generator = torch.Generator().manual_seed(0)
        self.position_table = torch.randn(vocab_size, limit, generator=generator)
        self.bag_table = torch.randn(vocab_size, vocab_size, generator=generator) * 3
        self.limit = limit
        self.vocabulary_weight = torch.cat([self.position_table, self.bag_table], dim=1)
        self.vocabulary_bias = None
        self.device, self.dtype, self.linear_implementation = torch.device("cpu"), torch.float32, None
        self.vocabulary_codes = None
        self.rows_embedded = 0

    def embed(self, tokens: Tensor, positions: Tensor, types: Tensor) -> Tensor:
        self.rows_embedded += len(tokens)
        one_hot = functional.one_hot(positions, self.limit), functional.one_hot(tokens, self.spec.vocab_size)
        return torch.cat(one_hot, dim=1).float()

    def attention_inputs(self, layer, hidden, positions, query_rows=None):
        key, value = self.keys_values(layer, hidden, positions)
        rows = hidden if query_rows is None else hidden[query_rows]
        return torch.zeros(len(rows), 1, self.spec.vocab_size), key, value

    def keys_values(self, layer, hidden, positions):
        value = hidden[:, None, self.limit :]
        return torch.zeros_like(value), value.contiguous()

    def attention_outputs(self, layer: int, hidden: Tensor, attended: Tensor) -> Tensor:
        return torch.cat([hidden[:, : self.limit], attended.flatten(1)], dim=1)

    def head_transform(self, hidden: Tensor) -> Tensor:
        return hidden

    def log_prob(self, target: int, position: int, seen: list[int]) -> float:
        """The closed form."""
        bag = np.bincount(seen, minlength=self.spec.vocab_size) / len(seen)
        logits = self.position_table[:, position].double().numpy() + self.bag_table.double().numpy() @ bag
        return float(logits[target] - np.logaddexp.reduce(logits))


class RotaryDecoder:
    """A random network with rotary positions, grouped key-value heads, RMS norm, SwiGLU and logit shift 1.

    Its `block` pattern with size 1 is a causal language model; a soft-cap and an excluded id come on top.
    """

    def __init__(self, *, logit_shift: int = 1, dtype: torch.dtype = torch.float32) -> None:
        self.spec = BackboneSpec(
            family="rotary",
            name="rotary",
            num_layers=3,
            num_heads=4,
            num_kv_heads=2,
            head_dim=8,
            hidden_size=32,
            vocab_size=50,
            mask_id=3,
            start_id=2,
            logit_shift=logit_shift,
            logit_scale=0.7,
            soft_cap=5.0,
            excluded_ids=(3,),
            default_pattern="block",
            patterns={
                "full": PatternSpec(128),
                "prefix": PatternSpec(128),
                "block": PatternSpec(128, block_sizes=(1, 2, 4)),
            },
        )
        generator = torch.Generator().manual_seed(1)

        def matrix(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, generator=generator).to(dtype) * 0.3

        self.token_embedding = matrix(50, 32)
        # Two rows of padding in the head, as real checkpoints have; they must stay outside the normaliser.
        self.vocabulary_weight = torch.cat([matrix(50, 32), torch.full((2, 32), 9.0, dtype=dtype)])
        self.vocabulary_bias = None
        self.layers = [
            {
                "q": matrix(32, 32),
                "kv": matrix(32, 32),
                "out": matrix(32, 32),
                "gate": matrix(64, 32),
                "up": matrix(64, 32),
                "down": matrix(32, 64),
            }
            for _ in range(3)
        ]
        self.device, self.dtype, self.linear_implementation = torch.device("cpu"), dtype, None
        self.vocabulary_codes = None

    def embed(self, tokens: Tensor, positions: Tensor, types: Tensor) -> Tensor:
        return self.token_embedding[tokens]

    def attention_inputs(self, layer, hidden, positions, query_rows=None):
        key, value = self.keys_values(layer, hidden, positions)
        rows, places = (hidden, positions) if query_rows is None else (hidden[query_rows], positions[query_rows])
        query = (_rms(rows) @ self.layers[layer]["q"].T).view(-1, 4, 8)
        return _rotate(query, places), key, value

    def keys_values(self, layer, hidden, positions):
        key, value = (_rms(hidden) @ self.layers[layer]["kv"].T).view(-1, 4, 8).split(2, dim=1)
        return _rotate(key, positions), value

    def attention_outputs(self, layer: int, hidden: Tensor, attended: Tensor) -> Tensor:
        weights = self.layers[layer]
        hidden = hidden + attended.flatten(1) @ weights["out"].T
        inner = _rms(hidden)
        return hidden + (functional.silu(inner @ weights["gate"].T) * (inner @ weights["up"].T)) @ weights["down"].T

    def head_transform(self, hidden: Tensor) -> Tensor:
        return _rms(hidden)


def _rms(hidden: Tensor) -> Tensor:
    return functional.rms_norm(hidden, hidden.shape[-1:])


def _rotate(rows: Tensor, positions: Tensor) -> Tensor:
    half = rows.shape[-1] // 2
    angle = positions[:, None, None] * (100.0 ** (-torch.arange(half) / half))
    first, second = rows[..., :half], rows[..., half:]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1).to(rows.dtype)


def dense_log_probs(
    backbone,
    attention: AttentionPattern,
    context: list[int],
    target: list[int],
    masked: list[bool],
    start: int = 0,
    stop: int | None = None,
) -> np.ndarray:
    """Second implementation: no windows, no cache, no packing. One sequence, one boolean mask, all rows everywhere.

    Prefix and window of one line are computed together; the prefix rows cannot see the window, so that what they
    hold is what a cache would hold.
    """
    spec, stop = backbone.spec, len(target) if stop is None else stop
    pattern = spec.patterns[attention.name]
    line = [spec.start_id, *context, *target]
    base = 1 + len(context)
    if attention.name == "full":
        first = 0
    elif attention.name == "prefix":
        first = max(base - spec.logit_shift, 0)
    else:
        first = max((base + start) // attention.block_size * attention.block_size - spec.logit_shift, 0)
    last = base + stop
    window = [
        spec.mask_id if base + start <= place and masked[place - base - start] else line[place]
        for place in range(first, last)
    ]
    # Clean rows come in whole blocks: with a logit shift, one more than the window may see.
    clean = first if attention.name != "block" else -(-first // attention.block_size) * attention.block_size
    tokens = torch.tensor(line[:clean] + window)
    restart = pattern.restart_positions
    positions = torch.tensor([*range(clean), *range(0 if restart else first, last - first if restart else last)])
    types = torch.tensor([pattern.prefix_type] * clean + [pattern.window_type] * len(window))
    sees = torch.zeros(len(tokens), len(tokens), dtype=torch.bool)
    for row in range(len(tokens)):
        if row >= clean:
            sees[row, :first] = sees[row, clean:] = True
        elif attention.name == "prefix":
            sees[row, :clean] = True
        else:
            sees[row, : (row // attention.block_size + 1) * attention.block_size] = True
    sees[:clean, clean:] = False
    hidden = backbone.embed(tokens, positions, types)
    group = spec.num_heads // spec.num_kv_heads
    for layer in range(spec.num_layers):
        query, key, value = backbone.attention_inputs(layer, hidden, positions)
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", query, key) / spec.head_dim**0.5
        weights = scores.masked_fill(~sees, -torch.inf).softmax(-1)
        hidden = backbone.attention_outputs(layer, hidden, torch.einsum("hqk,khd->qhd", weights, value))
    logits = backbone.head_transform(hidden) @ backbone.vocabulary_weight[: spec.vocab_size].T
    if backbone.vocabulary_bias is not None:
        logits = logits + backbone.vocabulary_bias
    logits = logits.double() * spec.logit_scale
    if spec.soft_cap is not None:
        logits = spec.soft_cap * torch.tanh(logits / spec.soft_cap)
    logits[:, list(spec.excluded_ids)] = -torch.inf
    log_probs = logits.log_softmax(-1)
    places = [base + start + i for i, flag in enumerate(masked) if flag]
    return np.array([float(log_probs[clean + place - spec.logit_shift - first, line[place]]) for place in places])
