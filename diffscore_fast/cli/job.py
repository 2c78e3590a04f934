"""What `score` and `bound` do with files alike: one file, or several into a folder of shards (`cli.shards`)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from rich.table import Table

from diffscore_fast.cli.rows import FileRun, ShardOfRun, dialect_options, files_beside
from diffscore_fast.io.record import FieldType
from diffscore_fast.signature import BoundsSignature, Signature


class FileJob:
    """What the options of a command ask for, over one file or several: the model, the numbers, and the summary.

    Attributes
    ----------
    options : dict
    columns : dict of str to str
        From the name of an option to the column that it names.
    signature : Signature or BoundsSignature
        Inside `loaded`, and afterwards.
    """

    options: dict[str, Any]
    columns: dict[str, str]
    signature: Signature | BoundsSignature
    first_rows: Table | None = None  # shown below the summary
    skips_too_long = False  # whether rows that are too long do not count as failed
    adds_earlier_rows = False  # whether the summary holds the rows that an earlier run has finished, too

    @property
    def kind(self) -> str:
        """What the numbers are, in words."""
        raise NotImplementedError

    def added_fields(self) -> dict[str, FieldType]:
        """Names and types of the fields that are added to every row."""
        raise NotImplementedError

    def loaded(self, model: str) -> AbstractContextManager[None]:
        """Load the model, which ends with the block."""
        raise NotImplementedError

    def process(self, run: FileRun) -> None:
        """Compute the rows of a file."""
        raise NotImplementedError

    def lines(self) -> list[tuple[str, str]]:
        """Lines of the summary."""
        raise NotImplementedError

    def own_identity(self) -> list[Any]:
        """What the output depends on besides its input, the signature, the columns and the formats."""
        return []

    def extra_paths(self) -> dict[str, str]:
        """Files that the command writes besides its output, by the name of their option."""
        return {}

    def check_extra_outputs(self, taken: Sequence[str]) -> None:
        """Raise `InputError` if an extra file cannot be written, or would write over files (`taken`)."""

    def check_first_rows(self) -> None:
        """Raise `InputError` if something needs the first rows; called where an earlier run has finished them."""

    def add_earlier(self, fields: dict[str, Any]) -> None:
        """Add a row, which an earlier run has finished, to the summary; see `adds_earlier_rows`."""

    def profiled(self) -> AbstractContextManager[None]:
        """Time the stages of the work inside the block, if that is asked for."""
        return nullcontext()

    def write_extra_outputs(self, rows_in_all: int) -> None:
        """Write the extra files."""

    def show_extra_outputs(self, rows_in_all: int, *, to_stderr: bool) -> None:
        """Print what is to be printed besides the summary."""

    def identity(self) -> str:
        """What an output depends on besides its input."""
        names = ("output_prefix", "input_format", "output_format")
        about = [self.columns, {name: self.options[name] for name in names}, repr(dialect_options(self.options))]
        return f"{self.signature} {json.dumps([*about, *self.own_identity()])}"

    def open(self, input_path: str, output_path: str, shard: ShardOfRun | None = None) -> FileRun:
        """Open the run over a file."""
        options = self.options
        return FileRun(
            input_path,
            output_path,
            self.columns,
            self.added_fields(),
            prefix=options["output_prefix"],
            quiet=options["quiet"],
            input_format=options["input_format"],
            output_format=options["output_format"],
            dialect=dialect_options(options),
            resume=options["resume"],
            shard=shard,
        )


def run_file(job: FileJob, input_path: str, output_path: str, model: str) -> bool:
    """Do a job over one file.

    Returns
    -------
    bool
        Whether some row failed.

    Raises
    ------
    DiffScoreError
        If the options, the input, the output or the model cannot be used; no row has been computed then.
    """
    job.check_extra_outputs((input_path, output_path, *files_beside(output_path)))
    run = job.open(input_path, output_path)
    if run.rows_before:
        try:
            job.check_first_rows()
        except BaseException:
            run.abandon()
            raise
    try:
        with job.loaded(model), job.profiled():
            job.process(run)
    except BaseException:
        run.abandon()
        raise
    # Files first: printing the summary may fail on a closed pipe.
    job.write_extra_outputs(run.statuses.total())
    run.finish(job.lines(), job.signature, job.kind, job.first_rows)
    job.show_extra_outputs(run.statuses.total(), to_stderr=output_path == "-")
    return run.failed(skip_too_long=job.skips_too_long) > 0
