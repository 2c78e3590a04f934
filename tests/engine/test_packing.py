"""Deduplication and packing against plain Python."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from diffscore_fast.engine.packing import distinct_windows, pack_windows
from diffscore_fast.engine.ragged import offsets_of
from diffscore_fast.engine.windows import Windows

window = st.tuples(
    st.lists(st.integers(0, 2), min_size=1, max_size=3),  # tokens
    st.sets(st.integers(0, 2), max_size=3),  # wanted places
    st.integers(-1, 1),  # prefix
    st.integers(0, 1),  # visible
    st.integers(0, 1),  # shifts the targets
)


@settings(max_examples=200, deadline=None)
@given(st.lists(window, min_size=1, max_size=30))
def test_distinct_windows_are_those_that_differ(rows):
    rows = [(tokens, sorted(p for p in wanted if p < len(tokens)), *rest) for tokens, wanted, *rest in rows]
    offsets = offsets_of(np.array([len(tokens) for tokens, *_ in rows]))
    windows = Windows(
        tokens=np.array([token for tokens, *_ in rows for token in tokens], dtype=np.int32),
        offsets=offsets,
        first_position=np.zeros(len(rows), dtype=np.int64),
        prefix=np.array([row[2] for row in rows]),
        visible=np.array([row[3] for row in rows]),
        wanted=np.array([offsets[i] + p for i, row in enumerate(rows) for p in row[1]], dtype=np.int64),
        wanted_offsets=offsets_of(np.array([len(row[1]) for row in rows])),
        targets=np.array([row[4] + p for row in rows for p in row[1]], dtype=np.int32),
    )
    first, representative = distinct_windows(windows)
    # The target shift tells windows apart only where something is wanted.
    as_tuples = [(tuple(t), tuple(w), p, v, s if w else 0) for t, w, p, v, s in rows]
    expected = [i for i, row in enumerate(as_tuples) if row not in as_tuples[:i]]
    assert first.tolist() == expected
    assert [as_tuples[first[r]] for r in representative] == as_tuples


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(-1, 3), st.integers(1, 9)), max_size=40),
    st.lists(st.integers(1, 9), min_size=4, max_size=4),
    st.integers(1, 20),
    st.integers(1, 20),
)
def test_packs_hold_every_window_once_within_their_budgets(rows, prefix_lengths, budget, cache_rows):
    prefix = np.array([row[0] for row in rows], dtype=np.int64)
    lengths = np.array([row[1] for row in rows], dtype=np.int64)
    sizes = np.array(prefix_lengths, dtype=np.int64)
    waves = pack_windows(prefix, lengths, sizes, budget, cache_rows)
    packs = [pack for _, wave in waves for pack in wave if len(pack)]
    assert sorted(np.concatenate(packs).tolist() if packs else []) == list(range(len(rows)))
    for used, wave in waves:
        assert sizes[used].sum() <= cache_rows or len(used) == 1
        for pack in wave:
            assert lengths[pack].sum() <= budget or len(pack) == 1
            assert set(prefix[pack]) - {-1} <= set(used.tolist())
    for pack in packs:  # windows of one prefix and length are neighbours
        pairs = list(zip(prefix[pack], lengths[pack], strict=True))
        assert len(set(pairs)) == 1 + sum(a != b for a, b in zip(pairs, pairs[1:], strict=False))
