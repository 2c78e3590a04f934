"""Operations: one file each, with meaning, reference implementation and dispatch."""

from diffscore_fast.ops.attention_layout import AttentionLayout
from diffscore_fast.ops.evidence_bounds import EVIDENCE_BOUNDS, EvidenceBounds, evidence_bounds
from diffscore_fast.ops.linear import LINEAR, ResidualNorm, linear
from diffscore_fast.ops.log_mean_exp import LOG_MEAN_EXP, LogMeanExp, log_mean_exp
from diffscore_fast.ops.masked_logprob import (
    MASKED_LOGPROB,
    MASKED_LOGPROB_STATISTICS,
    LogitStatistics,
    masked_logprob,
    masked_logprob_statistics,
)
from diffscore_fast.ops.prefix_attention import PREFIX_ATTENTION, prefix_attention
from diffscore_fast.ops.registry import AUTO, wanted_by_operation
from diffscore_fast.ops.sample_token import SAMPLE_TOKEN, sample_token

OPERATIONS = (
    MASKED_LOGPROB,
    MASKED_LOGPROB_STATISTICS,
    PREFIX_ATTENTION,
    LINEAR,
    LOG_MEAN_EXP,
    EVIDENCE_BOUNDS,
    SAMPLE_TOKEN,
)

__all__ = [
    "AUTO",
    "EVIDENCE_BOUNDS",
    "LINEAR",
    "LOG_MEAN_EXP",
    "MASKED_LOGPROB",
    "MASKED_LOGPROB_STATISTICS",
    "OPERATIONS",
    "PREFIX_ATTENTION",
    "SAMPLE_TOKEN",
    "AttentionLayout",
    "EvidenceBounds",
    "LogMeanExp",
    "LogitStatistics",
    "ResidualNorm",
    "evidence_bounds",
    "linear",
    "log_mean_exp",
    "masked_logprob",
    "masked_logprob_statistics",
    "prefix_attention",
    "sample_token",
    "wanted_by_operation",
]
