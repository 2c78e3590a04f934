"""`diffscore score`: a file of rows to the same file with scores."""

from __future__ import annotations

import math
import os
import statistics
import time
from array import array
from collections import Counter, deque
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from diffscore_fast.errors import InputError
from diffscore_fast.estimators.masks import MaskDesign
from diffscore_fast.estimators.reconstruction import ReconstructionConfig
from diffscore_fast.io.jsonl import STANDARD_STREAM, JsonlReader, JsonlWriter, Record
from diffscore_fast.results import SCORED, TOO_LONG, InvalidRecord, ScoreTable
from diffscore_fast.scorer import DiffScorer, ScoreConfig

RECORDS_LOOKED_AT = 100  # for column names, before the model is loaded


def run_score(input_path: str, output_path: str, model: str, options: dict[str, Any]) -> bool:
    """Score a file. Everything that can be refused is refused before the model runs.

    Returns
    -------
    bool
        Whether some row failed.

    Raises
    ------
    DiffScoreError
        If the options, the input, the output or the model cannot be used.
    """
    config = _config(options)
    columns = options["source_column"] if config.needs_source else None, options["candidate_column"]
    names = {name: options["output_prefix"] + name for name in _added_fields(options, config)}
    reader = JsonlReader(input_path)
    if input_path != STANDARD_STREAM and os.path.exists(output_path) and os.path.samefile(input_path, output_path):
        raise InputError(f"output {output_path} is the input file itself; name another")
    records = _checked_records(reader, columns, set(names.values()))
    writer = JsonlWriter(output_path)
    try:
        scorer = DiffScorer(model, token_budget=options["token_budget"])
        if options["attention"] is None:
            config = _config({**options, "attention": scorer.spec.default_pattern})
        scorer.spec.pattern(config.attention)
    except BaseException:
        partial = writer.abandon()
        if partial is not None:
            partial.unlink()
        raise
    run = _Run(reader, writer, config, names, columns, options)
    try:
        run.score(scorer, records)
        writer.finish()
    except BaseException as error:
        partial = writer.abandon()
        if partial is not None:
            run.errors.print(f"stopped ({type(error).__name__}): {len(run.scores) + run.unscored} finished rows are in "
                             f"{partial}", soft_wrap=True, highlight=False)  # fmt: skip
        raise
    if not options["quiet"]:
        run.print_summary(scorer)
    return run.failed > 0


class _Run:
    """What one run counts, and how it shows it."""

    def __init__(self, reader: JsonlReader, writer: JsonlWriter, config: ScoreConfig, names: dict[str, str],
                 columns: tuple[str | None, str], options: dict[str, Any]) -> None:  # fmt: skip
        self._reader, self._writer, self._config = reader, writer, config
        self._names, self._columns, self._options = names, columns, options
        self._added = set(names.values())
        self.errors = Console(stderr=True)
        self.statuses: Counter[str] = Counter()
        self.scores = array("d")
        self.tokens = self._evaluated = 0
        self._shown: list[tuple[str, float, float]] = []
        self._started = time.perf_counter()

    @property
    def unscored(self) -> int:
        return sum(count for status, count in self.statuses.items() if status not in SCORED)

    @property
    def failed(self) -> int:
        """Rows without a score that no policy excuses."""
        return self.unscored - (self.statuses[TOO_LONG] if self._config.overlength == "skip" else 0)

    def score(self, scorer: DiffScorer, records: Iterator[Record]) -> None:
        waiting: deque[Record] = deque()

        def rows() -> Iterator[tuple[Any, Any]]:
            for record in records:
                waiting.append(record)
                yield self._texts(record)

        columns = TextColumn("{task.fields[shown]}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %")
        with Progress(*columns, TimeRemainingColumn(), console=self.errors, transient=True,
                      disable=self._options["quiet"] or not self.errors.is_terminal) as bar:  # fmt: skip
            task = bar.add_task("", total=self._reader.size, shown="scoring")

            def advance(tokens: int) -> None:
                self._evaluated += tokens
                rate = self._evaluated / (time.perf_counter() - self._started)
                bar.update(task, shown=f"{self._evaluated:,} tokens, {rate:,.0f}/s")

            for table in scorer.score_batches(rows(), self._config, advance):
                for index in range(len(table)):
                    self._write(waiting.popleft(), table, index)
                self._writer.flush()
                bar.update(task, completed=self._reader.bytes_read)

    def _texts(self, record: Record) -> tuple[Any, Any]:
        if record.fields is None:
            return None, InvalidRecord(record.problem)
        clash = self._added & record.fields.keys()
        if clash:
            return None, InvalidRecord(f"line {record.line} has a field {sorted(clash)[0]!r}, which is to be added")
        source, candidate = self._columns
        return None if source is None else record.fields.get(source), record.fields.get(candidate)

    def _write(self, record: Record, table: ScoreTable, row: int) -> None:
        status, scored = table.status[row], table.status[row] in SCORED
        self.statuses[status] += 1
        if scored:
            self.scores.append(table.scores[row])
            self.tokens += int(table.num_tokens[row])
        if len(self._shown) < self._options["show"]:
            text = "" if record.fields is None else record.fields.get(self._columns[1])
            self._shown.append((f"{text}", float(table.scores[row]), float(table.stderr[row])))
        values: dict[str, Any] = {
            "score": _number(table.scores[row]),
            "stderr": _number(table.stderr[row]),
            "tokens": int(table.num_tokens[row]),
            "status": status,
            "message": table.messages[row],
            "truncated_tokens": int(table.truncated_tokens[row]),
            "profile": _profile(table, row) if scored else None,
            "token_scores": _tokens(table, row) if scored else None,
        }
        fields = {shown: values[name] for name, shown in self._names.items()}
        if not values["message"]:
            del fields[self._names["message"]]
        self._writer.write(record, fields)

    def print_summary(self, scorer: DiffScorer) -> None:
        console = Console(stderr=self._writer.path == STANDARD_STREAM)
        seconds = time.perf_counter() - self._started
        if self._shown:
            table = Table(title=f"first {len(self._shown)} rows")
            table.add_column("candidate", no_wrap=True, overflow="ellipsis", max_width=56)
            table.add_column("score", justify="right")
            table.add_column("± s.e.", justify="right")
            for text, value, error in self._shown:
                table.add_row(
                    Text(" ".join(text[:400].split())), f"{value:.3f}", "" if math.isnan(error) else f"{error:.3f}"
                )
            console.print(table)
        table = Table(show_header=False, title="summary")
        for status, count in sorted(self.statuses.items(), key=lambda item: (item[0] not in SCORED, item[0])):
            table.add_row(f"rows {status}", f"{count:,}")
        if not self.statuses:
            table.add_row("rows", "0")
        if self._reader.blank_lines:
            table.add_row("blank lines passed over", f"{self._reader.blank_lines:,}")
        if self.scores:
            table.add_row("mean score", f"{statistics.fmean(self.scores):.4f} nats a token")
            table.add_row("median score", f"{statistics.median(self.scores):.4f}")
            table.add_row("tokens scored", f"{self.tokens:,}")
            table.add_row("tokens evaluated", f"{self._evaluated:,} ({self._evaluated / seconds:,.0f} a second)")
        table.add_row("time", f"{seconds:.1f} s")
        console.print(table)
        console.print(f"signature {scorer.signature(self._config)}", soft_wrap=True, highlight=False, markup=False)


