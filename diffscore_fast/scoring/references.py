"""Several references per candidate: one scored pair per reference, and one row made of the pairs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from diffscore_fast.engine.ragged import offsets_of, segment_ids
from diffscore_fast.options import Aggregate
from diffscore_fast.scoring.table import ScoreTable, TokenScores
from diffscore_fast.status import SCORED, SKIPPED_REFERENCE, TRUNCATED_SOURCE


def expand(rows: Sequence[tuple[Any, Any]]) -> tuple[list[tuple[Any, Any]], np.ndarray]:
    """(references, candidate) rows as (reference, candidate) pairs; row i has pairs offsets[i] .. offsets[i + 1].

    `listed` says what a row's references may be.
    """
    lists = [listed(references) for references, _ in rows]
    pairs = [(item, row[1]) for row, items in zip(rows, lists, strict=True) for item in items]
    return pairs, offsets_of(np.array([len(items) for items in lists], dtype=np.int64))


def aggregate(table: ScoreTable, offsets: np.ndarray, how: Aggregate) -> ScoreTable:
    """The pairs of each row as one row.

    A reference that cannot be scored is left out; the status of the row is then "skipped_reference". If no reference
    is left, the row has the status of its first pair.

    `max` takes everything from the pair with the largest score. Its standard error does not account for the choice.

    `mean` averages over the pairs. In `reverse` each reference is scored under its own masks, so the errors of
    different references are independent. In other directions all pairs are scored under the candidate's masks, and the
    standard error is the mean of their errors: exact if the masks move all scores alike, else an upper bound.
    """
    scored = np.array([state in SCORED for state in table.status], dtype=bool)
    scores = np.where(scored, table.scores, -np.inf)
    best = np.array([start + int(np.argmax(scores[start:stop])) for start, stop in _slices(offsets)], dtype=np.int64)
    out = table.take(best)
    if how == "max":
        out = replace(out, reference=np.where(scored[best], best - offsets[:-1], -1))
    else:
        out = _mean(table, offsets, scored, out)
    states, messages = list(out.status), list(out.messages)
    for row, (start, stop) in enumerate(_slices(offsets)):
        left_out = [pair for pair in range(start, stop) if not scored[pair]]
        if len(left_out) == stop - start:
            continue
        # Say what the score does not show: references that were left out, or cut.
        cut = [pair for pair in range(start, stop) if table.status[pair] == TRUNCATED_SOURCE]
        if left_out or cut:
            states[row] = SKIPPED_REFERENCE if left_out else TRUNCATED_SOURCE
            noted = sorted([*left_out, *cut])
            messages[row] = "; ".join(f"reference {pair - start}: {table.messages[pair]}" for pair in noted)
    return replace(out, status=states, messages=messages)


def listed(references: Any) -> list[Any]:
    """The references of a row: a list, or any other value as one reference. An empty list is one missing reference."""
    if isinstance(references, list | tuple | np.ndarray):
        return list(references) or [None]
    return [references]


def _slices(offsets: np.ndarray) -> list[tuple[int, int]]:
    """(start, stop) of the pairs of each row."""
    return list(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True))


def _mean(table: ScoreTable, offsets: np.ndarray, scored: np.ndarray, first: ScoreTable) -> ScoreTable:
    """The mean over the scored pairs of each row; all else is that of `first`, which has one pair per row."""
    owner, count = segment_ids(np.diff(offsets))[scored], len(offsets) - 1
    used = np.bincount(owner, minlength=count)

    def mean(values: np.ndarray) -> np.ndarray:
        sums = np.zeros((count, *values.shape[1:]))
        np.add.at(sums, owner, values[scored])
        divisor = used.reshape((count,) + (1,) * (values.ndim - 1))
        return np.divide(sums, divisor, out=np.full_like(sums, np.nan), where=divisor > 0)

    def total(values: np.ndarray) -> np.ndarray:
        return np.bincount(owner, weights=values[scored], minlength=count).astype(np.int64)

    def largest(values: np.ndarray) -> np.ndarray:
        out = np.zeros(count, dtype=np.int64)
        np.maximum.at(out, owner, values[scored])
        return out

    stderr = mean(table.stderr)
    if table.signature.direction == "reverse":
        for row, (start, stop) in enumerate(_slices(offsets)):
            # References with equal tokens have equal masks, so their errors are equal, not independent.
            alike = Counter(
                (float(table.scores[pair]), float(table.stderr[pair])) for pair in range(start, stop) if scored[pair]
            )
            variance = sum((times * error) ** 2 for (_, error), times in alike.items())
            stderr[row] = np.sqrt(variance) / used[row] if used[row] else np.nan
    return replace(
        first,
        scores=mean(table.scores),
        stderr=stderr,
        profile=mean(table.profile),
        num_tokens=total(table.num_tokens),
        truncated_tokens=total(table.truncated_tokens),
        num_draws=largest(table.num_draws),
        full_draws=largest(table.full_draws),
        tokens=_mean_tokens(table, offsets, scored),
    )


def _mean_tokens(table: ScoreTable, offsets: np.ndarray, scored: np.ndarray) -> TokenScores | None:
    """Token scores averaged over the pairs of each row, which all score the same candidate."""
    if table.tokens is None:
        return None
    parts = []
    for start, stop in _slices(offsets):
        pairs = [pair for pair in range(start, stop) if scored[pair]]
        first = table.tokens.take(np.array(pairs[:1] or [start]))
        if pairs:
            every = table.tokens.take(np.array(pairs))
            mean = every.log_probs.reshape(len(pairs), -1).mean(axis=0)
            first = replace(first, log_probs=mean, counts=every.counts.reshape(len(pairs), -1).sum(axis=0))
        parts.append(first)
    return TokenScores.join(parts) if parts else TokenScores.none(0)
