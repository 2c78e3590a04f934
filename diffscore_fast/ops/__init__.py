"""Operations: each has a meaning, a reference in plain PyTorch, which is its specification, and faster implementations.

=========================  ====================================  ===================  ==================================
operation                  meaning                               file                 implementations
=========================  ====================================  ===================  ==================================
masked_logprob             log-prob of a target token            masked_logprob.py    cpu, triton, reference
masked_logprob_statistics  with log-sum-exp, entropy and rank    masked_logprob.py    cpu, triton, reference
prefix_attention           attention over a prefix and a window  prefix_attention.py  cpu, triton, flash_attn, reference
linear                     matmul with its epilogue              linear.py            cpu, tiles, reference
int8_linear                matmul with an int8 weight            int8_linear.py       cpu, reference
int8_feed_forward          two layers with int8 weights          int8_linear.py       cpu, reference
int8_logprob               log-prob with an int8 normaliser      int8_linear.py       cpu, reference
log_mean_exp               log-mean-exp of segments              log_mean_exp.py      cpu, triton, reference
evidence_bounds            bounds on log-evidence                evidence_bounds.py   cpu, triton, reference
sample_token               a token drawn from the softmax        sample_token.py      reference
best_token                 the most probable token               best_token.py        reference
=========================  ====================================  ===================  ==================================

`registry.py` chooses: "auto" takes the first implementation that can run, a name takes that one or raises. The `cpu`
implementations are C++ (csrc/, loaded by `extension.py`), the `triton` ones are in kernels/. `projection.py` is the
table of options that the operations on the vocabulary share.

Three parts have no caller in the package. They are library API, tested like the rest:

- `masked_logprob_statistics` is for unmasking policies, which choose places by entropy or rank;
- the gradients of `masked_logprob` are for fine-tuning (`logit_gradients.py` has those of the CPU);
- `weight_scale` is for vocabulary weights stored as int8.
"""

from diffscore_fast.ops.attention_layout import AttentionLayout
from diffscore_fast.ops.best_token import BEST_TOKEN, best_token
from diffscore_fast.ops.evidence_bounds import EVIDENCE_BOUNDS, EvidenceBounds, evidence_bounds
from diffscore_fast.ops.int8_linear import (
    INT8_FEED_FORWARD,
    INT8_LINEAR,
    INT8_LOGPROB,
    Int8Layer,
    Int8Weight,
    int8_feed_forward,
    int8_linear,
    int8_logprob,
    int8_unavailable,
)
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
from diffscore_fast.ops.projection import Projection
from diffscore_fast.ops.registry import AUTO, wanted_by_operation
from diffscore_fast.ops.sample_token import SAMPLE_TOKEN, sample_token

OPERATIONS = (
    MASKED_LOGPROB,
    MASKED_LOGPROB_STATISTICS,
    PREFIX_ATTENTION,
    LINEAR,
    INT8_LINEAR,
    INT8_FEED_FORWARD,
    INT8_LOGPROB,
    LOG_MEAN_EXP,
    EVIDENCE_BOUNDS,
    SAMPLE_TOKEN,
    BEST_TOKEN,
)

__all__ = [
    "AUTO",
    "BEST_TOKEN",
    "EVIDENCE_BOUNDS",
    "INT8_FEED_FORWARD",
    "INT8_LINEAR",
    "INT8_LOGPROB",
    "LINEAR",
    "LOG_MEAN_EXP",
    "MASKED_LOGPROB",
    "MASKED_LOGPROB_STATISTICS",
    "OPERATIONS",
    "PREFIX_ATTENTION",
    "SAMPLE_TOKEN",
    "AttentionLayout",
    "EvidenceBounds",
    "Int8Layer",
    "Int8Weight",
    "LogMeanExp",
    "LogitStatistics",
    "Projection",
    "ResidualNorm",
    "best_token",
    "evidence_bounds",
    "int8_feed_forward",
    "int8_linear",
    "int8_logprob",
    "int8_unavailable",
    "linear",
    "log_mean_exp",
    "masked_logprob",
    "masked_logprob_statistics",
    "prefix_attention",
    "sample_token",
    "wanted_by_operation",
]
