"""What `score` and `bound` share: a file of rows in, the same rows with new fields out, progress, and a summary."""

from __future__ import annotations

import json
import math
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from diffscore_fast.cli.console import Console
from diffscore_fast.cli.faults import check_column, common_fault, remarks, up_to_usable
from diffscore_fast.cli.summary import print_summary, speed_lines, write_signature
from diffscore_fast.engine.profile import RunProfile, stage, staged
from diffscore_fast.errors import InputError
from diffscore_fast.io.dialect import AUTO, DialectOptions
from diffscore_fast.io.files import open_reader, open_writer
from diffscore_fast.io.input import STANDARD_STREAM
from diffscore_fast.io.journal import Journal
from diffscore_fast.io.output import partial_path, state_path
from diffscore_fast.io.record import FieldType, FileFormat, Record
from diffscore_fast.io.remote import fingerprint, scheme_of
from diffscore_fast.signature import BoundsSignature, Signature
from diffscore_fast.status import SCORED, TOO_LONG, InvalidRecord

PROGRESS_SECONDS = 30.0
RECORDS_LOOKED_AT = 100  # for column names and faults that all rows share, before the model is loaded


@dataclass(frozen=True)
class ShardOfRun:
    """What is different where a file is one of several. To resume one that cannot be resumed is to begin it anew.

    Parameters
    ----------
    label : str
        Stands before its progress.
    when_whole : callable, optional
        Called with the number of rows by status before the output gets its name.
    says_faults : bool
        Whether it is said how the first rows fail; False where that has been said.
    """

    label: str
    when_whole: Callable[[Counter[str]], None] | None = None
    says_faults: bool = True


