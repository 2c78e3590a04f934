"""Windows over shared prefixes: from masked spans of sequences to the tokens that the network reads."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from diffscore_fast.backbones.spec import BackboneSpec, PatternSpec
from diffscore_fast.engine.plan import AttentionPattern, MaskPlan, Sequences
from diffscore_fast.engine.ragged import concatenate, offsets_of, places_in, runs_within, segment_ids


@dataclass(frozen=True)
class Prefixes:
    """P sequences whose keys and values are cached.

    Parameters
    ----------
    tokens : int32 [N], offsets : int64 [P + 1]
        Tokens of all of them laid end to end.
    keys : list of bytes
        Content key of each, by which the cache finds it.
    context, context_lengths : int64 [P]
        A sequence begins with the first `context_lengths` tokens of its context, which are computed alone, once for all
        sequences of that context; the others are computed after them. 0: all of it is computed at once.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    keys: list[bytes]
    context: np.ndarray
    context_lengths: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)


@dataclass(frozen=True)
class Windows:
    """W runs of tokens, each read after the visible part of a cached prefix. Structure of arrays.

    Parameters
    ----------
    tokens : int32 [N], offsets : int64 [W + 1]
        Tokens of all windows laid end to end, masked ones replaced.
    first_position : int64 [W]
        Position of each window's first token.
    prefix : int64 [W]
        Index into `Prefixes`; -1 where the window sees no prefix.
    visible : int64 [W]
        How many tokens of that prefix the window sees.
    wanted : int64 [M], wanted_offsets : int64 [W + 1]
        Rows of `tokens` whose hidden states predict the targets, grouped by window, ascending.
    targets : int32 [M]
        The token whose log-probability is asked for, of each wanted row.
    typed_from : int64 [W], optional
        Place in each window from which tokens have the pattern's `window_type`; earlier ones have its `prefix_type`.
        If not given, all have `window_type`.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    first_position: np.ndarray
    prefix: np.ndarray
    visible: np.ndarray
    wanted: np.ndarray
    wanted_offsets: np.ndarray
    targets: np.ndarray
    typed_from: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.prefix)

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)


def cut_plan(attention: AttentionPattern, sequences: Sequences, plan: MaskPlan, max_tokens: int) -> Iterator[MaskPlan]:
    """Consecutive parts of a plan whose windows have about `max_tokens`; a longer window is a part of its own."""
    sizes = plan.stop - plan.start
    lengths = sizes
    if attention.name == "full":
        lengths = sizes + np.diff(sequences.context_offsets)[sequences.context_of[plan.sequence]]
    if lengths.sum() <= max_tokens:
        yield plan
        return
    offsets = offsets_of(sizes)
    for first, last in runs_within(lengths, max_tokens):
        tokens = slice(offsets[first], offsets[last])
        wanted = None if plan.wanted is None else plan.wanted[tokens]
        sequence, start, stop = (column[first:last] for column in (plan.sequence, plan.start, plan.stop))
        yield MaskPlan(sequence, start, stop, plan.masked[tokens], wanted, plan.attention)


def split_at_blocks(spec: BackboneSpec, attention: AttentionPattern, sequences: Sequences, plan: MaskPlan) -> MaskPlan:
    """The plan with each span split at the boundaries of blocks; blocks without a wanted token are left out.

    The wanted tokens and their order stay. A plan whose spans lie within blocks stays as it is.
    """
    pattern, size = spec.pattern(attention.name, attention.block_size), attention.block_size
    start = plan.start
    if not pattern.blocks_from_target:
        start = start + _target_places(spec, pattern, sequences)[plan.sequence]
    lengths = plan.stop - plan.start
    if (start // size == (start + np.maximum(lengths, 1) - 1) // size).all():
        return plan
    span_of, in_span = segment_ids(lengths), places_in(lengths)
    block = (start[span_of] + in_span) // size
    firsts = np.flatnonzero((np.diff(span_of, prepend=-1) != 0) | (np.diff(block, prepend=-1) != 0))
    sizes = np.diff(np.append(firsts, len(span_of)))
    wanted = plan.masked if plan.wanted is None else plan.wanted
    kept = np.add.reduceat(wanted.astype(np.int64), firsts) > 0
    tokens = np.repeat(kept, sizes)
    firsts, sizes = firsts[kept], sizes[kept]
    first_token = plan.start[span_of[firsts]] + in_span[firsts]
    return MaskPlan(
        plan.sequence[span_of[firsts]],
        first_token,
        first_token + sizes,
        plan.masked[tokens],
        None if plan.wanted is None else plan.wanted[tokens],
        plan.attention,
    )


def compose(
    spec: BackboneSpec, attention: AttentionPattern, sequences: Sequences, plan: MaskPlan
) -> tuple[Prefixes, Windows]:
    """Lay a plan out for one model and attention pattern.

    The line of a sequence is: start token, context, separator, target, end (separator and end if the pattern has
    them). A window covers the places [first, last) of its line; with `prefix` and `block`, the places before `first`
    are its prefix. With a logit shift of 1 the window starts one place earlier, since that token's output predicts the
    first target. With a shift and a causal prefix, a block of one token is not read at all: its window is the token
    before it, and the prediction is the one of a causal language model.
    """
    pattern = spec.pattern(attention.name, attention.block_size)
    lines, line_offsets, target_places = _lines(spec, pattern, sequences)
    base = target_places[plan.sequence]
    first_target, last = base + plan.start, base + plan.stop
    if pattern.end_ids:
        assert (plan.stop == sequences.target_lengths[plan.sequence]).all(), "a line can end only after a whole target"
        last = last + len(pattern.end_ids)
    typed_from = None
    if attention.name == "full" and pattern.prefix_type != pattern.window_type:
        has_context = np.diff(sequences.context_offsets)[sequences.context_of[plan.sequence]] > 0
        typed_from = np.where(has_context, base, last)
    if attention.name == "full":
        first = np.zeros_like(base)
    elif attention.name == "prefix":
        first = np.maximum(base - spec.logit_shift, 0)
    else:
        block = attention.block_size
        grid = base if pattern.blocks_from_target else np.zeros_like(base)
        within = (first_target - grid) // block
        assert bool(((last - 1 - grid) // block == within).all()), "a span may not cross a block boundary"
        first = np.maximum(grid + within * block - spec.logit_shift, 0)
    unread = spec.logit_shift if attention.block_size == 1 and pattern.prefix_mask == "causal" else 0
    last = last - unread

    lengths = last - first
    offsets = offsets_of(lengths)
    window_of = segment_ids(lengths)
    tokens = lines[(line_offsets[plan.sequence] + first)[window_of] + places_in(lengths)]

    spans = plan.stop - plan.start
    span_of, in_span = segment_ids(spans), places_in(spans)
    rows = (offsets[:-1] + first_target - first)[span_of] + in_span
    wanted = plan.masked if plan.wanted is None else plan.wanted
    assert not (wanted & ~plan.masked).any(), "a wanted token must be masked"
    target_rows = rows[wanted]
    targets = lines[((line_offsets[plan.sequence] + first_target)[span_of] + in_span)[wanted]]
    if not unread:
        tokens[rows[plan.masked]] = spec.mask_id
    wanted_counts = np.bincount(span_of[wanted], minlength=len(spans))

    if attention.name == "full":
        none = np.zeros(0, np.int64)
        prefixes = Prefixes(np.zeros(0, np.int32), np.zeros(1, np.int64), [], none, none)
        prefix = np.full(len(spans), -1, dtype=np.int64)
    else:
        # The context's rows do not see the target's where the prefix is causal. With a shift the last of them stands in
        # the window of a target's first block, and is a row of the prefix only where later blocks are read.
        shared = np.zeros_like(base)
        if attention.name == "block" and pattern.prefix_mask == "causal":
            shared = np.maximum(base - spec.logit_shift, 0)
        prefixes, prefix = _prefixes(attention, pattern, sequences, plan.sequence, first, lines, line_offsets, shared)
    windows = Windows(
        tokens=tokens,
        offsets=offsets,
        first_position=np.zeros_like(first) if pattern.restart_positions else first,
        prefix=prefix,
        visible=np.where(prefix >= 0, first, 0),
        wanted=target_rows - spec.logit_shift,
        wanted_offsets=offsets_of(wanted_counts),
        targets=targets,
        typed_from=typed_from,
    )
    return prefixes, windows


def _lines(spec: BackboneSpec, pattern: PatternSpec, sequences: Sequences) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens and offsets of every sequence's line, and the place of its target's first token."""
    has_start = int(spec.start_id is not None)
    context_lengths = np.diff(sequences.context_offsets)[sequences.context_of]
    target_places = _target_places(spec, pattern, sequences)
    separator_lengths = target_places - has_start - context_lengths
    target_lengths = sequences.target_lengths
    offsets = offsets_of(target_places + target_lengths + len(pattern.end_ids))
    lines = np.empty(int(offsets[-1]), dtype=np.int32)
    if spec.start_id is not None:
        lines[offsets[:-1]] = spec.start_id
    in_context = places_in(context_lengths)
    source = np.repeat(sequences.context_offsets[:-1][sequences.context_of], context_lengths) + in_context
    lines[np.repeat(offsets[:-1] + has_start, context_lengths) + in_context] = sequences.context_tokens[source]
    target_at = offsets[:-1] + target_places
    for place, token in enumerate(pattern.separator_ids):
        lines[(target_at - separator_lengths + place)[separator_lengths > 0]] = token
    lines[np.repeat(target_at, target_lengths) + places_in(target_lengths)] = sequences.target_tokens
    for place, token in enumerate(pattern.end_ids):
        lines[target_at + target_lengths + place] = token
    return lines, offsets, target_places


