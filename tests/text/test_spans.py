"""Tokens of words, against sets of characters."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from diffscore_fast.text.spans import tokens_within

CUTS = st.lists(st.integers(0, 30), max_size=12).map(sorted)
TOKENS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 4)), max_size=8)


@given(cuts=CUTS, tokens=TOKENS)
def test_a_token_belongs_to_a_range_that_it_shares_a_character_with(cuts, tokens):
    ranges = [(start, end) for start, end in zip(cuts[::2], cuts[1::2], strict=False) if start < end]
    inside = {at for start, end in ranges for at in range(start, end)}
    expected = [bool(inside & set(range(start, start + length))) for start, length in tokens]
    spans = np.array([(start, start + length) for start, length in tokens], dtype=np.int32).reshape(-1, 2)
    found = tokens_within(spans, np.array(ranges, dtype=np.int64).reshape(-1, 2))
    assert found.dtype == bool and found.tolist() == expected