class FileRun:
    """One run over a file. Opening it checks everything that can be checked before a model is loaded.

    Parameters
    ----------
    input_path, output_path : str
    columns : dict of str to str
        From the name of an option to the column that it names.
    added : mapping of str to FieldType
        Names of the fields that are added, without their prefix, and the types of their values.
    prefix : str
        Prefix of their names.
    quiet : bool
    input_format, output_format : FileFormat or None
        If None, they follow from the names of the files.
    dialect : DialectOptions
        The options for delimited files.
    resume : bool
        Continue after the finished rows of a stopped run.
    progress_seconds : float
        Seconds between progress lines on stderr, if it is no terminal and not `quiet`.
    shard : ShardOfRun, optional
        Where the file is one of several.

    Raises
    ------
    InputError
        If a file cannot be used, a column is missing, or the name of an added field is taken.
    """

    def __init__(
        self,
        input_path: str,
        output_path: str,
        columns: dict[str, str],
        added: Mapping[str, FieldType],
        *,
        prefix: str,
        quiet: bool,
        input_format: FileFormat | None = None,
        output_format: FileFormat | None = None,
        dialect: DialectOptions = AUTO,
        resume: bool = False,
        progress_seconds: float = PROGRESS_SECONDS,
        shard: ShardOfRun | None = None,
    ) -> None:
        self.statuses: Counter[str] = Counter()
        self.evaluated = 0
        self.errors = Console(stderr=True)
        self._columns = list(columns.values())
        self._names = {name: prefix + name for name in added}
        self._added = set(self._names.values())
        self._quiet = quiet
        self._written = self._kept = 0  # rows in the file; those of them that an earlier run wrote
        self._started = self._told = time.perf_counter()
        self._progress_seconds = progress_seconds
        self._label = "" if shard is None else shard.label
        self._begins_anew = shard is not None
        self._when_whole = None if shard is None else shard.when_whole
        self._says_faults = shard is None or shard.says_faults
        self._reader = open_reader(input_path, input_format, dialect)
        is_local = input_path != STANDARD_STREAM and scheme_of(input_path) is None
        for written in (output_path, partial_path(output_path)) if is_local else ():
            if os.path.exists(written) and os.path.samefile(input_path, written):
                raise InputError(f"output {output_path} would write over the input file; name another")
        self._records, self._present = self._checked_records(columns)
        types = {prefix + name: kind for name, kind in added.items()}
        beside = Path(files_beside(output_path)[2])
        if output_path != STANDARD_STREAM and (beside.is_dir() or (beside.exists() and not os.access(beside, os.W_OK))):
            raise InputError(f"cannot write {beside}: it is a folder, or permission is denied")
        self._writer = open_writer(output_path, output_format, self._reader, self._present, types, dialect)
        try:
            self._journal = self._checked_journal(resume)
        except BaseException:
            self._writer.abandon()
            raise

    def abandon(self) -> None:
        """Close without a result. Finished rows stay in the partial file."""
        partial = self._writer.abandon()
        if partial is not None:
            rows = self._written
            message = f"stopped: {rows} finished {'row is' if rows == 1 else 'rows are'} in {partial}"
            message += "" if self._journal is None else "; --resume continues after them"
            with suppress(OSError, SystemExit):  # a closed terminal must not hide what stopped the run
                self.errors.print(message, soft_wrap=True, highlight=False, markup=False)

    def process(
        self,
        batches: Callable[[Iterator[Any], Callable[[int], None]], Iterator[Any]],
        fields: Callable[[Record, Any, int], dict[str, Any]],
        identity: str,
    ) -> None:
        """Run all rows.

        Parameters
        ----------
        batches : callable
            From an iterator of rows (the values of the columns; an `InvalidRecord` for an unusable line) and a progress
            callback to tables of consecutive rows.
        fields : callable
            From a record, a table and an index to the values of the added fields, without status and message.
        identity : str
            What the numbers depend on; a run is resumed only if it is equal.
        """
        self._resume(identity)
        waiting: deque[tuple[Record, int]] = deque()  # each with the position in the file after it
        position = 0
        values: dict[str, Any] = {}

        has_no_header = self._reader.columns is None

        def rows() -> Iterator[Any]:
            for record in staged("read", self._records):
                if has_no_header and record.fields is not None and not self._added.isdisjoint(record.fields):
                    clash = min(self._added & record.fields.keys())
                    problem = f"line {record.line} has a field {clash!r}, which this run would add"
                    record = replace(record, fields=None, problem=problem)
                record = self._writer.accept(record)
                waiting.append((record, self._reader.position))
                yield self._values(record)

        shown = TextColumn("{task.fields[shown]}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %")
        with Progress(
            *shown,
            TimeRemainingColumn(),
            console=self.errors,
            transient=True,
            disable=self._quiet or not self.errors.is_terminal,
        ) as bar:
            task = bar.add_task("", total=self._reader.size, shown=f"{self._label}reading")

            def advance(tokens: int) -> None:
                self.evaluated += tokens
                bar.update(
                    task, shown=f"{self._label}{self.evaluated:,} tokens, {self.evaluated / self.seconds:,.0f}/s"
                )
                self._tell(position)

            for table in batches(rows(), advance):
                with stage("write"):
                    for index, status in enumerate(table.status):
                        record, position = waiting.popleft()
                        values = {**fields(record, table, index), "status": status, "message": table.messages[index]}
                        if not values["message"]:
                            del values["message"]
                        named = {shown: values[name] for name, shown in self._names.items() if name in values}
                        self._writer.write(record, named)
                        self.statuses[status] += 1
                        if self._journal is not None:
                            self._journal.add(record)
                    if not self._fault_said and len(self.statuses) == 1 and self.statuses.total() >= RECORDS_LOOKED_AT:
                        (status,) = self.statuses
                        if status not in SCORED:
                            rows_so_far = f"each of the first {self.statuses.total()} rows"
                            self._say_fault(f"{rows_so_far} is {status}: {values.get('message', '')}")
                    self._writer.flush()
                    self._written = self.statuses.total()
                    if self._journal is not None:
                        self._journal.save(self.statuses, self._writer.num_bytes)
                bar.update(task, completed=position)
                self._tell(position)
        if self._when_whole is not None:
            self._when_whole(self.statuses)
        self._writer.finish()

    def _tell(self, position: int) -> None:
        """Print a progress line on stderr every `progress_seconds`, if there is no bar."""
        now = time.perf_counter()
        if self._quiet or self.errors.is_terminal or now - self._told < self._progress_seconds:
            return
        self._told = now
        size = self._reader.size
        share = f"{100 * position / size:.0f} % of the input read, " if size else ""
        rate = f"{self.evaluated / self.seconds:,.0f} tokens/s"
        message = f"{self._label}{self._written:,} rows done, {share}{rate}, {self.seconds:,.0f} s"
        with suppress(OSError):  # nobody reads it; the rows are written all the same
            self.errors.print(message, soft_wrap=True, highlight=False, markup=False)

    @property
    def input_path(self) -> str:
        return self._reader.path

    @property
    def rows_before(self) -> int:
        """Rows that an earlier run has finished, and that this run skips."""
        return 0 if self._journal is None else self._journal.rows

    @property
    def seconds(self) -> float:
        """Time since the run was opened."""
        return time.perf_counter() - self._started

    def failed(self, *, skip_too_long: bool = False) -> int:
        """Number of rows without a result, apart from those that a policy skips."""
        return count_failed(self.statuses, skip_too_long=skip_too_long)

    def finish(
        self,
        lines: list[tuple[str, str]],
        signature: Signature | BoundsSignature,
        kind: str,
        first: Table | None = None,
    ) -> None:
        """Write OUTPUT.signature.json and print the summary: counts, `lines`, time and signature.

        If the rows go to standard output, the summary goes to stderr; the signature does so even if quiet.
        """
        if self._writer.is_file:
            _, _, beside = files_beside(self._writer.path)
            write_signature(beside, kind, signature, self.statuses)
        before = []
        if self._kept:
            before.append(("rows of the stopped run", f"{self._kept:,}; the numbers below are of the other rows"))
        print_summary(
            self.statuses,
            [*before, *self.remarks(), *lines, *speed_lines(self.evaluated, self.seconds)],
            signature,
            first,
            quiet=self._quiet,
            to_stderr=self._writer.is_stream,
        )

    def remarks(self) -> list[tuple[str, str]]:
        """Lines of the summary about the rows of the files."""
        blank = self._reader.blank_lines
        return [("blank lines skipped", f"{blank:,}")] * bool(blank) + [*remarks(self._reader, self._writer).items()]

    def _say_fault(self, fault: str) -> None:
        """Say how all of the first rows fail; once per run."""
        self._fault_said = True
        if not self._says_faults:
            return
        self.errors.print(f"{self._reader.path}: {fault}", soft_wrap=True, highlight=False, markup=False)

    def _checked_journal(self, resume: bool) -> Journal | None:
        """The journal, in which the run notes its finished rows; None for an output that cannot be resumed."""
        leftover = self._writer.leftover
        if resume and not self._writer.can_resume and self._begins_anew:
            return None
        if resume and not self._writer.can_resume:
            raise InputError(
                f"--resume needs an output in JSON Lines, CSV or TSV, in a file, not compressed; "
                f"{self._writer.path} is not"
            )
        if leftover is not None and not resume:
            way = "continue with --resume, or move it away" if self._writer.can_resume else "move it away"
            raise InputError(f"rows of a run that was stopped are in {leftover}; {way}")
        if not self._writer.can_resume:
            return None
        journal = Journal(Path(state_path(self._writer.path)))
        if leftover is not None:
            journal.load()
        return journal

    def _resume(self, identity: str) -> None:
        """Skip the finished rows of a stopped run, and let the writer continue after them."""
        if self._journal is None:
            return
        reader = self._reader
        about: list[Any] = [self._columns, self._names, reader.format, self._writer.format, self._present]
        if reader.format == "parquet":  # its rows have no text by which they could be compared
            about += fingerprint(reader.path)
        about += [repr(side.dialect) for side in (reader, self._writer) if hasattr(side, "dialect")]
        num_bytes = self._journal.pass_over(self._records, f"{identity} {json.dumps(about)}")
        self._kept = self._written = self._journal.rows
        if self._kept:
            self.statuses.update(self._journal.statuses)
            self._writer.resume(num_bytes)
        else:
            self._journal.save(self.statuses, 0)

    def _values(self, record: Record) -> tuple[Any, ...]:
        """The values of the columns; for a record that could not be read, one `InvalidRecord` per column."""
        if record.fields is None:
            return (InvalidRecord(record.problem),) * len(self._columns)
        return tuple([record.fields.get(column) for column in self._columns])

    def _checked_records(self, columns: dict[str, str]) -> tuple[Iterator[Record], list[str]]:
        """The records and the names of the columns; refuses missing columns and names that are taken.

        JSON Lines have no header: the fields of the first records take its place.

        Raises
        ------
        InputError
            If a column is missing or taken, or nothing of the file can be read.
        """
        records = iter(self._reader)
        self._fault_said = False
        head = list(islice(records, RECORDS_LOOKED_AT))
        if len(head) == 1 and head[0].fields is None and not head[0].raw and self._reader.format == "jsonl":
            raise InputError(f"{self._reader.path} is not JSON Lines: {head[0].problem}")
        fault = common_fault(head, columns, self._reader.format)
        if fault:
            rows = (
                "the only row fails" if len(head) == 1 else f"each of the first {len(head)} rows fails in the same way"
            )
            self._say_fault(f"{rows}: {fault}")
        if self._reader.columns is not None:
            present = self._reader.columns
        else:
            head += up_to_usable(head, records)
            present = list(dict.fromkeys(key for record in head if record.fields is not None for key in record.fields))
        if present:
            for option, column in columns.items():
                check_column(self._reader.path, present, column, option)
            taken = sorted(self._added & set(present))
            if taken:
                raise InputError(
                    f"{self._reader.path} already has the field {', '.join(taken)}; add others with --output-prefix, "
                    "such as --output-prefix diffscore_"
                )
        return chain(head, records), present


