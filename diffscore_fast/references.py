"""Several references a candidate: one scored pair a reference, and one row made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from diffscore_fast.engine.ragged import offsets_of, segment_ids
from diffscore_fast.results import SCORED, SKIPPED_REFERENCE, ScoreTable, TokenScores, standard_error

Aggregate = Literal["max", "mean"]

AGGREGATES = ("max", "mean")


def expand(rows: Sequence[tuple[Any, Any]]) -> tuple[list[tuple[Any, Any]], np.ndarray]:
    """(references, candidate) rows as (reference, candidate) pairs; row i owns pairs offsets[i] .. offsets[i + 1].

    What is no list is one reference, whatever it is; an empty list is one that is missing.
    """
    lists = [_listed(references) for references, _ in rows]
    pairs = [(item, row[1]) for row, items in zip(rows, lists, strict=True) for item in items]
    return pairs, offsets_of(np.array([len(items) for items in lists], dtype=np.int64))


def aggregate(table: ScoreTable, offsets: np.ndarray, how: Aggregate) -> ScoreTable:
    """One row for the pairs of each row.

    A reference that cannot be scored is left out; the row's status is then "skipped_reference", or, where none is left,
    that of its first pair. `max` takes everything from the best pair, its standard error too, which knows nothing of
    the choice. `mean` averages replicate by replicate, so that its standard error counts the masks that references
    share.
    """
    status = np.array([state in SCORED for state in table.status], dtype=bool)
    scores = np.where(status, table.scores, -np.inf)
    first, count = offsets[:-1], len(offsets) - 1
    best = np.array([start + int(np.argmax(scores[start:stop])) for start, stop in _slices(offsets)], dtype=np.int64)
    if how == "max":
        chosen = table.take(best)
        out = replace(chosen, reference=np.where(status[best], best - first, -1))
    else:
        out = _mean(table, offsets, status, best)
    states, messages = list(out.status), list(out.messages)
    for row, (start, stop) in enumerate(_slices(offsets)):
        left_out = [pair for pair in range(start, stop) if not status[pair]]
        if not left_out:
            continue
        if len(left_out) < stop - start:
            states[row] = SKIPPED_REFERENCE
            messages[row] = "; ".join(f"reference {pair - start}: {table.messages[pair]}" for pair in left_out)
        else:
            states[row], messages[row] = table.status[start], table.messages[start]
    assert len(states) == count
    return replace(out, status=states, messages=messages)


def _listed(references: Any) -> list[Any]:
    if isinstance(references, list | tuple | np.ndarray):
        return list(references) or [None]
    return [references]


def _slices(offsets: np.ndarray) -> list[tuple[int, int]]:
    return list(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True))


def _mean(table: ScoreTable, offsets: np.ndarray, scored: np.ndarray, any_pair: np.ndarray) -> ScoreTable:
    owner, count = segment_ids(np.diff(offsets))[scored], len(offsets) - 1
    used = np.bincount(owner, minlength=count)

    def mean(values: np.ndarray) -> np.ndarray:
        sums = np.zeros((count, *values.shape[1:]))
        np.add.at(sums, owner, values[scored])
        shape = (count,) + (1,) * (values.ndim - 1)
        return np.divide(sums, used.reshape(shape), out=np.full_like(sums, np.nan), where=used.reshape(shape) > 0)

    def total(values: np.ndarray) -> np.ndarray:
        return np.bincount(owner, weights=values[scored], minlength=count).astype(np.int64)

    replicates = mean(table.replicate_scores)
    return replace(
        table.take(any_pair), scores=mean(table.scores), stderr=standard_error(replicates),
        replicate_scores=replicates, profile=mean(table.profile), num_tokens=total(table.num_tokens),
        truncated_tokens=total(table.truncated_tokens), tokens=_mean_tokens(table, offsets, scored),
    )  # fmt: skip


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
