"""prefix_attention: every implementation against a dense boolean mask, ragged and empty windows, invariance."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bench.timing import peak_extra_bytes
from diffscore_fast.errors import ImplementationError
from diffscore_fast.ops import AttentionLayout, prefix_attention
from diffscore_fast.ops.flash_attention import flash_prefix_attention
from tests.support.products import needs_extension, runs_brgemm

CPU = torch.device("cpu")
IMPLEMENTATIONS = ["reference", pytest.param("cpu", marks=needs_extension)]


def kernels(dtype: torch.dtype) -> list:
    """The C++ kernel with its products in panels, and in blocks: by brgemm where that runs, and by plain loops."""
    return [
        pytest.param("cpu inner", marks=needs_extension),
        pytest.param("cpu brgemm", marks=runs_brgemm(dtype)),
        pytest.param("cpu plain", marks=needs_extension),
    ]


BOTH_TYPES = pytest.mark.parametrize(
    ("implementation", "dtype"),
    [
        pytest.param(*item.values, dtype, marks=item.marks)
        for dtype in (torch.float32, torch.bfloat16)
        for item in kernels(dtype)
    ],
    ids=str,
)


def attend(implementation: str, inputs: list[Tensor], layout: AttentionLayout) -> Tensor:
    """`implementation` may name the C++ kernel's products as well: "cpu brgemm"."""
    name, _, products = implementation.partition(" ")
    if not products:
        return prefix_attention(*inputs, layout, implementation=name)
    arrays = (layout.key_offsets, layout.query_offsets, layout.prefix_starts, layout.prefix_lengths)
    places = None if layout.query_places is None else torch.from_numpy(layout.query_places)
    return torch.ops.diffscore_fast.prefix_attention(
        *inputs, *(torch.from_numpy(array) for array in arrays), places, layout.block, products
    )