def print_profile(profile: RunProfile) -> None:
    """Print the time by stage on stderr."""
    table = Table(title="time by stage")
    for name in ("stage", "calls", "seconds", "share"):
        table.add_column(name, justify="left" if name == "stage" else "right")
    for name, calls, seconds in profile.rows():
        share = seconds / profile.wall_seconds
        table.add_row(name, f"{calls:,}" if calls else "", f"{seconds:.3f}", f"{share:.1%}")
    Console(stderr=True).print(table)


def count_failed(statuses: Counter[str], *, skip_too_long: bool = False) -> int:
    """Number of rows without a result, apart from those that a policy skips."""
    failed = sum(count for status, count in statuses.items() if status not in SCORED)
    return failed - (statuses[TOO_LONG] if skip_too_long else 0)


def dialect_options(options: Mapping[str, Any]) -> DialectOptions:
    """The options of a command for delimited files."""
    return DialectOptions(options["delimiter"], options["quoting"])


def files_beside(output_path: str) -> tuple[str, str, str]:
    """The files of a run beside its output: the finished rows of a stopped run, its journal, and the signature."""
    return str(partial_path(output_path)), state_path(output_path), f"{output_path}.signature.json"


def number(value: float) -> float | None:
    """A JSON number, or null for NaN and infinities: a row without a result must not look like a perfect one."""
    return None if not math.isfinite(value) else float(value)
