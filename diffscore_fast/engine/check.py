"""A loaded model checks itself: its scores must not depend on what is packed beside them."""

from __future__ import annotations

import numpy as np
import torch

from diffscore_fast.engine.runner import Runner
from diffscore_fast.engine.windows import Attention, MaskPlan, Sequences, compose
from diffscore_fast.errors import CheckpointError

# Per masked token, in nats: rounding of sums in another order, with room.
TOLERANCE = {torch.bfloat16: 0.03, torch.float16: 0.01}
FLOAT32_TOLERANCE = 1e-4


def check_packing(runner: Runner, attention: Attention) -> None:
    """Score three short sequences of unequal lengths together and alone, under one attention pattern.

    A network that lets padding or neighbours leak in, or that turns out NaN, fails here and not in somebody's table.

    Raises
    ------
    CheckpointError
        If a log-probability is not finite, or depends on the neighbours.
    """
    spec = runner.backbone.spec
    generator = np.random.default_rng(0)
    contexts = [generator.integers(0, spec.vocab_size, size, dtype=np.int32) for size in (9, 4)]
    targets = [generator.integers(0, spec.vocab_size, size, dtype=np.int32) for size in (5, 2, 8)]
    context_of = [0, 1, 0]

    def log_probs(chosen: list[int]) -> np.ndarray:
        sequences = Sequences.build(contexts, np.array([context_of[i] for i in chosen]), [targets[i] for i in chosen])
        lengths = sequences.target_lengths
        index = np.arange(len(chosen))
        first = np.zeros(int(lengths.sum()), dtype=bool)
        first[sequences.target_offsets[:-1]] = True
        if attention.name == "block":
            plan = MaskPlan(index, np.zeros_like(index), np.ones_like(index), np.ones(len(index), dtype=bool))
        else:
            plan = MaskPlan(index, np.zeros_like(index), lengths, first)
        return runner.run(*compose(spec, attention, sequences, plan), attention)

    together = log_probs([0, 1, 2])
    alone = np.concatenate([log_probs([i]) for i in range(3)])
    tolerance = TOLERANCE.get(runner.backbone.dtype, FLOAT32_TOLERANCE)
    if not np.isfinite(together).all():
        raise CheckpointError(
            f"model {spec.name!r} gives log-probabilities that are not finite; are its weights sound?"
        )
    moved = np.abs(together - alone).max()
    if moved > tolerance:
        raise CheckpointError(
            f"model {spec.name!r}: a log-probability moves by {moved:.3g} nats with the sequences beside it; "
            "its attention lets them leak in"
        )
