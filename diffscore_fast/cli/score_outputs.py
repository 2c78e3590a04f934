"""What `diffscore score` shows of all rows: the summary, and the heat map of the first."""

from __future__ import annotations

import math
from array import array
from pathlib import Path

import numpy as np
from rich.table import Table
from rich.text import Text

from diffscore_fast.cli.console import Console
from diffscore_fast.io.record import Record
from diffscore_fast.scoring.heatmap import PAGE_ROWS, TERMINAL_ROWS, heatmap_html, heatmap_terminal, printable
from diffscore_fast.scoring.table import ScoreTable
from diffscore_fast.status import SCORED

TO_TERMINAL = "-"
MAX_TEXT = 400  # characters of a candidate that --show prints


class Summary:
    """The first rows of a run for --show, and a few numbers of all rows."""

    def __init__(self, show: int, column: str) -> None:
        self._show, self._column = show, column
        self._scores = array("d")  # 8 bytes per row; a list of floats would take 40
        self._tokens = 0
        self.first_rows = Table(title="first rows")
        self.first_rows.add_column("candidate", no_wrap=True, overflow="ellipsis", max_width=56)
        self.first_rows.add_column("score", justify="right")
        self.first_rows.add_column("± s.e.", justify="right")

    def add(self, record: Record, table: ScoreTable, row: int) -> None:
        """Add a row, scored or not."""
        if table.status[row] in SCORED:
            self.add_scored(table.scores[row], int(table.num_tokens[row]))
        if self.first_rows.row_count < self._show:
            text = "" if record.fields is None else str(record.fields.get(self._column))[:MAX_TEXT]
            numbers = ("" if math.isnan(item) else f"{item:.3f}" for item in (table.scores[row], table.stderr[row]))
            self.first_rows.add_row(Text(printable(" ".join(text.split()))), *numbers)

    def add_scored(self, score: float, tokens: int) -> None:
        """Add a row that an earlier run has scored."""
        self._scores.append(score)
        self._tokens += tokens

    def lines(self, kind: str) -> list[tuple[str, str]]:
        """Lines of the summary."""
        if not self._scores:
            return []
        values = np.frombuffer(self._scores)
        return [
            ("mean score", f"{values.mean():.4f} nats per token ({kind})"),
            ("median score", f"{np.median(values):.4f}"),
            ("tokens scored", f"{self._tokens:,}"),
        ]


class HeatMap:
    """Keeps the first rows of a run for the heat map; without a path it does nothing.

    Parameters
    ----------
    path : str or None
        The page; `TO_TERMINAL` prints to the terminal.
    column : str
        Field of the scored texts.
    """

    def __init__(self, path: str | None, column: str) -> None:
        self._path, self._column = path, column
        self._texts: list[str | None] = []
        self._tables: list[ScoreTable] = []
        self._max_rows = TERMINAL_ROWS if self._path == TO_TERMINAL else PAGE_ROWS

    def add(self, record: Record, table: ScoreTable, row: int) -> None:
        """Keep a row, if it is one of the first."""
        if self._path is None or len(self._texts) == self._max_rows:
            return
        text = None if record.fields is None else record.fields.get(self._column)
        if isinstance(text, list) and table.reference is not None and table.reference[row] >= 0:
            text = text[table.reference[row]]
        self._texts.append(text if isinstance(text, str) else None)
        self._tables.append(table.take([row]))

    def write(self, rows_in_all: int) -> None:
        """Write the page, if --heatmap names a file."""
        if self._path not in (None, TO_TERMINAL) and self._tables:
            page = heatmap_html(self._texts, ScoreTable.join(self._tables), rows_in_all=rows_in_all)
            Path(self._path).write_text(page, encoding="utf-8", errors="replace")

    def show(self, rows_in_all: int, *, to_stderr: bool) -> None:
        """Print the heat map, if --heatmap is '-'."""
        if self._path == TO_TERMINAL and self._tables:
            table = ScoreTable.join(self._tables)
            Console(stderr=to_stderr).print(heatmap_terminal(self._texts, table, rows_in_all=rows_in_all))
