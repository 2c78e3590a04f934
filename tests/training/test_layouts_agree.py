"""What is trained is what is scored: the trainer's layouts and the engine's windows say the same of every row.

A row that predicts a target is described by its token, position and type, by the rows that it sees, by what those see,
and so on, for as many layers as `LAYERS`. Both sides must give the same description for every target, in order.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffscore_fast.backbones.spec import BackboneSpec, PatternSpec
from diffscore_fast.engine.plan import AttentionPattern, MaskPlan, Sequences
from diffscore_fast.engine.windows import compose, split_at_blocks
from diffscore_fast.training.patterns import (
    Layout,
    lay_block,
    lay_full,
    lay_left_to_right,
    lay_prefix,
    lay_prefix_blocks,
)

LAYERS = 3
BERT = BackboneSpec(
    family="bert",
    name="bert",
    num_layers=LAYERS,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    hidden_size=8,
    vocab_size=50,
    mask_id=4,
    start_id=2,
    patterns={
        "full": PatternSpec(512, prefix_type=0, window_type=1),
        "prefix": PatternSpec(512, restart_positions=True, window_type=1),
        "block": PatternSpec(512, block_sizes=(1, 3, 4)),
    },
)
CAUSAL_PREFIX = replace(
    BERT,
    logit_shift=1,
    patterns={
        "prefix": PatternSpec(512, prefix_mask="causal", separator_ids=(7, 8)),
        "block": PatternSpec(
            512, prefix_mask="causal", separator_ids=(7, 8), block_sizes=(1, 2, 3, 16), blocks_from_target=True
        ),
    },
)
Described = list[tuple[int, int]]  # a target, and a hash of all that its prediction depends on


def described(tokens, positions, types, visible: np.ndarray, rows: np.ndarray, targets: np.ndarray) -> Described:
    """`visible` bool [n, n]: whether row i sees row j. `rows` [m] predict `targets` [m]."""
    own = [hash(item) for item in zip(tokens.tolist(), positions.tolist(), types.tolist(), strict=True)]
    state = own
    for _ in range(LAYERS):
        seen = [tuple(sorted(state[j] for j in np.flatnonzero(row))) for row in visible]
        state = [hash(item) for item in zip(own, seen, strict=True)]
    return [(target, state[row]) for row, target in zip(rows.tolist(), targets.tolist(), strict=True)]


def trained(layout: Layout) -> Described:
    count = len(layout.tokens)
    visible = np.zeros((count, count), dtype=bool)
    for span in layout.spans:
        part = visible[span.start : span.stop, span.key_start : span.key_stop]
        part[:] = True if span.visible is None else span.visible.numpy()
    return described(layout.tokens, layout.positions, layout.types, visible, layout.masked_rows, layout.targets)


def scored(
    spec: BackboneSpec, attention: AttentionPattern, context: np.ndarray, target: np.ndarray, plan: MaskPlan
) -> Described:
    pattern = spec.pattern(attention.name, attention.block_size)
    prefixes, windows = compose(spec, attention, Sequences.build([context], np.zeros(1), [target]), plan)
    block = pattern.prefix_block(attention.block_size)
    found: Described = []
    for number, prefix in enumerate(windows.prefix):
        stretch = slice(prefixes.offsets[prefix], prefixes.offsets[prefix + 1]) if prefix >= 0 else slice(0)
        clean, own = prefixes.tokens[stretch], windows.tokens[slice(*windows.offsets[number : number + 2])]
        before, length = len(clean), len(own)
        visible = np.ones((before + length, before + length), dtype=bool)
        visible[:before, before:] = False
        if block:
            blocks = np.arange(before) // block
            visible[:before, :before] = blocks[:, None] >= blocks
        visible[before:, windows.visible[number] : before] = False
        typed_from = 0 if windows.typed_from is None else windows.typed_from[number]
        found += described(
            np.concatenate([clean, own]),
            np.concatenate([np.arange(before), windows.first_position[number] + np.arange(length)]),
            np.repeat([pattern.prefix_type, pattern.window_type], [before + typed_from, length - typed_from]),
            visible,
            before - windows.offsets[number] + windows.wanted[slice(*windows.wanted_offsets[number : number + 2])],
            windows.targets[slice(*windows.wanted_offsets[number : number + 2])],
        )
    return found


tokens = st.lists(st.integers(10, 49), max_size=9).map(lambda ids: np.array(ids, dtype=np.int64))


@st.composite
def masked_windows(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [W] and masks [C, W]; every mask has a masked token."""
    window = draw(tokens.filter(len))
    copies = draw(st.integers(1, 3))
    masks = draw(st.lists(st.booleans(), min_size=copies * len(window), max_size=copies * len(window)))
    made = np.array(masks).reshape(copies, len(window))
    made[:, draw(st.integers(0, len(window) - 1))] = True
    return window, made


