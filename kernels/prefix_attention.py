"""Triton kernels of prefix_attention: packed windows over a shared prefix and over themselves.

One kernel in two stages. The first takes queries of all windows that see one prefix, BLOCK_M at a time, over the prefix
and leaves a running softmax (m_i, l_i, acc) for each query. The second continues from it over the window's own keys,
which is the merge by log-sum-exp. Key tiles start at the prefix's and the window's first key, so a query's bits do not
depend on its neighbours; a single stage over blocks of several windows could not keep that.

Names are those of FlashAttention: m_i is the running maximum of the scores, l_i the running sum of their exponentials,
acc the running sum of weighted values; a tile has BLOCK_M queries, BLOCK_N keys, and BLOCK_D numbers of each head
(head_dim rounded up to a power of 2). A stride_qm is that of `query` along its rows, stride_qh along its heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634


class Config(NamedTuple):
    """Tile sizes and launch options; constants of the dtype and head_dim."""

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int
    enable_fp_fusion: bool = (
        True  # stated, since Triton's default changes between versions, and the results' bits with it
    )


def prefix_config(dtype: torch.dtype, head_dim: int) -> Config:
    # The largest tiles that compile without spills for every target (bench.aot).
    if dtype == torch.float32:
        return Config(32, 32, 8, 1) if head_dim <= 64 else Config(16, 16, 4, 1)
    return Config(128, 32, 8, 2) if head_dim <= 128 else Config(64, 32, 8, 2)


def window_config(dtype: torch.dtype, head_dim: int) -> Config:
    if dtype == torch.float32:
        wide = Config(16, 16, 8, 1) if head_dim <= 128 else Config(16, 16, 4, 2)
        return Config(32, 32, 8, 1) if head_dim <= 64 else wide
    return Config(64, 32, 4 if 32 < head_dim <= 128 else 8, 2)


@triton.jit
def attend(
    query, key, value, first, last, limit, m_i, l_i, acc, kv_head, head_dim, stride_kn, stride_kh, stride_vn,
    stride_vh, scale, LIMITED: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Takes keys first .. last into the running softmax (m_i, l_i [BLOCK_M], acc [BLOCK_M, BLOCK_D]).

    query [BLOCK_M, BLOCK_D]; key, value [rows, heads, head_dim]. With LIMITED, a query sees keys below limit [BLOCK_M].
    `scale` includes log2 e, since GPUs compute powers of 2; qk and m_i are therefore in units of log 2.
    """
    column = tl.arange(0, BLOCK_D)
    inside = column < head_dim
    for start in range(first, last, BLOCK_N):
        row = start + tl.arange(0, BLOCK_N).to(tl.int64)
        seen = row < last
        keys = tl.load(
            key + row[:, None] * stride_kn + kv_head * stride_kh + column[None, :],
            mask=seen[:, None] & inside[None, :],
            other=0.0,
        )
        visible = seen[None, :]
        if LIMITED:
            visible = visible & (row[None, :] < limit[:, None])
        qk = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
        qk = tl.where(visible, qk, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(qk, axis=1))
        centre = tl.where(m_new == float("-inf"), 0.0, m_new)  # two empty states must not merge to NaN
        p = tl.exp2(qk - centre[:, None])
        alpha = tl.exp2(m_i - centre)
        values = tl.load(
            value + row[:, None] * stride_vn + kv_head * stride_vh + column[None, :],
            mask=seen[:, None] & inside[None, :],
            other=0.0,
        )
        l_i = l_i * alpha + tl.sum(p, axis=1)
        acc = tl.dot(p.to(values.dtype), values, acc * alpha[:, None], input_precision="ieee")
        m_i = m_new
    return m_i, l_i, acc


