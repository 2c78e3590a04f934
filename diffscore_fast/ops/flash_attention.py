"""prefix_attention by flash-attn's varlen function: a call over the prefixes and one over the windows, merged."""

from __future__ import annotations

import importlib.util

import numpy as np
import torch
from torch import Tensor

from diffscore_fast.errors import ImplementationError
from diffscore_fast.ops.attention_layout import AttentionLayout
from diffscore_fast.ops.transfer import to_device


def flash_attention_unavailable(device: torch.device) -> str | None:
    """Availability of the `flash_attn` implementation: None, or one sentence that says why not."""
    if importlib.util.find_spec("flash_attn") is None:
        return "the package flash-attn is not installed"
    return None if device.type == "cuda" else f"it runs on a GPU, not on {device.type}"


def flash_prefix_attention(
    query: Tensor, key: Tensor, value: Tensor, prefix_key: Tensor, prefix_value: Tensor, layout: AttentionLayout
) -> Tensor:
    """Arguments of `ops.prefix_attention`, in bfloat16 or float16. Returns [Q, H, d].

    The rows of each distinct prefix are copied once, whatever the number of its windows. With softmax sums
    s = exp(lse), the merge of two segments is (s_1 out_1 + s_2 out_2) / (s_1 + s_2).

    Raises
    ------
    ImplementationError
        For block-causal layouts, which flash-attn has no mask for, and for other dtypes.
    """
    if layout.block:
        raise ImplementationError("prefix_attention: 'flash_attn' has no block-causal pattern; ask for 'auto'")
    if query.dtype not in (torch.bfloat16, torch.float16):
        raise ImplementationError(f"prefix_attention: 'flash_attn' takes bfloat16 and float16; got {query.dtype}")
    if len(query) == 0:
        return torch.empty_like(query)
    out, log_sum = _varlen(query, key, value, layout.query_offsets, layout.key_offsets)
    rows, query_offsets, starts, lengths = _queries_by_prefix(layout)
    if len(rows) == 0:
        return out
    key_offsets = np.concatenate([[0], np.cumsum(lengths)])
    places = np.arange(key_offsets[-1]) + np.repeat(starts - key_offsets[:-1], lengths)
    seen, index = (to_device(item, query.device) for item in (places, rows))
    shared, shared_log_sum = _varlen(query[index], prefix_key[seen], prefix_value[seen], query_offsets, key_offsets)
    # The log-sum-exp of a window without keys is -inf, whatever the library returns for it.
    empty = np.repeat(np.diff(layout.key_offsets) == 0, np.diff(layout.query_offsets))
    log_sum = log_sum.masked_fill(to_device(empty, query.device)[:, None], float("-inf"))
    share = torch.sigmoid(shared_log_sum - log_sum[index])[..., None]
    own = out[index].float()
    out[index] = (own + share * (shared.float() - own)).to(out.dtype)
    return out


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, query_offsets: np.ndarray, key_offsets: np.ndarray
) -> tuple[Tensor, Tensor]:
    """Attention [Q, H, d] of packed sequences and its natural log-sum-exp [Q, H]."""
    from flash_attn import flash_attn_varlen_func

    edges = [to_device(item.astype(np.int32), query.device) for item in (query_offsets, key_offsets)]
    max_lengths = [int(np.diff(item).max(initial=0)) for item in (query_offsets, key_offsets)]
    out, log_sum, _ = flash_attn_varlen_func(
        query.contiguous(), key.contiguous(), value.contiguous(), *edges, *max_lengths, return_attn_probs=True
    )
    return out, log_sum.transpose(0, 1)  # [H, Q] since flash-attn 2.6


def _queries_by_prefix(layout: AttentionLayout) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Query rows that see a prefix, those of one prefix together; and each distinct prefix's offsets, start, length."""
    window_of = np.repeat(np.arange(len(layout.prefix_starts)), np.diff(layout.query_offsets))
    rows = np.flatnonzero(layout.prefix_lengths[window_of] > 0)
    pairs = np.stack([layout.prefix_starts, layout.prefix_lengths], axis=1)[window_of[rows]]
    distinct, which, counts = np.unique(pairs, axis=0, return_inverse=True, return_counts=True)
    order = np.argsort(which.ravel(), kind="stable")
    return rows[order], np.concatenate([[0], np.cumsum(counts)]), distinct[:, 0], distinct[:, 1]