def whole(masks: np.ndarray) -> MaskPlan:
    """One span per mask, over the whole target."""
    count, length = masks.shape
    return MaskPlan(np.zeros(count, int), np.zeros(count, int), np.full(count, length), masks.ravel())


@given(masked_windows())
def test_full(drawn):
    window, masks = drawn
    expected = [item for mask in masks for item in trained(lay_full(window, mask, BERT))]
    assert scored(BERT, AttentionPattern("full"), window[:0], window, whole(masks)) == expected


@pytest.mark.parametrize("spec", [BERT, CAUSAL_PREFIX], ids=["bidirectional prefix", "causal prefix"])
@given(prefix=tokens, drawn=masked_windows())
def test_prefix(spec, prefix, drawn):
    window, masks = drawn
    expected = trained(lay_prefix(prefix, window, masks, spec))
    assert scored(spec, AttentionPattern("prefix"), prefix, window, whole(masks)) == expected


@pytest.mark.parametrize("block_size", [1, 3, 4])
@given(drawn=masked_windows())
def test_block(block_size, drawn):
    """The trainer's two streams hold every block of a text; the engine has a window for each."""
    window, (mask, *_) = drawn
    places = np.arange(1, len(window) + 1)  # the start token is place 0
    spans = [np.flatnonzero(places // block_size == block) for block in np.unique(places[mask] // block_size)]
    plan = MaskPlan(
        np.zeros(len(spans), int),
        np.array([span[0] for span in spans]),
        np.array([span[-1] + 1 for span in spans]),
        np.concatenate([mask[span] for span in spans]),
    )
    expected = trained(lay_block(window, mask, block_size, BERT))
    assert scored(BERT, AttentionPattern("block", block_size), window[:0], window, plan) == expected


@pytest.mark.parametrize("block_size", [2, 3, 16])
@given(prefix=tokens, drawn=masked_windows())
def test_blocks_of_a_window_after_a_prefix(block_size, prefix, drawn):
    window, (mask, *_) = drawn
    attention = AttentionPattern("block", block_size)
    sequences = Sequences.build([prefix], np.zeros(1), [window])
    plan = split_at_blocks(CAUSAL_PREFIX, attention, sequences, whole(mask[None]))
    expected = trained(lay_prefix_blocks(prefix, window, mask, block_size, CAUSAL_PREFIX))
    assert scored(CAUSAL_PREFIX, attention, prefix, window, plan) == expected


@given(prefix=tokens, window=tokens.filter(len))
def test_blocks_of_one_token_are_read_left_to_right(prefix, window):
    attention = AttentionPattern("block", 1)
    sequences = Sequences.build([prefix], np.zeros(1), [window])
    plan = split_at_blocks(CAUSAL_PREFIX, attention, sequences, whole(np.ones((1, len(window)), dtype=bool)))
    expected = trained(lay_left_to_right(prefix, window, CAUSAL_PREFIX))
    assert scored(CAUSAL_PREFIX, attention, prefix, window, plan) == expected


def test_the_description_tells_layouts_apart():
    """One visible row more, at the last of the layers, is another description."""
    layout = lay_full(np.arange(10, 14), np.arange(4) == 1, BERT)
    visible = np.eye(5, dtype=bool)
    visible[range(1, 5), range(4)] = True  # a chain: row 2 sees row 0 over two layers
    arguments = layout.tokens, layout.positions, layout.types
    without = visible.copy()
    without[1, 0] = False
    rows = layout.masked_rows, layout.targets
    assert described(*arguments, visible, *rows) != described(*arguments, without, *rows)
