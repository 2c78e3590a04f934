"""A check of a loaded model: its scores must not depend on what is packed beside them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from diffscore_fast import ops
from diffscore_fast.engine.plan import AttentionPattern, MaskPlan, Sequences
from diffscore_fast.engine.runner import Runner
from diffscore_fast.engine.windows import compose
from diffscore_fast.errors import CheckpointError

TOLERANCE = 1e-4  # nats per token in float32: sums in another order round otherwise; with a margin
# Nats per token in 16 bits, where a GPU's rounding depends on the number of rows: states keep 8 bits, and the error
# grows over layers.
TOLERANCE_16_BITS = 0.5
# Twelve sequences. The first four are watched; the others are scored beside them.
CONTEXT_OF = (0, 1, 0, 2, 0, 0, 1, 1, 2, 2, 0, 1)
CONTEXT_SIZES, TARGET_SIZES = (9, 4, 1), (5, 2, 8, 1, 3, 7, 1, 4, 6, 2, 8, 5)
WATCHED = (0, 1, 2, 3)


def check_packing(runner: Runner, attention: AttentionPattern) -> None:
    """Score four short sequences of unequal lengths together, alone, and beside others, under one attention pattern.

    This package's own networks on a CPU must give the same bits each time, in every dtype; the number of rows covers
    one row to more than a tile. Elsewhere rounding is allowed. In 16 bits, where rounding is coarse, each sequence is
    also scored beside sequences of the same lengths with other tokens, which must not change its score.

    A network whose scores depend on padding or neighbours, or are NaN, fails here, before anything is scored with it.

    Raises
    ------
    CheckpointError
        If a log-probability is not finite, or depends on the neighbours.
    """
    spec = runner.backbone.spec
    generator = np.random.default_rng(0)

    def tokens(sizes: tuple[int, ...]) -> list[np.ndarray]:
        return [generator.integers(0, spec.vocab_size, size, dtype=np.int32) for size in sizes]

    contexts, targets = tokens(CONTEXT_SIZES), tokens(TARGET_SIZES)
    other_contexts, other_targets = tokens(CONTEXT_SIZES), tokens(TARGET_SIZES)

    def log_probs(chosen: Sequence[int], kept: int | None = None) -> np.ndarray:
        """Log-prob of each chosen sequence's first token. With `kept`, all other sequences get other tokens."""
        before = [
            item if kept is None or CONTEXT_OF[kept] == i else other_contexts[i] for i, item in enumerate(contexts)
        ]
        after = [item if kept in (None, i) else other_targets[i] for i, item in enumerate(targets)]
        sequences = Sequences.build(before, np.array([CONTEXT_OF[i] for i in chosen]), [after[i] for i in chosen])
        lengths = sequences.target_lengths
        index = np.arange(len(chosen))
        first = np.zeros(int(lengths.sum()), dtype=bool)
        first[sequences.target_offsets[:-1]] = True
        if attention.name == "block":
            plan = MaskPlan(index, np.zeros_like(index), np.ones_like(index), np.ones(len(index), dtype=bool))
        else:
            plan = MaskPlan(index, np.zeros_like(index), lengths, first)
        return runner.run(*compose(spec, attention, sequences, plan), attention)

    together = log_probs(WATCHED)
    if not np.isfinite(together).all():
        raise CheckpointError(
            f"model {spec.name!r} gives log-probabilities that are not finite; check its weights, or use another dtype"
        )
    # Many libraries multiply a single row by another kernel; beside others, rows lie at other places of a tile.
    alone = np.concatenate([log_probs([i]) for i in WATCHED])
    beside = log_probs(range(len(TARGET_SIZES)))[: len(WATCHED)]
    moved = max(np.abs(together - alone).max(), np.abs(together - beside).max())
    allowed = TOLERANCE_16_BITS if runner.backbone.dtype.itemsize < 4 else TOLERANCE
    if allowed == TOLERANCE_16_BITS and moved <= allowed:
        kept = np.array([log_probs(WATCHED, kept=i)[i] for i in WATCHED])
        moved, allowed = np.abs(together - kept).max(), TOLERANCE
    if not moved <= allowed:
        raise CheckpointError(
            f"model {spec.name!r}: a log-probability moves by {moved:.3g} nats with the sequences beside it, so its "
            "scores would depend on the batch; use another model or implementation"
        )
    if is_bitwise(runner) and not (np.array_equal(together, alone) and np.array_equal(together, beside)):
        raise CheckpointError(
            f"model {spec.name!r} in {str(runner.backbone.dtype).removeprefix('torch.')}: the last bits of a "
            "log-probability depend on how many sequences are beside it, which must not happen on a CPU; "
            "score in another --dtype, and report this with the output of `diffscore info`"
        )


def is_bitwise(runner: Runner) -> bool:
    """Whether scores are promised to be the same bit for bit whatever the batch.

    They are for this package's own networks on a CPU with the C++ kernels, or with torch's products in fixed tiles.
    """
    names = runner.implementations
    own_network = ops.LINEAR.name in names
    return own_network and runner.backbone.device.type == "cpu" and set(names.values()) <= {"cpu", "tiles"}
