"""Attention of packed windows over a shared prefix and over themselves."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from diffscore_fast.errors import ImplementationError
from diffscore_fast.ops.attention_layout import AttentionLayout
from diffscore_fast.ops.extension import cpu_unavailable
from diffscore_fast.ops.flash_attention import flash_attention_unavailable, flash_prefix_attention
from diffscore_fast.ops.registry import AUTO, Implementation, Operation, anywhere, check_one_device, check_row_count
from diffscore_fast.ops.transfer import to_device
from diffscore_fast.ops.triton_kernels import kernels, on_its_device, triton_unavailable

SCORES_CHUNK = 1 << 24  # the reference's attention scores at a time
KERNEL_DTYPES = {torch.float32, torch.bfloat16, torch.float16}


def prefix_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    prefix_key: Tensor,
    prefix_value: Tensor,
    layout: AttentionLayout,
    *,
    implementation: str = AUTO,
) -> Tensor:
    """Softmax attention of each query over its window's visible prefix rows and its own window's rows.

    out[q] = sum_j softmax_j(query[q] . key[j] / sqrt(d)) value[j],  j over both segments as one.

    Parameters
    ----------
    query : Tensor [Q, H, d]
    key, value : Tensor [N, Hkv, d]
        Query head h reads key-value head h // (H // Hkv).
    prefix_key, prefix_value : Tensor [P, Hkv, d]
        Cached rows of many prefixes.
    layout : AttentionLayout
        Which rows each query sees.
    implementation : str
        "auto", or a name; a named one runs or raises.

    Returns
    -------
    Tensor [Q, H, d], in the dtype of `query`
        0 for a query that sees no key. The reference alone is differentiable and takes float64 and mixed dtypes; "auto"
        takes it in these cases.

    Raises
    ------
    ValueError
        If shapes do not fit each other, or the layout leads outside its tensors.
    ImplementationError
        If the named implementation cannot run here, has no gradient where one is wanted, or does not take the dtypes.
    """
    inputs = (query, key, value, prefix_key, prefix_value)
    check_one_device(
        "prefix_attention", query=query, key=key, value=value, prefix_key=prefix_key, prefix_value=prefix_value
    )
    tracked = torch.is_grad_enabled() and any(item.requires_grad for item in inputs)
    dtypes = {item.dtype for item in inputs}
    beyond = len(dtypes) > 1 or not dtypes <= KERNEL_DTYPES
    if implementation == AUTO and (tracked or beyond):
        implementation = "reference"
    chosen = PREFIX_ATTENTION.resolve(query.device, implementation)
    if tracked and chosen.name != "reference":
        raise ImplementationError(f"prefix_attention: {chosen.name!r} has no gradient; ask for 'reference' or 'auto'")
    if beyond and chosen.name != "reference":
        names = ", ".join(sorted(str(item).removeprefix("torch.") for item in dtypes))
        raise ImplementationError(
            f"prefix_attention: {chosen.name!r} takes one dtype, float32, bfloat16 or float16; got {names}"
        )
    _check(*inputs, layout)
    return PREFIX_ATTENTION.run(chosen, *inputs, layout)


def _check(
    query: Tensor, key: Tensor, value: Tensor, prefix_key: Tensor, prefix_value: Tensor, layout: AttentionLayout
) -> None:
    """Refuses shapes that do not fit, and layouts that lead outside their tensors, where a kernel would read."""
    if query.dim() != 3 or query.shape[2] == 0:
        raise ValueError(f"prefix_attention: query must be [Q, H, d] with d at least 1; got {list(query.shape)}")
    for name, pair in (("key", (key, value)), ("prefix_key", (prefix_key, prefix_value))):
        if pair[0].shape != pair[1].shape or pair[0].dim() != 3 or pair[0].shape[2] != query.shape[2]:
            raise ValueError(
                f"prefix_attention: {name} and its values must be [rows, heads, {query.shape[2]}]; got "
                f"{list(pair[0].shape)} and {list(pair[1].shape)}"
            )
        check_row_count("prefix_attention", name, len(pair[0]))
    check_row_count("prefix_attention", "query", len(query))
    if not key.shape[1] or query.shape[1] % key.shape[1] or prefix_key.shape[1] != key.shape[1]:
        raise ValueError(
            f"prefix_attention: {query.shape[1]} query heads cannot share {key.shape[1]} key heads, or "
            f"the prefix has other heads ({prefix_key.shape[1]})"
        )
    windows = len(layout.prefix_starts)
    for name, offsets, rows in (("key", layout.key_offsets, key), ("query", layout.query_offsets, query)):
        if len(offsets) != windows + 1 or offsets[0] or offsets[-1] != len(rows) or (np.diff(offsets) < 0).any():
            raise ValueError(f"prefix_attention: {name}_offsets must rise from 0 to {len(rows)} in {windows} steps")
    starts, lengths = layout.prefix_starts, layout.prefix_lengths
    seen = lengths > 0  # the start of a prefix of length 0 is not used
    if len(lengths) != windows or (lengths < 0).any() or (starts[seen] < 0).any():
        raise ValueError("prefix_attention: prefix starts and lengths must be non-negative, one per window")
    if (lengths > len(prefix_key) - starts)[seen].any():  # not starts + lengths, which may pass 2^63
        raise ValueError(f"prefix_attention: a window sees rows beyond the {len(prefix_key)} of the prefix keys")
    if layout.block < 0:
        raise ValueError(f"prefix_attention: block must not be negative; got {layout.block}")
    if layout.query_places is None:
        if layout.block and not np.array_equal(layout.key_offsets, layout.query_offsets):
            raise ValueError("prefix_attention: block-causal attention of some of the queries needs their places")
    elif len(layout.query_places) != len(query):
        raise ValueError(f"prefix_attention: {len(layout.query_places)} query places for {len(query)} queries")
    else:
        lengths_of = np.repeat(np.diff(layout.key_offsets), np.diff(layout.query_offsets))
        outside = (layout.query_places < 0) | (layout.query_places >= lengths_of)
        if outside.any():
            at = int(outside.argmax())
            raise ValueError(
                f"prefix_attention: query_places[{at}] is {layout.query_places[at]}, outside its window "
                f"of {lengths_of[at]} rows"
            )


def _reference(
    query: Tensor, key: Tensor, value: Tensor, prefix_key: Tensor, prefix_value: Tensor, layout: AttentionLayout
) -> Tensor:
    """Stacks runs of neighbouring windows that have one length and one prefix, and attends run by run."""
    out = torch.empty_like(query)
    precision = torch.promote_types(query.dtype, torch.float32)
    lengths = np.diff(layout.key_offsets)
    for first, last in _runs(lengths, layout.prefix_starts, layout.prefix_lengths, query.shape[1]):
        length, prefix = int(lengths[first]), int(layout.prefix_lengths[first])
        window_count = last - first
        query_rows = slice(int(layout.query_offsets[first]), int(layout.query_offsets[last]))
        if query_rows.start == query_rows.stop:
            continue
        counts = np.diff(layout.query_offsets[first : last + 1])
        window_of = np.repeat(np.arange(window_count), counts)
        slot_of = np.arange(len(window_of)) - np.repeat(np.cumsum(counts) - counts, counts)
        slots = int(counts.max())
        heads, head_dim = query.shape[1:]
        # [windows, slots, H, d]; slots beyond a window's queries stay zero and are not read back.
        stacked = query.new_zeros(window_count * slots, heads, head_dim)
        index = torch.from_numpy(window_of * slots + slot_of).to(query.device)
        stacked[index] = query[query_rows]
        stacked = stacked.view(window_count, slots, heads, head_dim)

        own_rows = slice(int(layout.key_offsets[first]), int(layout.key_offsets[last]))
        own_key = _expand(key[own_rows], heads).view(window_count, length, heads, head_dim)
        own_value = _expand(value[own_rows], heads).view(window_count, length, heads, head_dim)
        start = int(layout.prefix_starts[first])
        shared_key = _expand(prefix_key[start : start + prefix], heads)
        shared_value = _expand(prefix_value[start : start + prefix], heads)

        scale = 1.0 / math.sqrt(head_dim)
        own = torch.einsum("wqhd,wkhd->whqk", stacked.to(precision) * scale, own_key.to(precision))
        if layout.block:
            if layout.query_places is None:
                places = np.tile(np.arange(length), window_count)
            else:
                places = layout.query_places[query_rows]
            visible = np.zeros((window_count * slots, length), dtype=bool)
            visible[window_of * slots + slot_of] = _block_visible(places, length, layout.block)
            mask = torch.from_numpy(visible.reshape(window_count, 1, slots, length)).to(query.device)
            own = own.masked_fill(~mask, -torch.inf)
        shared = torch.einsum("wqhd,khd->whqk", stacked.to(precision) * scale, shared_key.to(precision))
        weights = torch.softmax(torch.cat([shared, own], dim=-1), dim=-1)
        result = torch.einsum("whqk,khd->wqhd", weights[..., :prefix], shared_value.to(precision))
        result += torch.einsum("whqk,wkhd->wqhd", weights[..., prefix:], own_value.to(precision))
        out[query_rows] = result.reshape(window_count * slots, heads, head_dim)[index].to(out.dtype)
    return out


def _runs(lengths: np.ndarray, starts: np.ndarray, prefixes: np.ndarray, heads: int) -> list[tuple[int, int]]:
    """Half-open runs of windows with equal length and prefix, of about SCORES_CHUNK attention scores at most."""
    changed = (np.diff(lengths) != 0) | (np.diff(starts) != 0) | (np.diff(prefixes) != 0)
    edges = np.concatenate([[0], np.flatnonzero(changed) + 1, [len(lengths)]])
    runs = []
    for first, last in zip(edges[:-1], edges[1:], strict=True):
        each = int(lengths[first]) * int(lengths[first] + prefixes[first]) * heads if last > first else 1
        step = max(1, SCORES_CHUNK // max(each, 1))
        runs += [(int(at), int(min(at + step, last))) for at in range(first, last, step)]
    return runs


def _block_visible(places: np.ndarray, length: int, block: int) -> np.ndarray:
    """Whether the queries at these places see each of a window's keys, bool [len(places), length]."""
    return np.arange(length)[None, :] < ((places // block + 1) * block)[:, None]


def _expand(rows: Tensor, heads: int) -> Tensor:
    """Key-value heads [N, Hkv, d] repeated to [N, H, d]."""
    return rows if rows.shape[1] == heads else rows.repeat_interleave(heads // rows.shape[1], dim=1)


def _cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    prefix_key: Tensor,
    prefix_value: Tensor,
    layout: AttentionLayout,
    products: str = AUTO,
) -> Tensor:
    arrays = (layout.key_offsets, layout.query_offsets, layout.prefix_starts, layout.prefix_lengths)
    key_offsets, query_offsets, starts, lengths = (_host(array) for array in arrays)
    places = None if layout.query_places is None else _host(layout.query_places)
    return torch.ops.diffscore_fast.prefix_attention(
        query,
        key,
        value,
        prefix_key,
        prefix_value,
        key_offsets,
        query_offsets,
        starts,
        lengths,
        places,
        layout.block,
        products,
    )


def _host(array: np.ndarray) -> Tensor:
    """A contiguous int64 tensor, as the C++ operation reads it."""
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64))


@on_its_device
def _triton(
    query: Tensor, key: Tensor, value: Tensor, prefix_key: Tensor, prefix_value: Tensor, layout: AttentionLayout
) -> Tensor:
    module = kernels("prefix_attention")
    sizes = module.block_sizes(query.dtype, query.shape[2])
    schedule = layout.schedules.get((query.device, sizes))
    if schedule is None:
        schedule = layout.schedules[query.device, sizes] = module.schedule_of(
            layout.key_offsets,
            layout.query_offsets,
            layout.prefix_starts,
            layout.prefix_lengths,
            layout.query_places,
            layout.block,
            sizes,
            lambda array: to_device(array, query.device),
        )
    return module.run(query, key, value, prefix_key, prefix_value, schedule)


PREFIX_ATTENTION = Operation(
    "prefix_attention",
    [
        Implementation("cpu", _cpu, cpu_unavailable),
        Implementation("triton", _triton, triton_unavailable),
        Implementation("flash_attn", flash_prefix_attention, flash_attention_unavailable),
        Implementation("reference", _reference, anywhere),
    ],
)
