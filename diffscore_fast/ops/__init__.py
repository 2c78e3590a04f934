"""Operations: one file each, with meaning, reference implementation and dispatch."""

from diffscore_fast.ops.masked_logprob import (
    MASKED_LOGPROB,
    MASKED_LOGPROB_STATISTICS,
    LogitStatistics,
    masked_logprob,
    masked_logprob_statistics,
)
from diffscore_fast.ops.prefix_attention import PREFIX_ATTENTION, AttentionLayout, prefix_attention
from diffscore_fast.ops.registry import AUTO

OPERATIONS = (MASKED_LOGPROB, MASKED_LOGPROB_STATISTICS, PREFIX_ATTENTION)

__all__ = [
    "AUTO",
    "MASKED_LOGPROB",
    "MASKED_LOGPROB_STATISTICS",
    "OPERATIONS",
    "PREFIX_ATTENTION",
    "AttentionLayout",
    "LogitStatistics",
    "masked_logprob",
    "masked_logprob_statistics",
    "prefix_attention",
]
