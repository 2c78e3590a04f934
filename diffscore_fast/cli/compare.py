"""`diffscore compare`: two systems, scored alike and compared row by row."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from rich.table import Table
from rich.text import Text

from diffscore_fast.cli.console import Console
from diffscore_fast.cli.faults import check_column, say_remarks
from diffscore_fast.cli.model import model_arguments
from diffscore_fast.cli.rows import dialect_options
from diffscore_fast.cli.score import context_column, make_config
from diffscore_fast.errors import InputError
from diffscore_fast.io.files import open_reader
from diffscore_fast.io.input import STANDARD_STREAM
from diffscore_fast.io.record import Record
from diffscore_fast.scoring.compare import Comparison, check_resampling, compare
from diffscore_fast.scoring.heatmap import printable
from diffscore_fast.scoring.scorer import DiffScorer
from diffscore_fast.scoring.table import ScoreTable
from diffscore_fast.signature import Signature
from diffscore_fast.status import SCORED, TOO_LONG, InvalidRecord

MAX_TEXT = 400  # characters of a candidate that are printed


@dataclass(frozen=True)
class Pairs:
    """Rows of both systems, in pairs.

    Parameters
    ----------
    names : list of str
        Name of each pair: its id, or its line.
    a, b : list of (source, candidate)
        The values, as they are in the files.
    items : list
        What names the item of each pair, whose two candidates share masks.
    unmatched : dict of str to int
        Number of rows without a partner, by reason.
    """

    names: list[str]
    a: list[tuple[Any, Any]]
    b: list[tuple[Any, Any]]
    items: list[Any]
    unmatched: dict[str, int]


def run_compare(input_paths: tuple[str, ...], model: str, options: dict[str, Any]) -> bool:
    """Compare two systems. Returns and raises as `run_file`."""
    check_resampling(options["resamples"], options["confidence"])
    config = replace(make_config({**options, "tokens": False, "heatmap": None}), masks_by_item=True)
    context = next(iter(context_column(options, config).items()), None)
    pairs = _read_pairs(input_paths, context, options)
    arguments = model_arguments(options)
    scorer = DiffScorer(model, **arguments)
    if options["attention"] is None and options["block_size"] is None:
        config = replace(config, attention=scorer.spec.default_pattern)
    config = scorer.complete(config)
    # The two candidates of a source stand together, so that they are in one batch and share the pass over the source.
    sides = zip(pairs.a, pairs.b, pairs.items, strict=True)
    rows = ((*row, item) for a, b, item in sides for row in (a, b))
    tables = list(scorer.score_batches(rows, config))
    if not tables:
        raise InputError("there are no rows to compare")
    table = ScoreTable.join(tables)
    halves = table.take(range(0, len(table), 2)), table.take(range(1, len(table), 2))
    result = compare(*halves, resamples=options["resamples"], confidence=options["confidence"], seed=options["seed"])
    result = replace(result, excluded={**pairs.unmatched, **result.excluded})
    if options["as_json"]:
        about = {
            **result.to_dict(),
            "most_different": _most_different(result, pairs, options["differences"]),
            "kind": table.kind,
            "signature": table.signature.to_dict(),
        }
        print(json.dumps(about, indent=1, allow_nan=False))
    else:
        _print(result, pairs, table.kind, table.signature, options)
    failed = Counter(table.status)
    skipped = failed[TOO_LONG] if config.overlength == "skip" else 0
    return sum(count for status, count in failed.items() if status not in SCORED) - skipped > 0


def _read_pairs(paths: tuple[str, ...], context: tuple[str, str] | None, options: dict[str, Any]) -> Pairs:
    columns, id_column = options["candidate_columns"], options["id_column"]
    if len(paths) > 2 or (len(paths) == 2) == bool(columns):
        raise InputError("give two files, or one file and --candidate-columns A B")
    if paths.count(STANDARD_STREAM) > 1:
        raise InputError("both files are standard input; give one of them a name")
    if len(paths) == 1:
        if id_column is not None:
            raise InputError("--id-column joins two files; one file needs none")
        named = [("--candidate-columns", column) for column in columns]
        named += [] if options["item_column"] is None else [("--item-column", options["item_column"])]
        (records,) = _read(paths[:1], named, context, options)
        a, b = ([_values(record, context, column) for record in records] for column in columns)
        names = [f"line {record.line}" for record in records]
        return Pairs(names, a, b, _items(records, names, context, options), {})
    needed = [("--candidate-column", options["candidate_column"])]
    needed += [] if options["item_column"] is None else [("--item-column", options["item_column"])]
    needed += [] if id_column is None else [("--id-column", id_column)]
    both = _read(paths, needed, context, options)
    unmatched: dict[str, int] = {}
    if id_column is not None:
        both, names, unmatched = _joined(paths, both, id_column)
    elif len(both[0]) != len(both[1]):
        raise InputError(
            f"{paths[0]} has {len(both[0])} rows, {paths[1]} has {len(both[1])}; join them by a field "
            "that both have: --id-column"
        )
    else:
        names = [f"line {record.line}" for record in both[0]]
    a, b = ([_values(record, context, options["candidate_column"]) for record in records] for records in both)
    for one, other, record in zip(a, b, both[0], strict=True):
        read = not any(isinstance(side[0], InvalidRecord) for side in (one, other))
        if context is not None and read and one[0] != other[0]:
            raise InputError(
                f"line {record.line} of {paths[0]} and its partner in {paths[1]} differ in "
                f"{context[1]!r}; both systems must have the same texts there"
            )
    return Pairs(names, a, b, _items(both[0], names, context, options), unmatched)


def _items(
    records: list[Record], names: list[str], context: tuple[str, str] | None, options: dict[str, Any]
) -> list[Any]:
    """The item of each row: the field that the options name; otherwise the source, or the row where none is read."""
    column = options["item_column"]
    if column is None and context is not None and context[0] == "--source-column":
        column = context[1]
    if column is None:
        return list(names)
    return [None if record.fields is None else record.fields.get(column) for record in records]


def _read(
    paths: tuple[str, ...], columns: list[tuple[str, str]], context: tuple[str, str] | None, options: dict[str, Any]
) -> list[list[Record]]:
    """All records of each file. Raises `InputError` if a file lacks a column."""
    dialect = dialect_options(options)
    readers = [open_reader(path, options["input_format"], dialect) for path in paths]
    dialect.check_used(*(reader.format for reader in readers))
    read = []
    for reader in readers:
        records = list(reader)
        present = dict.fromkeys(key for record in records if record.fields is not None for key in record.fields)
        if records and not present:
            raise InputError(f"{reader.path} has no row that can be read: {records[0].problem or 'no fields'}")
        for option, column in columns if context is None else [context, *columns]:
            if present:
                check_column(reader.path, present, column, option)
        say_remarks(reader)
        read.append(records)
    return read


def _values(record: Record, context: tuple[str, str] | None, candidate: str) -> tuple[Any, Any]:
    if record.fields is None:
        return (InvalidRecord(record.problem),) * 2
    return None if context is None else record.fields.get(context[1]), record.fields.get(candidate)


def _joined(
    paths: tuple[str, ...], both: list[list[Record]], column: str
) -> tuple[list[list[Record]], list[str], dict[str, int]]:
    """Records with equal ids in the order of the first file, their ids, and the rows without a partner.

    Ids are compared as text.
    """
    unmatched: dict[str, int] = {}
    by_id: list[dict[str, Record]] = []
    for side, path, records in zip("AB", paths, both, strict=True):
        found: dict[str, Record] = {}
        for record in records:
            value = None if record.fields is None else record.fields.get(column)
            if value is None:
                unmatched[f"{side}: no id"] = unmatched.get(f"{side}: no id", 0) + 1
            elif str(value) in found:
                raise InputError(
                    f"{path}: lines {found[str(value)].line} and {record.line} have the same {column!r}, "
                    f"{value!r}; an id must name one row"
                )
            else:
                found[str(value)] = record
        by_id.append(found)
    common = [name for name in by_id[0] if name in by_id[1]]
    for side, found in zip("AB", by_id, strict=True):
        if len(found) > len(common):
            unmatched[f"only in {side}"] = len(found) - len(common)
    return [[found[name] for name in common] for found in by_id], common, unmatched


def _most_different(result: Comparison, pairs: Pairs, count: int) -> list[dict[str, Any]]:
    rows = [(int(at), int(result.rows[at])) for at in result.most_different(count)]
    return [
        {
            "row": pairs.names[row],
            "difference": float(result.differences[at]),
            "a": pairs.a[row][1],
            "b": pairs.b[row][1],
        }
        for at, row in rows
    ]


def _print(result: Comparison, pairs: Pairs, kind: str, signature: Signature, options: dict[str, Any]) -> None:
    console = Console()
    table = Table(show_header=False, title="A against B")
    table.add_row("rows compared", f"{len(result.rows):,}")
    for reason, count in result.excluded.items():
        table.add_row(f"left out, {reason}", f"{count:,}")
    table.add_row("mean score", f"A {result.mean_a:.4f}, B {result.mean_b:.4f} nats per token ({kind})")
    table.add_row("A - B", f"{result.difference:+.4f}")
    table.add_row(f"{result.confidence:.0%} interval", f"[{result.low:+.4f}, {result.high:+.4f}] (bootstrap over rows)")
    table.add_row("p-value", f"{result.p_value:.4g} (paired permutation, two-sided)")
    table.add_row("rows won", f"A {result.wins_a}, B {result.wins_b}, equal {result.ties}")
    console.print(table)
    rows = _most_different(result, pairs, options["differences"])
    if rows:
        shown = Table(title="rows that differ most", show_lines=True)
        for name in ("row", "A - B", "A", "B"):
            shown.add_column(name)
        for item in rows:
            texts = (Text(printable(" ".join(item[side][:MAX_TEXT].split()))) for side in "ab")
            shown.add_row(Text(printable(item["row"])), f"{item['difference']:+.3f}", *texts)
        console.print(shown)
    console.print(f"signature {signature}", soft_wrap=True, highlight=False, markup=False)
