"""Operations: one file each, with meaning, reference implementation and dispatch."""

from diffscore_fast.ops.masked_logprob import MASKED_LOGPROB, masked_logprob
from diffscore_fast.ops.prefix_attention import PREFIX_ATTENTION, AttentionLayout, prefix_attention

__all__ = ["MASKED_LOGPROB", "PREFIX_ATTENTION", "AttentionLayout", "masked_logprob", "prefix_attention"]
