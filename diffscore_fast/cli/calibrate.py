"""`diffscore calibrate`: attention `prefix` compared with `full` on a sample of the rows of a file."""

from __future__ import annotations

import random
from typing import Any

from rich.table import Table

from diffscore_fast.arguments import check_at_most
from diffscore_fast.cli.console import Console
from diffscore_fast.cli.faults import check_column, say_remarks
from diffscore_fast.cli.model import model_arguments
from diffscore_fast.cli.rows import dialect_options
from diffscore_fast.errors import InputError
from diffscore_fast.io.files import RowReader, open_reader
from diffscore_fast.options import MAX_SAMPLED_ROWS
from diffscore_fast.scoring.calibrate import calibrate
from diffscore_fast.scoring.mask_design import MaskDesign
from diffscore_fast.scoring.scorer import DiffScorer
from diffscore_fast.status import InvalidRecord


def run_calibrate(input_path: str, model: str, options: dict[str, Any]) -> bool:
    """Print the comparison. Returns whether some sampled row could not be scored.

    Raises
    ------
    DiffScoreError
        If the file or the model cannot be used, or no row can be scored.
    """
    columns = options["source_column"], options["candidate_column"]
    MaskDesign(options["draws"], coupling="independent")  # checks the draws before anything is read
    check_at_most("--rows", options["rows"], MAX_SAMPLED_ROWS)
    dialect = dialect_options(options)
    reader = open_reader(input_path, options["input_format"], dialect)
    dialect.check_used(reader.format)
    rows = _sample(reader, columns, options["rows"], options["seed"])
    scorer = DiffScorer(model, **model_arguments(options))
    say_remarks(reader)
    comparisons = calibrate(
        scorer, *([row[side] for row in rows] for side in (0, 1)), draws=options["draws"], seed=options["seed"]
    )
    if not comparisons[0].rows:
        raise InputError(f"none of {len(rows)} rows of {input_path} can be scored under both prefix and full")
    table = Table(title=f"prefix - full, nats per token, {comparisons[0].rows} of {len(rows)} rows")
    for name in ("", "rows", "rank correlation", "mean difference", "worst difference"):
        table.add_column(name, justify="right" if name else "left")
    for item in comparisons:
        values = f"{item.rank_correlation:.3f}", f"{item.mean_difference:+.3f}", f"{item.worst_difference:+.3f}"
        table.add_row(item.label, str(item.rows), *("" if value.endswith("nan") else value for value in values))
    Console().print(table)
    return comparisons[0].rows < len(rows)


def _sample(reader: RowReader, columns: tuple[str, str], count: int, seed: int) -> list[tuple[Any, Any]]:
    """A random sample of up to `count` rows, in constant memory (reservoir sampling)."""
    if count < 1:
        raise InputError(f"--rows must be at least 1, not {count}")
    generator = random.Random(seed)
    kept: list[tuple[Any, Any]] = []
    present: dict[str, None] = {}
    for seen, record in enumerate(reader, 1):
        fields = record.fields
        if fields is None:
            row: tuple[Any, Any] = (InvalidRecord(record.problem),) * 2
        else:
            present.update(dict.fromkeys(fields))
            row = fields.get(columns[0]), fields.get(columns[1])
        place = len(kept) if len(kept) < count else generator.randrange(seen)
        if place < count:
            kept[place : place + 1] = [row]
    for option, column in zip(("--source-column", "--candidate-column"), columns, strict=True):
        if present:
            check_column(reader.path, present, column, option)
    return kept
