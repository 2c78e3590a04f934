"""Spans of whole targets are split at the boundaries of blocks: none crosses one, and nothing wanted is lost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffscore_fast.backbones.spec import BackboneSpec, PatternSpec
from diffscore_fast.engine.plan import AttentionPattern, MaskPlan, Sequences
from diffscore_fast.engine.windows import compose, split_at_blocks

SIZES = (1, 2, 3, 4, 16)


def spec_with(from_target: bool, shift: int = 0, prefix_mask: str = "bidirectional") -> BackboneSpec:
    pattern = PatternSpec(
        512, block_sizes=SIZES, blocks_from_target=from_target, separator_ids=(7,), prefix_mask=prefix_mask
    )
    return BackboneSpec(
        family="bert",
        name="bert",
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        hidden_size=8,
        vocab_size=50,
        mask_id=4,
        start_id=2,
        logit_shift=shift,
        patterns={"block": pattern},
    )


@st.composite
def plans(draw: st.DrawFn) -> tuple[Sequences, MaskPlan]:
    """Targets of unequal lengths after contexts of unequal lengths, each under a few masks."""
    lengths = draw(st.lists(st.integers(1, 11), min_size=1, max_size=4))
    contexts = [np.arange(10, 10 + draw(st.integers(0, 5)), dtype=np.int32) for _ in range(2)]
    targets = [np.arange(20, 20 + length, dtype=np.int32) for length in lengths]
    context_of = np.array(draw(st.lists(st.integers(0, 1), min_size=len(lengths), max_size=len(lengths))))
    sequence = np.array(draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=5)))
    stop = np.array(lengths)[sequence]
    count = int(stop.sum())
    masked = np.array(draw(st.lists(st.booleans(), min_size=count, max_size=count)))
    wanted = masked & np.array(draw(st.lists(st.booleans(), min_size=count, max_size=count)))
    plan = MaskPlan(sequence, np.zeros_like(stop), stop, masked, draw(st.sampled_from([None, wanted])))
    return Sequences.build(contexts, context_of, targets), plan


def states(plan: MaskPlan) -> list[tuple[int, int, bool, bool]]:
    """(sequence, place, masked, wanted) of every token of the plan, in order."""
    wanted = plan.masked if plan.wanted is None else plan.wanted
    places = [
        (int(sequence), place)
        for sequence, start, stop in zip(plan.sequence, plan.start, plan.stop, strict=True)
        for place in range(start, stop)
    ]
    return [(*place, bool(m), bool(w)) for place, m, w in zip(places, plan.masked, wanted, strict=True)]


@pytest.mark.parametrize("from_target", [True, False])
@pytest.mark.parametrize("size", SIZES)
@given(drawn=plans())
def test_no_span_crosses_a_boundary_and_the_wanted_tokens_keep_their_order(from_target, size, drawn):
    sequences, plan = drawn
    spec = spec_with(from_target)
    split = split_at_blocks(spec, AttentionPattern("block", size), sequences, plan)
    contexts = np.diff(sequences.context_offsets)[sequences.context_of]
    for sequence, start, stop in zip(split.sequence, split.start, split.stop, strict=True):
        before = 0 if from_target else 1 + contexts[sequence] + (contexts[sequence] > 0)  # start token, separator
        assert stop > start and (before + start) // size == (before + stop - 1) // size
    assert [state for state in states(split) if state[3]] == [state for state in states(plan) if state[3]]
    kept = set(states(split))
    assert kept <= set(states(plan))


def test_a_plan_within_blocks_stays_as_it_is():
    sequences = Sequences.build([np.zeros(0, np.int32)], np.zeros(1), [np.arange(10, 16, dtype=np.int32)])
    plan = MaskPlan(np.zeros(2, int), np.array([0, 3]), np.array([3, 6]), np.ones(6, dtype=bool))
    assert split_at_blocks(spec_with(True), AttentionPattern("block", 3), sequences, plan) is plan


def test_blocks_without_a_wanted_token_are_left_out():
    sequences = Sequences.build([np.zeros(0, np.int32)], np.zeros(1), [np.arange(10, 22, dtype=np.int32)])
    masked = np.arange(12) % 12 >= 8
    plan = MaskPlan(np.zeros(1, int), np.zeros(1, int), np.array([12]), masked)
    split = split_at_blocks(spec_with(True), AttentionPattern("block", 4), sequences, plan)
    assert (split.start.tolist(), split.stop.tolist(), split.masked.tolist()) == ([8], [12], [True] * 4)


def test_a_block_of_one_token_after_a_causal_prefix_is_not_read():
    """With a shift its window is the token before it alone; otherwise the masked token is read, too."""
    sequences = Sequences.build([np.arange(30, 33, dtype=np.int32)], np.zeros(1), [np.arange(10, 14, dtype=np.int32)])
    plan = MaskPlan(np.zeros(1, int), np.array([2]), np.array([3]), np.ones(1, dtype=bool))
    _, windows = compose(spec_with(True, 1, "causal"), AttentionPattern("block", 1), sequences, plan)
    assert windows.tokens.tolist() == [11] and windows.targets.tolist() == [12] and windows.wanted.tolist() == [0]
    _, windows = compose(spec_with(True), AttentionPattern("block", 1), sequences, plan)
    assert windows.tokens.tolist() == [4] and windows.targets.tolist() == [12]
    _, windows = compose(spec_with(True, 1), AttentionPattern("block", 1), sequences, plan)
    assert windows.tokens.tolist() == [11, 4] and windows.wanted.tolist() == [0]