def offsets_of(lengths: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def make_layout(
    lengths: list[int], prefixes: list[tuple[int, int]], places: list[list[int]] | None = None, block: int = 0
) -> AttentionLayout:
    key_offsets = offsets_of(lengths)
    starts, visible = (np.array(column, dtype=np.int64) for column in zip(*prefixes, strict=True))
    if places is None:
        return AttentionLayout(key_offsets, key_offsets, starts, visible, block=block)
    flat = np.array([place for window in places for place in window], dtype=np.int64)
    return AttentionLayout(key_offsets, offsets_of([len(w) for w in places]), starts, visible, flat, block)


def tensors(layout: AttentionLayout, heads: int, kv_heads: int, width: int, prefix_rows: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)

    def draw(rows: int, heads: int) -> Tensor:
        return torch.randn(int(rows), heads, width, generator=generator)

    keys, queries = layout.key_offsets[-1], layout.query_offsets[-1]
    return (
        draw(queries, heads),
        draw(keys, kv_heads),
        draw(keys, kv_heads),
        draw(prefix_rows, kv_heads),
        draw(prefix_rows, kv_heads),
    )


def dense(
    query: Tensor, key: Tensor, value: Tensor, prefix_key: Tensor, prefix_value: Tensor, layout: AttentionLayout
) -> Tensor:
    """One product of all queries with all keys in float64 under a boolean mask."""
    rows, own = len(query), len(key)
    mask = torch.zeros(rows, len(prefix_key) + own, dtype=torch.bool)
    for window in range(len(layout.prefix_starts)):
        queries = range(layout.query_offsets[window], layout.query_offsets[window + 1])
        first, last = layout.key_offsets[window], layout.key_offsets[window + 1]
        start, length = layout.prefix_starts[window], layout.prefix_lengths[window]
        for slot, row in enumerate(queries):
            mask[row, start : start + length] = True
            place = slot if layout.query_places is None else layout.query_places[row]
            end = last if not layout.block else min(last, first + (place // layout.block + 1) * layout.block)
            mask[row, len(prefix_key) + first : len(prefix_key) + end] = True
    repeat = query.shape[1] // key.shape[1]
    keys = torch.cat([prefix_key, key]).double().repeat_interleave(repeat, dim=1)
    values = torch.cat([prefix_value, value]).double().repeat_interleave(repeat, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) / math.sqrt(query.shape[2])
    weights = torch.nan_to_num(torch.softmax(scores.masked_fill(~mask, -math.inf), dim=-1))
    return torch.einsum("hqk,khd->qhd", weights, values)


def check(
    implementation: str,
    layout: AttentionLayout,
    heads=2,
    kv_heads=2,
    width=32,
    prefix_rows=70,
    tolerance=3e-6,
    dtype=torch.float32,
):
    inputs = [item.to(dtype) for item in tensors(layout, heads, kv_heads, width, prefix_rows)]
    got = attend(implementation, inputs, layout)
    torch.testing.assert_close(got.double(), dense(*inputs, layout), rtol=0, atol=tolerance)


@pytest.mark.parametrize("implementation", ["reference", *kernels(torch.float32)])
@pytest.mark.parametrize("width", [32, 64, 80, 96, 128])
def test_head_sizes(implementation, width):
    check(implementation, make_layout([5, 30, 1], [(0, 70), (0, 70), (3, 10)]), width=width)


@pytest.mark.parametrize("implementation", ["reference", *kernels(torch.float32)])
def test_a_head_size_that_no_vector_divides(implementation):
    check(implementation, make_layout([5, 30], [(0, 70), (3, 10)]), width=13)


@pytest.mark.parametrize("implementation", ["reference", *kernels(torch.float32)])
@pytest.mark.parametrize("kv_heads", [1, 2, 3, 6])
def test_grouped_key_value_heads(implementation, kv_heads):
    check(implementation, make_layout([4, 9], [(2, 50), (0, 0)]), heads=6, kv_heads=kv_heads)


@pytest.mark.parametrize("implementation", ["reference", *kernels(torch.float32)])
@pytest.mark.parametrize("block", [0, 1, 4])
def test_blocks_and_chosen_queries(implementation, block):
    places = [[0, 3, 4], [], [0], [10, 2, 64, 129]]
    layout = make_layout([7, 5, 1, 130], [(0, 20), (0, 20), (20, 0), (5, 64)], places, block)
    check(implementation, layout)
    check(implementation, make_layout([7, 5, 1, 130], [(0, 20), (0, 20), (20, 0), (5, 64)], None, block))


@pytest.mark.parametrize("implementation", ["reference", *kernels(torch.float32)])
def test_empty_windows_prefixes_and_calls(implementation):
    check(implementation, make_layout([0, 3, 0], [(0, 5), (0, 0), (0, 0)]))
    check(implementation, make_layout([0], [(0, 0)]), prefix_rows=0)
    check(implementation, make_layout([6], [(0, 0)]), prefix_rows=0)


@pytest.mark.parametrize("implementation", ["reference", *kernels(torch.float32)])
def test_prefix_rows_that_no_window_sees_are_not_read(implementation):
    layout = make_layout([3, 4], [(10, 5), (30, 1)])
    query, key, value, prefix_key, prefix_value = tensors(layout, 2, 2, 32, 40)
    want = dense(query, key, value, prefix_key, prefix_value, layout)
    unseen = torch.ones(40, dtype=torch.bool)
    unseen[10:15] = unseen[30] = False
    prefix_key[unseen] = math.nan
    prefix_value[unseen] = math.nan
    got = attend(implementation, [query, key, value, prefix_key, prefix_value], layout)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=3e-6)


@pytest.mark.parametrize("implementation", ["reference", *kernels(torch.float32)])
@pytest.mark.parametrize("size", [300.0, 1e10])
def test_large_scores_neither_overflow_nor_vanish(implementation, size):
    layout = make_layout([20], [(0, 70)])
    query, *others = tensors(layout, 2, 2, 32, 70)
    query *= size
    got = attend(implementation, [query, *others], layout)
    torch.testing.assert_close(got.double(), dense(query, *others, layout), rtol=0, atol=2e-3)


@pytest.mark.parametrize("implementation", kernels(torch.float32))
def test_views_of_one_projection_are_read_in_place(implementation):
    layout = make_layout([9, 26], [(0, 40), (1, 33)])
    packed = torch.randn(35, 9, 32)
    query, key, value = packed.split(3, dim=1)
    cached = torch.randn(40, 6, 32)
    prefix_key, prefix_value = cached.split(3, dim=1)
    inputs = [query, key, value, prefix_key, prefix_value]
    got = attend(implementation, inputs, layout)
    torch.testing.assert_close(got.double(), dense(*inputs, layout), rtol=0, atol=3e-6)


@needs_extension
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_inputs_lose_only_their_own_rounding(dtype):
    layout = make_layout([9, 26], [(0, 40), (1, 33)])
    inputs = [item.to(dtype) for item in tensors(layout, 2, 2, 32, 40)]
    got = attend("cpu inner", inputs, layout)
    assert got.dtype == dtype
    want = dense(*inputs, layout).to(dtype)
    torch.testing.assert_close(got, want, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("implementation", kernels(torch.bfloat16))
@pytest.mark.parametrize("width", [13, 32, 80, 128])
@pytest.mark.parametrize("block", [0, 3])
def test_bfloat16_keeps_the_error_budget(implementation, width, block):
    """Weights rounded to bfloat16, as the blocks' are, still leave less than twice the reference's error."""
    layout = make_layout([9, 0, 26, 1, 200], [(0, 300), (0, 300), (1, 33), (5, 0), (20, 0)], block=block)
    inputs = [item.bfloat16() for item in tensors(layout, 4, 2, width, 300)]
    want = dense(*inputs, layout)
    errors = {name: (attend(name, inputs, layout).double() - want).abs() for name in ("reference", implementation)}
    assert errors[implementation].max() <= 2 * errors["reference"].max()
    assert errors[implementation].mean() <= 2 * errors["reference"].mean()


@pytest.mark.parametrize("implementation", kernels(torch.bfloat16))
def test_infinities_and_nan_of_bfloat16_reach_the_same_numbers_as_in_the_reference(implementation):
    layout = make_layout([30, 5], [(0, 70), (0, 0)])
    query, key, value, prefix_key, prefix_value = (item.bfloat16() for item in tensors(layout, 2, 2, 32, 70))
    prefix_value[69, 1, 7], value[2, 0, 31] = math.nan, math.inf
    query[4, 0, 1], key[33, 1, 0] = math.nan, math.nan
    inputs = [query, key, value, prefix_key, prefix_value]
    got, want = (attend(name, inputs, layout) for name in (implementation, "reference"))
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.isinf(), want.isinf())
    assert want.isnan().sum() == 30 + 32 + 5 * 32 and want.isinf().sum() == 29


@pytest.mark.parametrize("implementation", kernels(torch.bfloat16))
def test_products_of_torch_between_calls_change_nothing(implementation):
    """Matrix units keep a configuration, which torch's own products change."""
    layout = make_layout([30, 5], [(0, 70), (0, 0)])
    inputs = [item.bfloat16() for item in tensors(layout, 2, 2, 32, 70)]
    square = torch.randn(70, 70).bfloat16()
    first, product = attend(implementation, inputs, layout), square @ square
    for _ in range(3):
        assert torch.equal(attend(implementation, inputs, layout), first)
        assert torch.equal(square @ square, product)


@needs_extension
def test_products_asked_for_are_made_or_refused():
    layout = make_layout([3], [(0, 0)])
    inputs = tensors(layout, 1, 1, 32, 1)
    with pytest.raises(RuntimeError, match="products must be auto, inner, brgemm or plain; got fast"):
        attend("cpu fast", inputs, layout)
    with pytest.raises(RuntimeError, match="no products by plain: the inputs are float16"):
        attend("cpu plain", [item.half() for item in inputs], layout)
    enabled = torch.backends.mkldnn.enabled
    try:
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
        with pytest.raises(RuntimeError, match="no products by brgemm: oneDNN is switched off"):
            attend("cpu brgemm", inputs, layout)
    finally:
        torch.backends.mkldnn.enabled = enabled


@needs_extension
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_prefixes_are_not_copied_whole(dtype):
    rows = 100_000
    layout = make_layout([3, 4], [(0, 5), (rows - 5, 5)])
    query, key, value, *_ = (item.to(dtype) for item in tensors(layout, 1, 1, 32, 1))
    arena = torch.ones(rows, 1, 32, dtype=dtype)
    taken = peak_extra_bytes(lambda: prefix_attention(query, key, value, arena, arena, layout, implementation="cpu"))
    assert taken < arena.nbytes / 4


@BOTH_TYPES
@pytest.mark.parametrize("queries", [None, 5])
def test_a_window_is_bitwise_the_same_alone_and_in_a_batch(queries, implementation, dtype):
    lengths = [1, 8, 9, 24, 25, 73, 130]
    places = None if queries is None else [list(range(min(length, queries))) for length in lengths]
    layout = make_layout(lengths, [(0, 150)] * 7, places)
    inputs = [item.to(dtype) for item in tensors(layout, 3, 3, 32, 150)]
    query, key, value, *prefix = inputs
    whole = attend(implementation, inputs, layout)
    for window, length in enumerate(lengths):
        rows = slice(layout.query_offsets[window], layout.query_offsets[window + 1])
        keys = slice(layout.key_offsets[window], layout.key_offsets[window + 1])
        alone = make_layout([length], [(0, 150)], None if places is None else [places[window]])
        got = attend(implementation, [query[rows], key[keys], value[keys], *prefix], alone)
        assert torch.equal(got, whole[rows])


@BOTH_TYPES
def test_a_long_window_is_bitwise_the_same_on_any_number_of_threads(implementation, dtype):
    layout = make_layout([500, 1], [(0, 30), (0, 30)], block=3)
    inputs = [item.to(dtype) for item in tensors(layout, 2, 1, 32, 30)]
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            results.append(attend(implementation, inputs, layout))
    finally:
        torch.set_num_threads(threads)
    tolerance = 3e-6 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(results[0].double(), dense(*inputs, layout), rtol=0, atol=tolerance)
    assert torch.equal(*results)


@BOTH_TYPES
@settings(max_examples=60, deadline=None)
@given(
    windows=st.lists(st.tuples(st.integers(0, 70), st.integers(0, 9), st.integers(0, 70)), min_size=1, max_size=6),
    block=st.integers(0, 5),
)
def test_any_layout_matches_the_dense_mask(implementation, dtype, windows, block):
    layout = make_layout([w[0] for w in windows], [(w[1], w[2]) for w in windows], block=block)
    tolerance = 3e-6 if dtype == torch.float32 else 0.03
    check(implementation, layout, heads=2, kv_heads=1, width=16, prefix_rows=80, tolerance=tolerance, dtype=dtype)


@needs_extension
def test_registration_passes_opcheck():
    layout = make_layout([3, 4], [(0, 5), (10, 20)])
    arrays = (layout.key_offsets, layout.query_offsets, layout.prefix_starts, layout.prefix_lengths)
    torch.library.opcheck(
        torch.ops.diffscore_fast.prefix_attention.default,
        (*tensors(layout, 2, 2, 32, 40), *(torch.from_numpy(array) for array in arrays), None, 0, "auto"),
    )


def test_gradients_come_from_the_reference():
    layout = make_layout([3, 4], [(0, 5), (10, 20)])
    inputs = [item.requires_grad_() for item in tensors(layout, 2, 2, 8, 40)]
    prefix_attention(*inputs, layout).sum().backward()
    assert all(item.grad is not None and item.grad.abs().sum() > 0 for item in inputs)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_layout_arrays_may_be_views(implementation):
    """Columns of a table, broadcast numbers and strided places are read by their strides."""
    plain = make_layout([3, 4], [(0, 3), (5, 3)], [[0, 2], [1, 3]], block=1)
    table = np.stack([plain.prefix_starts, plain.prefix_lengths], axis=1)
    views = AttentionLayout(
        np.repeat(plain.key_offsets, 2)[::2],
        plain.query_offsets,
        table[:, 0],
        np.broadcast_to(np.int64(3), (2,)),
        np.repeat(plain.query_places, 3)[::3],
        1,
    )
    inputs = tensors(plain, 2, 1, 32, 9)
    got = prefix_attention(*inputs, views, implementation=implementation)
    torch.testing.assert_close(got.double(), dense(*inputs, plain), rtol=0, atol=3e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(prefix_lengths=np.array([3, 9])), "beyond the 9"),
        (dict(prefix_starts=np.array([0, 2**62]), prefix_lengths=np.array([3, 2**62])), "beyond the 9"),
        (dict(block=-1), "block must not be negative"),
        (dict(prefix_starts=np.array([-1, 0])), "non-negative"),
        (dict(key_offsets=np.array([0, 3, 6])), "key_offsets must rise from 0 to 7"),
        (dict(query_offsets=np.array([0, 9, 4])), "query_offsets must rise"),
        (dict(query_places=np.array([0])), "1 query places for 4 queries"),
        (dict(query_places=None, block=2), "needs their places"),
        (dict(query_places=np.array([0, 3, 1, 3])), r"query_places\[1\] is 3, outside its window of 3"),
        (dict(query_places=np.array([0, 2, -1, 3]), block=2), r"query_places\[2\] is -1, outside its window of 4"),
    ],
)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_layout_that_leaves_its_tensors_is_refused(implementation, change, message):
    layout = make_layout([3, 4], [(0, 3), (5, 3)], [[0, 2], [1, 3]])
    inputs = tensors(layout, 2, 1, 32, 9)
    with pytest.raises(ValueError, match=message):
        prefix_attention(*inputs, replace(layout, **change), implementation=implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_head_is_at_least_one_wide_and_there_is_one(implementation):
    layout = make_layout([3], [(0, 0)])
    for shape in ((3, 1, 0), (3, 32)):
        with pytest.raises(ValueError, match=r"query must be \[Q, H, d\] with d at least 1"):
            prefix_attention(*[torch.zeros(shape)] * 5, layout, implementation=implementation)
    with pytest.raises(ValueError, match="cannot share 0 key heads"):
        prefix_attention(torch.zeros(3, 1, 8), *[torch.zeros(3, 0, 8)] * 4, layout, implementation=implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("rows", [2**31, 2**57, 2**59])
def test_more_rows_than_sizes_can_count_are_refused(implementation, rows):
    """With expanded tensors, which have the rows without the memory."""
    one = torch.zeros(1, 1, 8)
    many = one.expand(rows, 1, 8)
    window = AttentionLayout(np.array([0, rows]), np.array([0, 1]), np.array([0]), np.array([0]))
    with pytest.raises(ValueError, match=f"key has {rows} rows; at most 2147483647"):
        prefix_attention(one, many, many, one, one, window, implementation=implementation)
    seen = AttentionLayout(np.array([0, 1]), np.array([0, 1]), np.array([0]), np.array([rows]))
    with pytest.raises(ValueError, match=f"prefix_key has {rows} rows; at most 2147483647"):
        prefix_attention(one, one, one, many, many, seen, implementation=implementation)


@needs_extension
def test_the_kernel_itself_refuses_what_it_cannot_read():
    layout = make_layout([3, 4], [(0, 3), (5, 3)])
    inputs, edges = tensors(layout, 2, 1, 32, 9), torch.from_numpy(layout.key_offsets)

    def run(inputs=inputs, starts=(0, 5), lengths=(3, 3), block=0, edges=edges, places=None):
        starts, lengths = torch.tensor(starts), torch.tensor(lengths)
        return torch.ops.diffscore_fast.prefix_attention(*inputs, edges, edges, starts, lengths, places, block, "auto")

    with pytest.raises(RuntimeError, match="window 1 sees"):
        run(starts=(0, 2**62), lengths=(3, 2**62))
    with pytest.raises(RuntimeError, match="block must not be negative"):
        run(block=-2)
    with pytest.raises(RuntimeError, match="in float32, bfloat16 or float16"):
        run(inputs=[item.double() for item in inputs])
    for place in (-1, 3):
        with pytest.raises(RuntimeError, match=f"query_places.1. is {place}, outside window 0 of 3 rows"):
            run(places=torch.tensor([0, place, 1, 0, 1, 2, 3]), block=2)
    with pytest.raises(RuntimeError, match="head_dim must be at least 1"):
        run(inputs=[item[:, :, :0] for item in inputs])
    with pytest.raises(RuntimeError, match="144115188075855872 rows; at most"):
        run(inputs=[*inputs[:3], *[item[:1].expand(2**57, 1, 32) for item in inputs[3:]]])
    with pytest.raises(RuntimeError, match="a row of a head has 1099511627776 numbers; at most"):
        run(inputs=[item[:, :, :1].expand(-1, -1, 2**40) for item in inputs])
    assert torch.equal(run(edges=edges.repeat_interleave(2)[::2]), run())


@needs_extension
def test_types_that_a_kernel_does_not_take():
    layout = make_layout([3, 4], [(0, 3), (5, 3)])
    query, *others = tensors(layout, 2, 1, 32, 9)
    low = [item.bfloat16() for item in others]
    want = prefix_attention(query, *low, layout, implementation="reference")
    assert torch.equal(prefix_attention(query, *low, layout), want)
    for inputs in ((query, *low), [item.double() for item in (query, *others)]):
        with pytest.raises(ImplementationError, match="'cpu' takes one dtype"):
            prefix_attention(*inputs, layout, implementation="cpu")


@needs_extension
def test_a_named_kernel_refuses_to_lose_a_gradient():
    layout = make_layout([3], [(0, 0)])
    inputs = [item.requires_grad_() for item in tensors(layout, 1, 1, 32, 1)]
    with pytest.raises(ImplementationError, match="has no gradient"):
        prefix_attention(*inputs, layout, implementation="cpu")


def varlen_stand_in(
    query,
    key,
    value,
    query_edges,
    key_edges,
    max_query,
    max_key,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    return_attn_probs=False,
):
    """flash_attn.flash_attn_varlen_func as its documentation states it, for tests: that package needs a GPU."""
    assert not causal and return_attn_probs and query_edges.dtype == key_edges.dtype == torch.int32
    assert (max_query, max_key) == tuple(int(edges.diff().max()) for edges in (query_edges, key_edges))
    out, log_sum = torch.empty_like(query), torch.empty(query.shape[1], len(query))
    repeat = query.shape[1] // key.shape[1]
    for (first, last), (begin, end) in zip(query_edges.unfold(0, 2, 1), key_edges.unfold(0, 2, 1), strict=True):
        keys, values = (item[begin:end].float().repeat_interleave(repeat, dim=1) for item in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[first:last].float(), keys) / math.sqrt(query.shape[2])
        log_sum[:, first:last] = scores.logsumexp(2)
        out[first:last] = torch.einsum("hqk,khd->qhd", scores.softmax(2), values).to(query.dtype)
    return out, log_sum, None


@pytest.mark.parametrize("places", [None, [[0, 3, 4], [], [0], [10, 2], [1], []]])
def test_flash_attn_calls_are_merged_by_log_sum_exp(monkeypatch, places):
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=varlen_stand_in))
    layout = make_layout([7, 0, 1, 33, 2, 3], [(0, 20), (0, 20), (5, 0), (5, 40), (0, 20), (0, 0)], places)
    inputs = [item.half() for item in tensors(layout, 4, 2, 32, 60)]
    got = flash_prefix_attention(*inputs, layout)
    torch.testing.assert_close(got.double(), dense(*inputs, layout), rtol=0, atol=2e-3)
    alone = make_layout([7], [(5, 0)])
    part = [item[:7] for item in inputs[:3]]
    got = flash_prefix_attention(*part, *inputs[3:], alone)
    torch.testing.assert_close(got.double(), dense(*part, *inputs[3:], alone), rtol=0, atol=2e-3)


def test_flash_attn_refuses_what_it_cannot_state():
    layout = make_layout([4], [(0, 3)], block=2)
    inputs = tensors(layout, 1, 1, 32, 3)
    with pytest.raises(ImplementationError, match="no block-causal pattern"):
        flash_prefix_attention(*inputs, layout)
    with pytest.raises(ImplementationError, match="takes bfloat16 and float16"):
        flash_prefix_attention(*inputs, replace(layout, block=0))
    with pytest.raises(ImplementationError, match="flash_attn.*cannot run on cpu"):
        prefix_attention(*inputs, layout, implementation="flash_attn")
