"""A command over several files: a folder of shards, each finished for good before the next is begun."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from diffscore_fast.cli.console import Console
from diffscore_fast.cli.job import FileJob, run_file
from diffscore_fast.cli.rows import FileRun, ShardOfRun, count_failed, dialect_options
from diffscore_fast.cli.summary import print_summary, speed_lines, write_signature
from diffscore_fast.errors import InputError
from diffscore_fast.io.files import open_reader
from diffscore_fast.io.remote import fingerprint
from diffscore_fast.io.shards import (
    RECORDS_FOLDER,
    Shard,
    are_several,
    find_inputs,
    load_record,
    pair_outputs,
    save_record,
)

NAMES_LISTED = 3


def run_inputs(job: FileJob, input_paths: Sequence[str], output_path: str, model: str) -> bool:
    """Do a job over a file, or over several into a folder; nothing left to do is no failure.

    Parameters, result and errors as for `run_file`.
    """
    if not are_several(input_paths, output_path):
        return run_file(job, input_paths[0], output_path, model)
    options = job.options
    files, passed_over = find_inputs(input_paths, options["input_format"])
    shards = pair_outputs(files, output_path, options["output_format"])
    folder = Path(os.path.realpath(output_path))
    for option, path in job.extra_paths().items():
        if Path(os.path.realpath(path)).is_relative_to(folder):
            raise InputError(f"{option} {path} lies in the output folder; name a file elsewhere")
    job.check_extra_outputs([shard.input_path for shard in shards])
    if passed_over:
        listed = ", ".join(passed_over[:NAMES_LISTED]) + (", ..." if len(passed_over) > NAMES_LISTED else "")
        _say(f"files passed over, whose names say no format: {len(passed_over)} ({listed})")
    run = _ShardsRun(job, shards)
    run.check()
    run.process(model)
    # Files first: printing the summary may fail on a closed pipe.
    total = run.statuses.total()
    job.write_extra_outputs(total)
    write_signature(str(folder / RECORDS_FOLDER / "signature.json"), job.kind, job.signature, run.statuses)
    print_summary(
        run.statuses,
        [*run.lines(), *job.lines(), *speed_lines(run.evaluated, run.seconds)],
        job.signature,
        job.first_rows,
        quiet=options["quiet"],
        to_stderr=False,
    )
    job.show_extra_outputs(total, to_stderr=False)
    return bool(run.num_scored) and count_failed(run.statuses, skip_too_long=job.skips_too_long) > 0


class _ShardsRun:
    """The shards of one run, finished and unfinished."""

    def __init__(self, job: FileJob, shards: list[Shard]) -> None:
        self.statuses: Counter[str] = Counter()
        self.evaluated = self.num_scored = 0  # tokens; shards
        self._earlier = 0  # rows that an earlier run has finished, and that the summary leaves out
        self._job, self._shards = job, shards
        self._finished = {shard.name for shard in shards if shard.is_finished}
        self._remarks: dict[str, list[str]] = {}
        self._started = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._started

    def check(self) -> None:
        """Check everything that can be checked before the model is loaded, and make the folders.

        Raises
        ------
        InputError
            If shards of an earlier run are there without --resume, or an input or output cannot be used.
        """
        for shard in self._shards:
            if not os.path.lexists(shard.output_path):
                continue
            if not self._job.options["resume"]:
                raise InputError(
                    f"{shard.output_path} is there already; continue that run with --resume, or name another folder"
                )
            if shard.name not in self._finished:
                raise InputError(f"{shard.output_path} was not written by this command; move it away")
        if self._finished:
            self._job.check_first_rows()
        for shard in self._shards:
            shard.record_path.parent.mkdir(parents=True, exist_ok=True)
            if shard.name not in self._finished:
                run = self._job.open(shard.input_path, shard.output_path, ShardOfRun(""))
                has_first = run.rows_before and shard is self._shards[0]
                run.abandon()
                if has_first:
                    self._job.check_first_rows()

    def process(self, model: str) -> None:
        """Score the unfinished shards, and add the rows of the finished ones to the summary.

        Raises
        ------
        InputError
            If a finished shard was made by other options, or of an input that has changed since.
        """
        with self._job.loaded(model):
            self._process()

    def _process(self) -> None:
        identity = self._job.identity()
        finished = [shard for shard in self._shards if shard.name in self._finished]
        for shard in finished:
            self._check_finished(shard, identity)
        with self._job.profiled():
            for place, shard in enumerate(self._shards):
                if shard.name not in self._finished:
                    self._score(shard, f"shard {place + 1} of {len(self._shards)}, {shard.name}: ", identity)
        for shard in finished:
            rows = load_record(shard.record_path)["rows"]
            self.statuses.update(rows)
            self._add_scores(shard, sum(rows.values()))

    def lines(self) -> list[tuple[str, str]]:
        """Lines of the summary about the shards."""
        lines = [("shards", f"{len(self._shards):,}")]
        if self._finished:
            lines.append(("of them finished before", f"{len(self._finished):,}"))
        if self._earlier:
            lines.append(("rows finished before", f"{self._earlier:,}; the numbers below are of the other rows"))
        return lines + [(name, "; ".join(values)) for name, values in self._remarks.items()]

    def _check_finished(self, shard: Shard, identity: str) -> None:
        record = load_record(shard.record_path)
        if record["identity"] != identity:
            raise InputError(
                f"the shard {shard.output_path} was made by other options: {record['identity']}; give those again, or "
                "name another folder"
            )
        if record["input"] != fingerprint(shard.input_path):
            raise InputError(
                f"{shard.input_path} has changed since its shard was finished; move {shard.output_path} away to score "
                "it anew"
            )

    def _score(self, shard: Shard, label: str, identity: str) -> None:
        source = fingerprint(shard.input_path)

        def when_whole(statuses: Counter[str]) -> None:
            save_record(shard.record_path, identity, source, dict(statuses))

        run = self._job.open(shard.input_path, shard.output_path, ShardOfRun(label, when_whole, says_faults=False))
        rows_before = run.rows_before
        try:
            self._job.process(run)
        except BaseException:
            run.abandon()
            raise
        self.num_scored += 1
        self.statuses.update(run.statuses)
        self.evaluated += run.evaluated
        self._add_remarks(shard, run)
        self._add_scores(shard, rows_before)

    def _add_remarks(self, shard: Shard, run: FileRun) -> None:
        for name, remark in run.remarks():
            known = self._remarks.setdefault(name, [])
            if len(known) < NAMES_LISTED:
                known.append(f"{shard.name}: {remark}")
            elif len(known) == NAMES_LISTED:
                known.append("...")

    def _add_scores(self, shard: Shard, num_rows: int) -> None:
        """Add the first rows of a shard, which an earlier run has scored, to the summary."""
        if not num_rows:
            return
        if not self._job.adds_earlier_rows:
            self._earlier += num_rows
            return
        options = self._job.options
        reader = open_reader(shard.output_path, options["output_format"], dialect_options(options))
        found = 0
        for record in islice(reader, num_rows):
            found += 1
            if record.fields is not None:
                self._job.add_earlier(dict(record.fields))
        if found < num_rows:
            raise InputError(f"{shard.output_path} has lost rows: {found:,} of {num_rows:,} are there; move it away")


def _say(message: str) -> None:
    Console(stderr=True).print(message, soft_wrap=True, highlight=False, markup=False)
