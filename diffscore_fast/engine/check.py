"""A loaded model checks itself: its scores must not depend on what is packed beside them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from diffscore_fast import ops
from diffscore_fast.engine.plan import AttentionPattern, MaskPlan, Sequences
from diffscore_fast.engine.runner import Runner
from diffscore_fast.engine.windows import compose
from diffscore_fast.errors import CheckpointError

TOLERANCE = 1e-4  # nats a masked token, float32: rounding of sums in another order, with room
# The same in 16 bits, where a GPU rounds by how many rows it multiplies: states keep 8 bits, sums over layers fewer.
ROUNDING = 0.5
CONTEXT_OF = (0, 1, 0, 2, 0, 0, 1, 1, 2, 2, 0, 1)  # of twelve sequences; the last eight are company for the others
CONTEXT_SIZES, TARGET_SIZES = (9, 4, 1), (5, 2, 8, 1, 3, 7, 1, 4, 6, 2, 8, 5)
WATCHED = (0, 1, 2, 3)


def check_packing(runner: Runner, attention: AttentionPattern) -> None:
    """Score four short sequences of unequal lengths together, alone, and with others, under one attention pattern.

    This package's own networks on a CPU must give the same bits each time, in every type; the number of rows then runs
    from one to more than a tile. Elsewhere rounding is allowed. In 16 bits, where that is coarse, each is also scored
    beside others of unchanged lengths with other tokens in them, which must change nothing.

    A network that lets padding or neighbours leak in, or that turns out NaN, fails here and not in somebody's table.

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
        """Of the first token of each; `kept`: of all sequences that one alone has its tokens."""
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
            f"model {spec.name!r} gives log-probabilities that are not finite; are its weights sound?"
        )
    # A single row has kernels of its own in many libraries; in company, rows lie at other places of a tile.
    alone = np.concatenate([log_probs([i]) for i in WATCHED])
    company = log_probs(range(len(TARGET_SIZES)))[: len(WATCHED)]
    moved = max(np.abs(together - alone).max(), np.abs(together - company).max())
    allowed = ROUNDING if runner.backbone.dtype.itemsize < 4 else TOLERANCE
    if allowed == ROUNDING and moved <= ROUNDING:
        kept = np.array([log_probs(WATCHED, kept=i)[i] for i in WATCHED])
        moved, allowed = np.abs(together - kept).max(), TOLERANCE
    if not moved <= allowed:
        raise CheckpointError(
            f"model {spec.name!r}: a log-probability moves by {moved:.3g} nats with the sequences beside it; "
            "its attention lets them leak in"
        )
    if is_bitwise(runner) and not (np.array_equal(together, alone) and np.array_equal(together, company)):
        raise CheckpointError(
            f"model {spec.name!r} in {str(runner.backbone.dtype).removeprefix('torch.')}: the last bits of a "
            "log-probability depend on how many sequences are beside it, which this package excludes on a CPU; "
            "score in another --dtype, and report this with the output of `diffscore info`"
        )


def is_bitwise(runner: Runner) -> bool:
    """Whether scores are promised to be the same bit for bit whatever the batch.

    They are where this package's own networks run by its own kernels on a CPU, products in tiles of torch's included.
    """
    names = runner.implementations
    own_network = ops.LINEAR.name in names
    return own_network and runner.backbone.device.type == "cpu" and set(names.values()) <= {"cpu", "tiles"}
