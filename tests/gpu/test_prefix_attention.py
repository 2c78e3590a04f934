"""prefix_attention on a GPU against float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from diffscore_fast import ops
from tests.support.gpu import DTYPES, SIZES, budget_of, largest, needs_gpu, normal

pytestmark = needs_gpu


@pytest.mark.parametrize("layout_kind", ["shared prefix", "some without prefix", "block-causal"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", SIZES.heads, ids=str)
def test_windows_match_float64_and_do_not_depend_on_the_batch(heads, dtype, layout_kind):
    query_heads, key_heads, width = heads
    count = SIZES.windows
    lengths = np.random.default_rng(0).integers(1, SIZES.max_window + 1, count)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    rows = int(offsets[-1])
    query = normal(rows, query_heads, width, dtype=dtype)
    key, value = (normal(rows, key_heads, width, dtype=dtype) for _ in range(2))
    prefix_key, prefix_value = (normal(SIZES.prefix, key_heads, width, dtype=dtype) for _ in range(2))
    visible = np.full(count, SIZES.prefix)
    if layout_kind == "some without prefix":
        visible = np.where(np.arange(count) % 7 == 3, 0, SIZES.prefix)
    block = 8 if layout_kind == "block-causal" else 0

    inputs = (query, key, value, prefix_key, prefix_value)
    layout = ops.AttentionLayout(offsets, offsets, np.zeros(count, np.int64), visible, block=block)
    exact = ops.prefix_attention(*(item.double() for item in inputs), layout, implementation="reference")
    reference, got = (ops.prefix_attention(*inputs, layout, implementation=name) for name in ("reference", "triton"))
    unit = torch.finfo(dtype).eps if dtype != torch.float32 else 0.0
    budget = budget_of(largest(reference - exact), dtype, width) + unit * largest(exact)
    assert largest(got - exact) <= budget

    last = int(offsets[1])
    first = ops.AttentionLayout(offsets[:2], offsets[:2], np.zeros(1, np.int64), visible[:1], block=block)
    own = (item[:last] for item in (query, key, value))
    assert torch.equal(got[:last], ops.prefix_attention(*own, prefix_key, prefix_value, first, implementation="triton"))
