"""What the queue computes: scores of rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from diffscore_fast.scoring.config import ScoreConfig
from diffscore_fast.scoring.scorer import DiffScorer, row_size
from diffscore_fast.scoring.table import ScoreTable

ScoredRow = tuple[ScoreTable, int]  # a row's place in the table of its batch


@dataclass(frozen=True)
class ScoreWork:
    """Scores of (source, candidate) rows under one configuration; rows as for `DiffScorer.score_batches`."""

    scorer: DiffScorer
    config: ScoreConfig

    def size(self, row: tuple[Any, ...]) -> int:
        """About how many tokens the model reads for a row."""
        return row_size(self.config)(row)

    def run(self, rows: list[Any], progress: Callable[[int], None]) -> list[ScoredRow]:
        """Each row's place in a table."""
        tables = self.scorer.score_batches(rows, self.config, progress)
        return [(table, row) for table in tables for row in range(len(table))]


def table_of(scored: list[ScoredRow]) -> ScoreTable:
    """Rows of several batches as one table, in their order."""
    parts: list[tuple[ScoreTable, list[int]]] = []
    for table, row in scored:
        if not parts or parts[-1][0] is not table:
            parts.append((table, []))
        parts[-1][1].append(row)
    return ScoreTable.join([table.take(np.array(rows)) for table, rows in parts])