@triton.jit
def prefix_attention_kernel(
    query, key, value, rows, query_begin, query_end, key_begin, key_end, has_prefix, limits, m_state, l_state,
    acc_state, out, heads, group, head_dim, stride_qm, stride_qh, stride_kn, stride_kh, stride_vn, stride_vh, scale,
    PREFIX: tl.constexpr, LIMITED: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One block b of queries, one head, over key rows key_begin[b] .. key_end[b].

    With PREFIX (stage one) the queries are rows[query_begin[b] .. query_end[b]], rows [R] int64 sorted by prefix. They
    start from an empty softmax and leave m_state, l_state [Q, heads] and acc_state [Q, heads, head_dim], float32.
    Without PREFIX (stage two) the queries are rows query_begin[b] .. query_end[b] of one window. They continue from the
    state where has_prefix[b], with limits [Q] as in `attend`, and leave out [Q, heads, head_dim] in the dtype of
    `query`.
    """
    block, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    place = tl.load(query_begin + block) + tl.arange(0, BLOCK_M)
    ok = place < tl.load(query_end + block)
    row = place
    if PREFIX:
        row = tl.load(rows + place, mask=ok, other=0)
    column = tl.arange(0, BLOCK_D)
    inside = ok[:, None] & (column < head_dim)[None, :]
    queries = tl.load(query + row[:, None] * stride_qm + head * stride_qh + column[None, :], mask=inside, other=0.0)
    at = row * heads + head
    if PREFIX:
        m_i = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
        l_i = tl.zeros((BLOCK_M,), dtype=tl.float32)
        acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    else:
        # Masked loads in place of a branch: without a prefix the state was never written and must not be read.
        resumed = ok & (tl.broadcast_to(tl.load(has_prefix + block), (BLOCK_M,)) > 0)
        m_i = tl.load(m_state + at, mask=resumed, other=float("-inf"))
        l_i = tl.load(l_state + at, mask=resumed, other=0.0)
        acc = tl.load(acc_state + at[:, None] * head_dim + column[None, :], mask=inside & resumed[:, None], other=0.0)
    limit = row
    if LIMITED:
        limit = tl.load(limits + row, mask=ok, other=0)
    m_i, l_i, acc = attend(
        queries, key, value, tl.load(key_begin + block), tl.load(key_end + block), limit, m_i, l_i, acc,
        head // group, head_dim, stride_kn, stride_kh, stride_vn, stride_vh, scale, LIMITED, BLOCK_D, BLOCK_N,
    )  # fmt: skip
    if PREFIX:
        tl.store(m_state + at, m_i, mask=ok)
        tl.store(l_state + at, l_i, mask=ok)
        tl.store(acc_state + at[:, None] * head_dim + column[None, :], acc, mask=inside)
    else:
        # l_i is 0 for a query that saw no key; a NaN stays NaN.
        acc = tl.where(l_i[:, None] == 0.0, 0.0, acc / l_i[:, None])
        tl.store(out + at[:, None] * head_dim + column[None, :], acc.to(out.dtype.element_ty), mask=inside)


class Stage(NamedTuple):
    """What one stage of `prefix_attention_kernel` reads of a layout: its arguments of these names, int64."""

    rows: Tensor
    query_begin: Tensor
    query_end: Tensor
    key_begin: Tensor
    key_end: Tensor
    has_prefix: Tensor
    limits: Tensor


class Schedule(NamedTuple):
    """Both stages of a layout, and whether its windows are block-causal."""

    prefix: Stage
    window: Stage
    limited: bool


def block_sizes(dtype: torch.dtype, head_dim: int) -> tuple[int, int]:
    """BLOCK_M of each stage: what a schedule depends on besides its layout."""
    return prefix_config(dtype, head_dim).BLOCK_M, window_config(dtype, head_dim).BLOCK_M


def schedule_of(
    key_offsets: np.ndarray, query_offsets: np.ndarray, prefix_starts: np.ndarray, prefix_lengths: np.ndarray,
    query_places: np.ndarray | None, block: int, sizes: tuple[int, int], send: Callable[[np.ndarray], Tensor],
) -> Schedule:  # fmt: skip
    """Arrays of `ops.AttentionLayout`; `sizes` as `block_sizes` returns them; `send` copies an array to the device."""
    nothing = np.zeros(1, dtype=np.int64)
    rows, begin, end, start, length = _prefix_blocks(query_offsets, prefix_starts, prefix_lengths, sizes[0])
    prefix = (rows, begin, end, start, start + length, nothing, nothing)
    window, begin, end = _window_blocks(query_offsets, sizes[1])
    limits = _limits(key_offsets, query_offsets, query_places, block)
    own = (nothing, begin, end, key_offsets[:-1][window], key_offsets[1:][window], prefix_lengths[window] > 0, limits)
    stages = _on_device([*prefix, *own], send)
    return Schedule(Stage(*stages[: len(prefix)]), Stage(*stages[len(prefix) :]), block > 0)


def _on_device(arrays: list[np.ndarray], send: Callable[[np.ndarray], Tensor]) -> list[Tensor]:
    """The arrays as int64 parts of one buffer, which goes to the device in one copy."""
    # Parts begin at multiples of 16 bytes: the launcher compiles another kernel for other pointers.
    starts = np.cumsum([0, *(len(item) + len(item) % 2 for item in arrays)])
    packed = np.zeros(starts[-1], dtype=np.int64)
    for start, item in zip(starts[:-1], arrays, strict=True):
        packed[start : start + len(item)] = item
    buffer = send(packed)
    return [buffer[start : start + len(item)] for start, item in zip(starts[:-1], arrays, strict=True)]


def run(
    query: Tensor, key: Tensor, value: Tensor, prefix_key: Tensor, prefix_value: Tensor, schedule: Schedule
) -> Tensor:
    """Arguments of `ops.prefix_attention`, the layout as its schedule. Returns [Q, H, d]."""
    query, key, value, prefix_key, prefix_value = (
        item if item.stride(2) == 1 else item.contiguous() for item in (query, key, value, prefix_key, prefix_value)
    )
    count, heads, head_dim = query.shape
    group, device = heads // key.shape[1], query.device
    out = torch.empty(count, heads, head_dim, dtype=query.dtype, device=device)
    acc_state = torch.empty(count, heads, head_dim, dtype=torch.float32, device=device)
    m_state = torch.empty(count, heads, dtype=torch.float32, device=device)
    l_state = torch.empty_like(m_state)
    block_d = max(16, triton.next_power_of_2(head_dim))  # a dot needs 16
    scale = LOG2_E / math.sqrt(head_dim)
    for stage, config, keys, values, prefix in (
        (schedule.prefix, prefix_config(query.dtype, head_dim), prefix_key, prefix_value, True),
        (schedule.window, window_config(query.dtype, head_dim), key, value, False),
    ):
        if not len(stage.query_begin):
            continue
        prefix_attention_kernel[(len(stage.query_begin), heads)](
            query, keys, values, *stage, m_state, l_state, acc_state, out, heads, group, head_dim, query.stride(0),
            query.stride(1), keys.stride(0), keys.stride(1), values.stride(0), values.stride(1), scale, PREFIX=prefix,
            LIMITED=schedule.limited and not prefix, BLOCK_D=block_d, **config._asdict(),
        )  # fmt: skip
    return out


def _prefix_blocks(
    query_offsets: np.ndarray, starts: np.ndarray, lengths: np.ndarray, size: int
) -> tuple[np.ndarray, ...]:
    """Query rows sorted by prefix, and blocks of at most `size` of them that see one prefix."""
    window_of = np.repeat(np.arange(len(starts)), np.diff(query_offsets))
    rows = np.flatnonzero(lengths[window_of] > 0)
    rows = rows[np.lexsort((rows, lengths[window_of[rows]], starts[window_of[rows]]))]
    start, length = starts[window_of[rows]], lengths[window_of[rows]]
    changes = np.flatnonzero((np.diff(start) != 0) | (np.diff(length) != 0)) + 1
    edges = np.concatenate([[0], changes, [len(rows)]])
    begin = np.concatenate([np.arange(a, b, size) for a, b in zip(edges[:-1], edges[1:], strict=True)])
    end = np.minimum(begin + size, edges[np.searchsorted(edges, begin, side="right").clip(max=len(edges) - 1)])
    return rows, begin, end, start[begin], length[begin]


def _window_blocks(query_offsets: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Blocks of at most `size` query rows of one window: window, first row, last row + 1."""
    blocks = -(-np.diff(query_offsets) // size)
    window = np.repeat(np.arange(len(blocks)), blocks)
    within = np.arange(len(window)) - np.repeat(np.cumsum(blocks) - blocks, blocks)
    begin = query_offsets[:-1][window] + within * size
    return window, begin, np.minimum(begin + size, query_offsets[1:][window])


def _limits(key_offsets: np.ndarray, query_offsets: np.ndarray, places: np.ndarray | None, block: int) -> np.ndarray:
    """The first key row that each query does not see, in the block-causal pattern."""
    if not block:
        return np.zeros(1, dtype=np.int64)
    window_of = np.repeat(np.arange(len(key_offsets) - 1), np.diff(query_offsets))
    if places is None:
        places = np.arange(query_offsets[-1]) - query_offsets[window_of]
    return key_offsets[window_of] + (places // block + 1) * block