def _target_places(spec: BackboneSpec, pattern: PatternSpec, sequences: Sequences) -> np.ndarray:
    """Place int64 [S] of each target's first token in its line."""
    context_lengths = np.diff(sequences.context_offsets)[sequences.context_of]
    separator_lengths = np.where(context_lengths > 0, len(pattern.separator_ids), 0)
    return int(spec.start_id is not None) + context_lengths + separator_lengths


def _prefixes(
    attention: AttentionPattern,
    pattern: PatternSpec,
    sequences: Sequences,
    sequence: np.ndarray,
    first: np.ndarray,
    lines: np.ndarray,
    line_offsets: np.ndarray,
    shared: np.ndarray,
) -> tuple[Prefixes, np.ndarray]:
    """One cached sequence per context (`prefix`) or per text (`block`); sequences of equal content are one.

    `shared` int64 [n] is the number of places that a span's line has in common with the other lines of its context.
    """
    # With `prefix`, all windows of a context see all of it; with `block`, the longest prefix contains the others.
    owner = sequences.context_of[sequence] if attention.name == "prefix" else sequence
    owners, owner_index, owner_of = np.unique(owner, return_index=True, return_inverse=True)
    # A clean block is computed whole even if a logit shift moves its last token into the window: the content of its
    # rows must not depend on which other blocks are asked for.
    block = pattern.prefix_block(attention.block_size) or 1
    cached_lengths = np.zeros(len(owners), dtype=np.int64)
    np.maximum.at(cached_lengths, owner_of, (first + block - 1) // block * block)
    kept: dict[bytes, int] = {}
    pieces: list[np.ndarray] = []
    kept_from: list[int] = []  # the span that each was taken from
    slot = np.full(len(owners), -1, dtype=np.int64)
    header = f"{attention.name}:{attention.block_size}:".encode()
    for index, length in enumerate(cached_lengths):
        if length == 0:
            continue
        at = line_offsets[sequence[owner_index[index]]]
        piece = lines[at : at + length]
        key = hashlib.blake2b(header + piece.tobytes(), digest_size=16).digest()
        if key not in kept:
            kept[key] = len(pieces)
            pieces.append(piece)
            kept_from.append(owner_index[index])
        slot[index] = kept[key]
    tokens, offsets = concatenate(pieces)
    spans = np.array(kept_from, dtype=np.int64)
    assert (shared[spans] <= np.diff(offsets)).all(), "a prefix holds all that its context shares"
    prefixes = Prefixes(tokens, offsets, list(kept), sequences.context_of[sequence[spans]], shared[spans])
    return prefixes, np.where(first > 0, slot[owner_of], -1)
