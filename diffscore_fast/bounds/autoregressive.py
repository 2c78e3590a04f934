"""The autoregressive likelihood of a block model: the same network at block size 1."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from diffscore_fast.bounds.orders import Generation
from diffscore_fast.bounds.states import Lattice, cut_blocks
from diffscore_fast.engine.plan import AttentionPattern, Sequences
from diffscore_fast.engine.runner import Runner


def autoregressive_log_probs(
    runner: Runner, sequences: Sequences, progress: Callable[[int], None] | None = None
) -> np.ndarray:
    """Log-probability of every target given the tokens before it, by the network at block size 1. float64 [targets].

    Raises
    ------
    UnsupportedPatternError
        If the model was not trained at block size 1.
    """
    spec = runner.backbone.spec
    spec.pattern("block", 1)
    singles = cut_blocks(sequences.target_lengths, 1, spec.start_in_block(1))
    return runner.evaluate(Lattice(singles, Generation()), sequences, AttentionPattern("block", 1), progress)
