"""Layouts of masked sequences for each attention pattern, and a differentiable forward pass over packed layouts.

A layout has rows (tokens, positions, types) and spans. A span states which rows attend to which rows, and through which
mask. Sequences of different patterns and lengths lie end to end in one pack, without padding: attention runs span by
span, everything else over all rows at once. The engine lays out the same patterns for scoring (`engine.windows`); a
test holds that both agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from diffscore_fast.backbones.spec import BackboneSpec, SplitBackbone


@dataclass(frozen=True)
class Span:
    """Rows `start`..`stop` - 1 of a layout attend to its rows `key_start`..`key_stop` - 1 where `visible` bool [q, k];
    None: all visible. The spans of a layout follow each other and cover its rows."""

    start: int
    stop: int
    key_start: int
    key_stop: int
    visible: Tensor | None = None


@dataclass(frozen=True)
class Layout:
    """One sequence as rows: `tokens`, `positions`, `types` int64 [n], spans, and the masked rows with their targets.

    masked_rows, targets : int64 [m], in ascending order of rows; with a logit shift of 1, the rows before the masked
    ones, which predict them
    """

    tokens: np.ndarray
    positions: np.ndarray
    types: np.ndarray
    spans: tuple[Span, ...]
    masked_rows: np.ndarray
    targets: np.ndarray


@dataclass(frozen=True)
class Pack:
    """Layouts end to end, as tensors; `lengths` and `spans` are those of the layouts, in order.

    sequence : int64 [m], which layout a masked row belongs to
    """

    tokens: Tensor
    positions: Tensor
    types: Tensor
    lengths: tuple[int, ...]
    spans: tuple[tuple[Span, ...], ...]
    masked_rows: Tensor
    targets: Tensor
    sequence: Tensor

    @property
    def num_sequences(self) -> int:
        return len(self.lengths)


def lay_full(window: np.ndarray, masked: np.ndarray, spec: BackboneSpec) -> Layout:
    """Start token and window, every row sees every row. `masked` bool [W] over the window."""
    assert spec.logit_shift == 0, "rows predict at their own places"
    tokens, hidden = _with_start(window, masked, spec)
    return Layout(
        np.where(hidden, spec.mask_id, tokens),
        np.arange(len(tokens)),
        np.zeros_like(tokens),
        (Span(0, len(tokens), 0, len(tokens)),),
        np.flatnonzero(hidden),
        tokens[hidden],
    )


def lay_prefix(prefix: np.ndarray, window: np.ndarray, masks: np.ndarray, spec: BackboneSpec) -> Layout:
    """Start token and prefix see themselves; each copy of the window sees the prefix and itself.

    `masks` bool [C, W] are the masks of C copies. Copies do not see each other, and the prefix does not see them, so
    that it is computed once. With a logit shift of 1 every copy begins with the last token before the window. Positions
    of a copy start as the pattern states.
    """
    pattern = spec.pattern("prefix")
    line = _before_window(prefix, spec)
    border, copies = len(line) - spec.logit_shift, len(masks)
    before, carried = line[:border], line[border:]
    copied = np.concatenate([np.tile(carried, (copies, 1)), np.where(masks, spec.mask_id, window)], axis=1)
    length = copied.shape[1]
    first, count = 0 if pattern.restart_positions else border, border + copies * length
    copy = np.repeat(np.arange(copies), length)
    visible = np.concatenate([np.ones((len(copy), border), dtype=bool), copy[:, None] == copy[None, :]], axis=1)
    window_span = Span(border, count, 0, count, torch.from_numpy(visible) if copies > 1 else None)
    prefix_visible = _up_to_itself(border) if pattern.prefix_mask == "causal" else None
    # A row predicts at its own place; with a shift the place before, which is the copy's row of the same number.
    rows = np.pad(masks, ((0, 0), (0, spec.logit_shift)))
    return Layout(
        np.concatenate([before, copied.ravel()]),
        np.concatenate([np.arange(border), np.tile(np.arange(first, first + length), copies)]),
        np.repeat([pattern.prefix_type, pattern.window_type], [border, copies * length]),
        (Span(0, border, 0, border, prefix_visible), window_span)[border == 0 :],
        border + np.flatnonzero(rows),
        np.tile(window, copies)[masks.ravel()],
    )


def lay_prefix_blocks(
    prefix: np.ndarray, window: np.ndarray, masked: np.ndarray, block_size: int, spec: BackboneSpec
) -> Layout:
    """All blocks of a masked window after a causal prefix, in one pass.

    Block b holds window tokens b * block_size and following. The clean stream (start token, prefix, clean window) comes
    first, each row sees those before it and itself. A noisy block, which begins with the token before it, sees the
    clean stream before its first row, and itself. Blocks without a masked token are left out, and so is what no noisy
    row sees of the clean stream.
    """
    assert spec.logit_shift == 1 and block_size > 1, "a row predicts the token after it, and a block has several"
    before = _before_window(prefix, spec)
    line = np.concatenate([before, window])
    noisy_line = np.concatenate([before, np.where(masked, spec.mask_id, window)])
    is_masked = np.concatenate([np.zeros(len(before), dtype=bool), masked])
    firsts = len(before) + block_size * np.unique(np.flatnonzero(masked) // block_size)
    lasts = np.minimum(firsts + block_size, len(line))
    # A block's first row is the clean token before it; its last token predicts nothing inside the block.
    copies = [
        np.concatenate([line[first - 1 : first], noisy_line[first:last]]) for first, last in _ranges(firsts, lasts)
    ]
    positions = [np.arange(first - 1, last) for first, last in _ranges(firsts, lasts)]
    predicts = [np.append(is_masked[first:last], False) for first, last in _ranges(firsts, lasts)]
    border = int(firsts[-1]) - 1 if len(firsts) else len(line)
    block = np.repeat(np.arange(len(firsts)), lasts - firsts + 1)
    visible = np.concatenate(
        [np.arange(border)[None, :] < (firsts - 1)[block][:, None], block[:, None] == block[None, :]], axis=1
    )
    count = border + len(block)
    spans = (
        Span(0, border, 0, border, _up_to_itself(border)),
        Span(border, count, 0, count, torch.from_numpy(visible)),
    )
    return Layout(
        np.concatenate([line[:border], *copies]),
        np.concatenate([np.arange(border), *positions]),
        np.zeros(count, dtype=np.int64),
        spans[border == 0 : 1 + (count > border)],
        border + np.flatnonzero(np.concatenate(predicts)) if predicts else np.zeros(0, dtype=np.int64),
        window[masked],
    )


def lay_left_to_right(prefix: np.ndarray, window: np.ndarray, spec: BackboneSpec) -> Layout:
    """Start token, prefix and window as a causal language model reads them; every token of the window is predicted."""
    assert spec.logit_shift == 1, "a row predicts the token after it"
    before = _before_window(prefix, spec)
    tokens = np.concatenate([before, window])[:-1]
    count = len(tokens)
    return Layout(
        tokens,
        np.arange(count),
        np.zeros_like(tokens),
        (Span(0, count, 0, count, _up_to_itself(count)),),
        np.arange(len(before) - 1, count),
        window,
    )


def lay_block(window: np.ndarray, masked: np.ndarray, block_size: int, spec: BackboneSpec) -> Layout:
    """Block diffusion's two streams (BD3-LM, arXiv 2503.09573): all blocks of a text in one pass.

    The start token is place 0, so place p lies in block p // block_size. The clean stream (unmasked, block-causal)
    comes first; the noisy stream follows, where a block sees itself and the clean blocks before it. Blocks that no
    noisy row sees are left out of the clean stream, blocks without a masked token out of the noisy one.
    """
    spec.pattern("block", block_size)
    assert spec.logit_shift == 0, "rows predict at their own places"
    tokens, hidden = _with_start(window, masked, spec)
    places = np.arange(len(tokens))
    blocks = places // block_size
    noisy = places[np.isin(blocks, np.unique(blocks[hidden]))]
    clean = places[blocks < blocks[noisy[-1]]] if len(noisy) else places[:0]
    seen_by_clean = torch.from_numpy(blocks[clean][:, None] >= blocks[clean][None, :])
    seen_by_noisy = torch.from_numpy(
        np.concatenate(
            [blocks[noisy][:, None] > blocks[clean][None, :], blocks[noisy][:, None] == blocks[noisy][None, :]], axis=1
        )
    )
    border, count = len(clean), len(clean) + len(noisy)
    spans = (Span(0, border, 0, border, seen_by_clean), Span(border, count, 0, count, seen_by_noisy))
    return Layout(
        np.concatenate([tokens[clean], np.where(hidden, spec.mask_id, tokens)[noisy]]),
        np.concatenate([clean, noisy]),
        np.zeros(count, dtype=np.int64),
        spans if border else spans[1:],
        border + np.flatnonzero(hidden[noisy]),
        tokens[noisy][hidden[noisy]],
    )


def pack_layouts(layouts: Sequence[Layout]) -> Pack:
    """Put layouts end to end."""
    starts = np.cumsum([0] + [len(layout.tokens) for layout in layouts[:-1]])
    together = [(layout, int(start)) for layout, start in zip(layouts, starts, strict=True)]

    def joined(arrays: list[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(arrays).astype(np.int64, copy=False))

    return Pack(
        tokens=joined([layout.tokens for layout in layouts]),
        positions=joined([layout.positions for layout in layouts]),
        types=joined([layout.types for layout in layouts]),
        lengths=tuple(len(layout.tokens) for layout in layouts),
        spans=tuple(layout.spans for layout in layouts),
        masked_rows=joined([layout.masked_rows + start for layout, start in together]),
        targets=joined([layout.targets for layout in layouts]),
        sequence=joined([np.full(len(layout.targets), number) for number, layout in enumerate(layouts)]),
    )


def hidden_at(backbone: SplitBackbone, pack: Pack, rows: Tensor) -> Tensor:
    """Hidden states [R, D] after the last layer at `rows` int64 [R] (ascending), differentiable.

    The last layer computes queries, output projection and feed-forward for those rows only.
    """
    num_layers = backbone.spec.num_layers
    hidden = backbone.embed(pack.tokens, pack.positions, pack.types)
    for layer in range(num_layers - 1):
        inputs = backbone.attention_inputs(layer, hidden, pack.positions)
        hidden = backbone.attention_outputs(layer, hidden, _attend(*inputs, pack))
    inputs = backbone.attention_inputs(num_layers - 1, hidden, pack.positions, rows)
    attended = _attend(*inputs, pack, rows.numpy())
    return backbone.attention_outputs(num_layers - 1, hidden[rows], attended)


def _attend(query: Tensor, key: Tensor, value: Tensor, pack: Pack, rows: np.ndarray | None = None) -> Tensor:
    """Attention results [Q, H, d] of all rows, or of `rows` (ascending), which `query` [Q, H, d] then holds.

    Rows are cut with `split`, whose backward is one concatenation; the backward of a slice would fill a tensor as large
    as the pack for each of them.
    """
    ends = np.cumsum(pack.lengths)
    wanted = [] if rows is None else np.split(rows, np.searchsorted(rows, ends[:-1]))
    sizes = list(pack.lengths) if rows is None else [len(part) for part in wanted]
    parts = zip(query.split(sizes), key.split(pack.lengths), value.split(pack.lengths), strict=True)
    results = []
    for number, (queries, keys, values) in enumerate(parts):
        own = None if rows is None else wanted[number] - (ends[number] - pack.lengths[number])
        results += _attend_spans(queries, keys, values, pack.spans[number], own)
    return torch.cat(results)


def _attend_spans(
    query: Tensor, key: Tensor, value: Tensor, spans: Sequence[Span], rows: np.ndarray | None
) -> list[Tensor]:
    """The same within one layout; one tensor per span."""
    results = []
    for span in spans:
        first, last, visible = span.start, span.stop, span.visible
        if rows is not None:
            first, last = np.searchsorted(rows, [span.start, span.stop])
            if first == last:
                continue
            if visible is not None:
                visible = visible[torch.from_numpy(rows[first:last] - span.start)]
        keys, values = key[span.key_start : span.key_stop], value[span.key_start : span.key_stop]
        results.append(_attention(query[first:last], keys, values, visible))
    return results


def _attention(query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None) -> Tensor:
    """Attention [Q, H, d] of queries [Q, H, d] to keys and values [K, Hkv, d] where `visible` bool [Q, K]."""
    if query.dtype == torch.bfloat16 and query.device.type == "cpu":
        # Two products and a softmax: torch's fused kernel takes three times as long in bfloat16 on a CPU.
        shared = query.shape[1] // key.shape[1]
        queries = query.unflatten(1, (key.shape[1], shared)).permute(1, 2, 0, 3).flatten(1, 2)  # [Hkv, shared * Q, d]
        scores = torch.bmm(queries * query.shape[2] ** -0.5, key.permute(1, 2, 0)).unflatten(1, (shared, -1)).float()
        if visible is not None:
            scores = scores.masked_fill(~visible, float("-inf"))
        weights = scores.softmax(dim=-1).to(value.dtype).flatten(1, 2)
        result = torch.bmm(weights, value.transpose(0, 1)).unflatten(1, (shared, -1))  # [Hkv, shared, Q, d]
        return result.permute(2, 0, 1, 3).flatten(1, 2)
    result = functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        attn_mask=visible,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return result[0].transpose(0, 1)


def _ranges(firsts: np.ndarray, lasts: np.ndarray) -> list[tuple[int, int]]:
    return list(zip(firsts.tolist(), lasts.tolist(), strict=True))


def _before_window(prefix: np.ndarray, spec: BackboneSpec) -> np.ndarray:
    """Start token, prefix, and separator tokens."""
    pattern = spec.pattern("prefix")
    assert not pattern.end_ids, "the trainer ends no line"
    separator = np.array(pattern.separator_ids if len(prefix) else (), dtype=np.int64)
    return _with_start(np.concatenate([prefix, separator]), np.zeros(len(prefix) + len(separator), dtype=bool), spec)[0]


def _up_to_itself(count: int) -> Tensor:
    """bool [count, count]: each row sees those before it and itself."""
    return torch.ones(count, count, dtype=torch.bool).tril()


def _with_start(window: np.ndarray, masked: np.ndarray, spec: BackboneSpec) -> tuple[np.ndarray, np.ndarray]:
    """Window and mask with the start token, never masked, in front."""
    assert spec.start_id is not None, "the trainer lays sequences out after a start token"
    return np.concatenate([[spec.start_id], window]), np.concatenate([[False], masked])
