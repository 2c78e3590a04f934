"""Several references a candidate: one scored pair a reference, and one row made of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from diffscore_fast.engine.ragged import offsets_of, segment_ids
from diffscore_fast.scoring.table import ScoreTable, TokenScores
from diffscore_fast.status import SCORED, SKIPPED_REFERENCE, TRUNCATED_SOURCE

Aggregate = Literal["max", "mean"]

AGGREGATES = ("max", "mean")


def expand(rows: Sequence[tuple[Any, Any]]) -> tuple[list[tuple[Any, Any]], np.ndarray]:
    """(references, candidate) rows as (reference, candidate) pairs; row i owns pairs offsets[i] .. offsets[i + 1].

    See `listed`.
    """
    lists = [listed(references) for references, _ in rows]
    pairs = [(item, row[1]) for row, items in zip(rows, lists, strict=True) for item in items]
    return pairs, offsets_of(np.array([len(items) for items in lists], dtype=np.int64))


def aggregate(table: ScoreTable, offsets: np.ndarray, how: Aggregate) -> ScoreTable:
    """One row for the pairs of each row.

    A reference that cannot be scored is left out; the row's status is then "skipped_reference", or, where none is left,
    that of its first pair.

    `max` takes everything from the best pair, its standard error too, which knows nothing of the choice. The standard
    error of a `mean` adds the errors of different references independently in `reverse`, where each is scored under
    masks of its own. In other directions all are scored under the candidate's masks, and it is the mean of the errors:
    what it is where the masks move all scores alike, and else an upper bound.
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
        # What the score does not show must: references left out, or cut before they were averaged or passed over.
        cut = [pair for pair in range(start, stop) if table.status[pair] == TRUNCATED_SOURCE]
        if left_out or cut:
            states[row] = SKIPPED_REFERENCE if left_out else TRUNCATED_SOURCE
            noted = sorted([*left_out, *cut])
            messages[row] = "; ".join(f"reference {pair - start}: {table.messages[pair]}" for pair in noted)
    return replace(out, status=states, messages=messages)


def listed(references: Any) -> list[Any]:
    """A row's references. What is no list is one reference; an empty list is one that is missing."""
    if isinstance(references, list | tuple | np.ndarray):
        return list(references) or [None]
    return [references]


def _slices(offsets: np.ndarray) -> list[tuple[int, int]]:
    return list(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True))


def _mean(table: ScoreTable, offsets: np.ndarray, scored: np.ndarray, first: ScoreTable) -> ScoreTable:
    """The mean over the scored pairs of each row; the rest is that of `first`, one pair a row."""
    owner, count = segment_ids(np.diff(offsets))[scored], len(offsets) - 1
    used = np.bincount(owner, minlength=count)

    def mean(values: np.ndarray) -> np.ndarray:
        sums = np.zeros((count, *values.shape[1:]))
        np.add.at(sums, owner, values[scored])
        divisor = used.reshape((count,) + (1,) * (values.ndim - 1))
        return np.divide(sums, divisor, out=np.full_like(sums, np.nan), where=divisor > 0)

    def total(values: np.ndarray) -> np.ndarray:
        return np.bincount(owner, weights=values[scored], minlength=count).astype(np.int64)

    def most(values: np.ndarray) -> np.ndarray:
        out = np.zeros(count, dtype=np.int64)
        np.maximum.at(out, owner, values[scored])
        return out

    stderr = mean(table.stderr)
    if table.signature.direction == "reverse":
        for row, (start, stop) in enumerate(_slices(offsets)):
            # References of equal tokens have equal masks, and so equal scores with equal errors.
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
        num_draws=most(table.num_draws),
        full_draws=most(table.full_draws),
        tokens=_mean_tokens(table, offsets, scored),
    )


def _mean_tokens(table: ScoreTable, offsets: np.ndarray, scored: np.ndarray) -> TokenScores | None:
    """Token scores averaged over a row's pairs, all of which score the same candidate."""
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
