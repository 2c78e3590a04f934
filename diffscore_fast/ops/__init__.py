"""Operations: one file each, with meaning, reference implementation and dispatch."""

from diffscore_fast.ops.masked_logprob import MASKED_LOGPROB, masked_logprob
from diffscore_fast.ops.prefix_attention import PREFIX_ATTENTION, AttentionLayout, prefix_attention
from diffscore_fast.ops.registry import AUTO

OPERATIONS = (MASKED_LOGPROB, PREFIX_ATTENTION)

__all__ = [
    "AUTO",
    "MASKED_LOGPROB",
    "OPERATIONS",
    "PREFIX_ATTENTION",
    "AttentionLayout",
    "masked_logprob",
    "prefix_attention",
]
