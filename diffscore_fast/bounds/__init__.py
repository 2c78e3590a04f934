"""TUBE: bounds on the log-likelihood of block models from below and above, or its exact value (arXiv 2605.24292).

The files in reading order:

- `likelihood`: `LikelihoodBounds`, from texts to a table.
- `config`: what is asked for, checked once.
- `orders`: latent orders of a block, and their random numbers.
- `states`: blocks, their states (sets of visible tokens), and the two estimators: sampled orders, the whole lattice.
- `lattice`: the exact likelihood from all states.
- `evidence`: lower and upper bound from sampled orders, with their standard errors.
- `comparators`: the biased estimates that the paper compares with.
- `surrogates`: other models as surrogates of the upper bound.
- `autoregressive`: the same network at block size 1.
- `table`, `intervals`: the result, and intervals around it.
- `sampling`: texts drawn from a block model, for surrogates that are fine-tuned on them.
"""

from diffscore_fast.bounds.config import BoundsConfig
from diffscore_fast.bounds.likelihood import LikelihoodBounds
from diffscore_fast.bounds.surrogates import CausalSurrogate, NetworkSurrogate
from diffscore_fast.bounds.table import BlockBounds, BoundsTable

__all__ = ["BlockBounds", "BoundsConfig", "BoundsTable", "CausalSurrogate", "LikelihoodBounds", "NetworkSurrogate"]
