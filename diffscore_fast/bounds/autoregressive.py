"""The autoregressive likelihood of a block model: the same network at block size 1."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from diffscore_fast.bounds.orders import Generation
from diffscore_fast.bounds.states import Lattice, cut_blocks, plan_states
from diffscore_fast.engine.plan import AttentionPattern, Sequences
from diffscore_fast.engine.ragged import offsets_of
from diffscore_fast.engine.runner import Runner
from diffscore_fast.engine.windows import compose


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


@dataclass(frozen=True)
class LeftToRight:
    """A text of L tokens read from left to right, and the token that follows it.

    Parameters
    ----------
    log_probs : float64 [L]
        log p(token | the tokens before it); they sum to log p(text).
    best : int32 [L + 1]
        The most probable token at each place, the last of them after the text.
    best_log_probs : float64 [L + 1]
    """

    log_probs: np.ndarray
    best: np.ndarray
    best_log_probs: np.ndarray


def left_to_right(
    runner: Runner, texts: list[np.ndarray], progress: Callable[[int], None] | None = None
) -> list[LeftToRight]:
    """Read texts of token ids by the network at block size 1.

    Parameters
    ----------
    runner : Runner
    texts : list of int32 [L]
        Without the start token. There is room for one more token.
    progress : callable, optional
        As for `Runner.evaluate`.

    Raises
    ------
    UnsupportedPatternError
        If the model was not trained at block size 1.
    """
    spec, pattern = runner.backbone.spec, AttentionPattern("block", 1)
    spec.pattern("block", 1)
    extended = [np.append(ids, 0).astype(np.int32) for ids in texts]  # a place for the token after the text
    sequences = Sequences.build([np.zeros(0, np.int32)], np.zeros(len(texts), np.int64), extended)
    singles = cut_blocks(sequences.target_lengths, 1, spec.start_in_block(1))
    every = np.arange(len(singles.lengths))
    plan = plan_states(singles, every, np.zeros_like(every), np.ones((len(every), 1), bool))
    prefixes, windows = compose(spec, pattern, sequences, plan)
    best = runner.best(prefixes, windows, pattern, progress)
    best_log_probs = runner.run(prefixes, replace(windows, targets=best), pattern, progress).astype(np.float64)
    log_probs = runner.run(prefixes, windows, pattern, progress).astype(np.float64)
    found: list[LeftToRight] = []
    offsets = offsets_of(sequences.target_lengths)
    for first, last in zip(offsets[:-1], offsets[1:], strict=True):
        own, top, top_log_probs = (values[first:last].copy() for values in (log_probs, best, best_log_probs))
        own = own[:-1]
        # Logits that differ by rounding alone: the text's own token is then as probable as the best one.
        above = np.flatnonzero(own > top_log_probs[:-1])
        top[above], top_log_probs[above] = extended[len(found)][above], own[above]
        found.append(LeftToRight(own, top, top_log_probs))
    return found