def _config(options: dict[str, Any]) -> ScoreConfig:
    design = MaskDesign(options["draws"], options["mask_ratios"], options["masking"], options["levels"],
                        options["replicates"])  # fmt: skip
    weights = None
    if options["level_weights"] is not None:
        try:
            weights = tuple(float(item) for item in options["level_weights"].split(","))
        except ValueError:
            raise InputError(f"--level-weights {options['level_weights']!r}: not comma-separated numbers") from None
    return ScoreConfig(
        options["direction"], ReconstructionConfig(options["estimator"], design, weights), options["alpha"],
        options["seed"], options["attention"] or "prefix", options["overlength"], options["tokens"],
    )  # fmt: skip


def _added_fields(options: dict[str, Any], config: ScoreConfig) -> list[str]:
    fields = ["score", "stderr", "tokens", "status", "message"]
    if config.overlength == "truncate-source":
        fields.append("truncated_tokens")
    if options["profile"]:
        fields.append("profile")
    if options["tokens"]:
        fields.append("token_scores")
    return fields


def _checked_records(reader: JsonlReader, columns: tuple[str | None, str], added: set[str]) -> Iterator[Record]:
    """The records, after a look at the first ones for columns that are nowhere and names that are taken."""
    records = iter(reader)
    head = list(islice(records, RECORDS_LOOKED_AT))
    present = dict.fromkeys(key for record in head if record.fields is not None for key in record.fields)
    if present:
        for option, column in (("--source-column", columns[0]), ("--candidate-column", columns[1])):
            if column is not None and column not in present:
                known = ", ".join(present)
                raise InputError(f"{reader.path} has no field {column!r}; it has: {known}. Name one with {option}")
        taken = sorted(added & present.keys())
        if taken:
            raise InputError(
                f"{reader.path} already has the field {', '.join(taken)}; give --output-prefix to add others, such as "
                "--output-prefix diffscore_"
            )
    return chain(head, records)


def _number(value: float) -> float | None:
    """A JSON number, or null: a row without a score must not look like a perfect one."""
    return None if math.isnan(value) else float(value)


def _profile(table: ScoreTable, row: int) -> dict[str, float | None]:
    return {f"{ratio:g}": _number(value) for ratio, value in zip(table.profile_ratios, table.profile[row], strict=True)}


def _tokens(table: ScoreTable, row: int) -> list[list[float | int | None]] | None:
    if table.tokens is None:
        return None
    owned = range(int(table.tokens.offsets[row]), int(table.tokens.offsets[row + 1]))
    return [[*map(int, table.tokens.spans[at]), _number(table.tokens.log_probs[at])] for at in owned]
