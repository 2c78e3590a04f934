"""A loaded model checks itself: its scores must not depend on what is packed beside them."""

from __future__ import annotations

import numpy as np

from diffscore_fast.engine.runner import Runner
from diffscore_fast.engine.windows import Attention, MaskPlan, Sequences, compose
from diffscore_fast.errors import CheckpointError

TOLERANCE = 1e-4  # nats a masked token, float32: rounding of sums in another order, with room


def check_packing(runner: Runner, attention: Attention) -> None:
    """Score three short sequences of unequal lengths together and alone, under one attention pattern.

    In 16 bits, where a GPU's products round by how many rows they have, each is scored beside others of unchanged
    lengths with other tokens in them.

    A network that lets padding or neighbours leak in, or that turns out NaN, fails here and not in somebody's table.

    Raises
    ------
    CheckpointError
        If a log-probability is not finite, or depends on the neighbours.
    """
    spec = runner.backbone.spec
    generator = np.random.default_rng(0)
    context_of = [0, 1, 0]

    def tokens(sizes: tuple[int, ...]) -> list[np.ndarray]:
        return [generator.integers(0, spec.vocab_size, size, dtype=np.int32) for size in sizes]

    contexts, targets = tokens((9, 4)), tokens((5, 2, 8))
    other_contexts, other_targets = tokens((9, 4)), tokens((5, 2, 8))

    def log_probs(chosen: list[int], kept: int | None = None) -> np.ndarray:
        """Of the first token of each; `kept`: of all sequences that one alone has its tokens."""
        before = [
            item if kept is None or context_of[kept] == i else other_contexts[i] for i, item in enumerate(contexts)
        ]
        after = [item if kept in (None, i) else other_targets[i] for i, item in enumerate(targets)]
        sequences = Sequences.build(before, np.array([context_of[i] for i in chosen]), [after[i] for i in chosen])
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
    if runner.backbone.dtype.itemsize < 4:
        alone = np.array([log_probs([0, 1, 2], kept=i)[i] for i in range(3)])
    else:
        alone = np.concatenate([log_probs([i]) for i in range(3)])
    if not np.isfinite(together).all():
        raise CheckpointError(
            f"model {spec.name!r} gives log-probabilities that are not finite; are its weights sound?"
        )
    moved = np.abs(together - alone).max()
    if moved > TOLERANCE:
        raise CheckpointError(
            f"model {spec.name!r}: a log-probability moves by {moved:.3g} nats with the sequences beside it; "
            "its attention lets them leak in"
        )
