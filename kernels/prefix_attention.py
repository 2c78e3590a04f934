"""Triton kernels of prefix_attention: packed windows over a shared prefix and over themselves.

One kernel in two stages. The first takes queries of all windows that see one prefix, BLOCK_Q at a time, over the prefix
and leaves a running softmax (maximum, sum, accumulator) for each query; the second goes on from it over the window's
own keys, which is the merge by log-sum-exp. Key tiles start at the prefix's and the window's first key, so a query's
bits do not depend on its neighbours; a single stage over blocks of several windows could not keep that.
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
    """Tile sizes and launch options; constants of the type and head size."""

    BLOCK_Q: int
    BLOCK_K: int
    num_warps: int
    num_stages: int
    enable_fp_fusion: bool = True  # said, not left to Triton: its default changes between versions, and bits with it


def prefix_config(dtype: torch.dtype, width: int) -> Config:
    # The largest tiles that compile without spills for every target (bench.aot).
    if dtype == torch.float32:
        return Config(32, 32, 8, 1) if width <= 64 else Config(16, 16, 4, 1)
    return Config(128, 32, 8, 2) if width <= 128 else Config(64, 32, 8, 2)


def window_config(dtype: torch.dtype, width: int) -> Config:
    if dtype == torch.float32:
        wide = Config(16, 16, 8, 1) if width <= 128 else Config(16, 16, 4, 2)
        return Config(32, 32, 8, 1) if width <= 64 else wide
    return Config(64, 32, 4 if 32 < width <= 128 else 8, 2)


@triton.jit
def attend(
    query, key, value, first, last, limit, best, mass, result, shared_head, width, key_row, key_head, value_row,
    value_head, scale, LIMITED: tl.constexpr, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Takes keys first .. last into the running softmax (best, mass [BLOCK_Q], result [BLOCK_Q, WIDTH]).

    query [BLOCK_Q, WIDTH]; key, value [rows, heads, width]; `scale` holds log2 e, as powers of 2 are the machine's own;
    with LIMITED, a query sees keys below limit [BLOCK_Q]. `best` is in units of log 2 as well.
    """
    column = tl.arange(0, WIDTH)
    inside = column < width
    for start in range(first, last, BLOCK_K):
        row = start + tl.arange(0, BLOCK_K).to(tl.int64)
        seen = row < last
        keys = tl.load(
            key + row[:, None] * key_row + shared_head * key_head + column[None, :],
            mask=seen[:, None] & inside[None, :],
            other=0.0,
        )
        visible = seen[None, :]
        if LIMITED:
            visible = visible & (row[None, :] < limit[:, None])
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
        scores = tl.where(visible, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        centre = tl.where(new_best == float("-inf"), 0.0, new_best)  # two empty states must not merge to NaN
        power = tl.exp2(scores - centre[:, None])
        factor = tl.exp2(best - centre)
        values = tl.load(
            value + row[:, None] * value_row + shared_head * value_head + column[None, :],
            mask=seen[:, None] & inside[None, :],
            other=0.0,
        )
        mass = mass * factor + tl.sum(power, axis=1)
        result = tl.dot(power.to(values.dtype), values, result * factor[:, None], input_precision="ieee")
        best = new_best
    return best, mass, result


@triton.jit
def stage_kernel(
    query, key, value, rows, block_begin, block_end, block_first, block_last, has_prefix, limits, best_state,
    mass_state, state, out, heads, group, width, query_row, query_head, key_row, key_head, value_row, value_head, scale,
    PREFIX: tl.constexpr, LIMITED: tl.constexpr, WIDTH: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One block of queries, one head, over key rows block_first[b] .. block_last[b].

    With PREFIX the queries are rows[block_begin[b] .. block_end[b]], rows [R] int64 sorted by prefix; they have seen
    nothing, and leave best_state, mass_state [Q, heads] and state [Q, heads, width], float32. Without, they are rows
    block_begin[b] .. block_end[b] of one window; they go on from that state where has_prefix[b], with limits [Q] as in
    `attend`, and leave out [Q, heads, width] in the type of `query`.
    """
    block, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    place = tl.load(block_begin + block) + tl.arange(0, BLOCK_Q)
    ok = place < tl.load(block_end + block)
    row = place
    if PREFIX:
        row = tl.load(rows + place, mask=ok, other=0)
    column = tl.arange(0, WIDTH)
    inside = ok[:, None] & (column < width)[None, :]
    queries = tl.load(query + row[:, None] * query_row + head * query_head + column[None, :], mask=inside, other=0.0)
    at = row * heads + head
    if PREFIX:
        best = tl.full((BLOCK_Q,), float("-inf"), dtype=tl.float32)
        mass = tl.zeros((BLOCK_Q,), dtype=tl.float32)
        result = tl.zeros((BLOCK_Q, WIDTH), dtype=tl.float32)
    else:
        # Masked, not branched: without a prefix the state was never written and must not be read.
        going_on = ok & (tl.broadcast_to(tl.load(has_prefix + block), (BLOCK_Q,)) > 0)
        best = tl.load(best_state + at, mask=going_on, other=float("-inf"))
        mass = tl.load(mass_state + at, mask=going_on, other=0.0)
        result = tl.load(state + at[:, None] * width + column[None, :], mask=inside & going_on[:, None], other=0.0)
    limit = row
    if LIMITED:
        limit = tl.load(limits + row, mask=ok, other=0)
    best, mass, result = attend(
        queries, key, value, tl.load(block_first + block), tl.load(block_last + block), limit, best, mass, result,
        head // group, width, key_row, key_head, value_row, value_head, scale, LIMITED, WIDTH, BLOCK_K,
    )  # fmt: skip
    if PREFIX:
        tl.store(best_state + at, best, mask=ok)
        tl.store(mass_state + at, mass, mask=ok)
        tl.store(state + at[:, None] * width + column[None, :], result, mask=inside)
    else:
        # Mass 0 is a query that saw nothing; a NaN stays one.
        result = tl.where(mass[:, None] == 0.0, 0.0, result / mass[:, None])
        tl.store(out + at[:, None] * width + column[None, :], result.to(out.dtype.element_ty), mask=inside)


class Stage(NamedTuple):
    """What `stage_kernel` reads of a layout, int64 on the device; see there."""

    rows: Tensor
    block_begin: Tensor
    block_end: Tensor
    block_first: Tensor
    block_last: Tensor
    has_prefix: Tensor
    limits: Tensor


class Schedule(NamedTuple):
    """Both stages of a layout, and whether its windows are block-causal."""

    prefix: Stage
    window: Stage
    limited: bool


def block_sizes(dtype: torch.dtype, width: int) -> tuple[int, int]:
    """Queries in a block of each stage: what a schedule depends on beside its layout."""
    return prefix_config(dtype, width).BLOCK_Q, window_config(dtype, width).BLOCK_Q


def schedule_of(
    key_offsets: np.ndarray, query_offsets: np.ndarray, prefix_starts: np.ndarray, prefix_lengths: np.ndarray,
    query_places: np.ndarray | None, block: int, sizes: tuple[int, int], send: Callable[[np.ndarray], Tensor],
) -> Schedule:  # fmt: skip
    """Arrays of `ops.AttentionLayout`; `sizes` as `block_sizes` gives them; `send` takes an array to the device."""
    nothing = np.zeros(1, dtype=np.int64)
    rows, begin, end, start, length = _prefix_blocks(query_offsets, prefix_starts, prefix_lengths, sizes[0])
    prefix = (rows, begin, end, start, start + length, nothing, nothing)
    window, begin, end = _window_blocks(query_offsets, sizes[1])
    limits = _limits(key_offsets, query_offsets, query_places, block)
    own = (nothing, begin, end, key_offsets[:-1][window], key_offsets[1:][window], prefix_lengths[window] > 0, limits)
    stages = _on_device([*prefix, *own], send)
    return Schedule(Stage(*stages[: len(prefix)]), Stage(*stages[len(prefix) :]), block > 0)


def _on_device(arrays: list[np.ndarray], send: Callable[[np.ndarray], Tensor]) -> list[Tensor]:
    """The arrays as int64 parts of one buffer, which one copy takes over."""
    # Parts begin at multiples of 16 bytes: the launcher compiles a kernel anew for pointers that are not.
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
    count, heads, width = query.shape
    group, device = heads // key.shape[1], query.device
    out = torch.empty(count, heads, width, dtype=query.dtype, device=device)
    state = torch.empty(count, heads, width, dtype=torch.float32, device=device)
    best = torch.empty(count, heads, dtype=torch.float32, device=device)
    mass = torch.empty_like(best)
    padded = max(16, triton.next_power_of_2(width))  # a dot needs 16
    scale = LOG2_E / math.sqrt(width)
    for stage, config, keys, values, prefix in (
        (schedule.prefix, prefix_config(query.dtype, width), prefix_key, prefix_value, True),
        (schedule.window, window_config(query.dtype, width), key, value, False),
    ):
        if not len(stage.block_begin):
            continue
        stage_kernel[(len(stage.block_begin), heads)](
            query, keys, values, *stage, best, mass, state, out, heads, group, width, query.stride(0), query.stride(1),
            keys.stride(0), keys.stride(1), values.stride(0), values.stride(1), scale, PREFIX=prefix,
            LIMITED=schedule.limited and not prefix, WIDTH=padded, **config._asdict(),
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
