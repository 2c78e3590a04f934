"""`diffscore score`: a file of rows to the same file with scores."""

from __future__ import annotations

import math
import statistics
from array import array
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from diffscore_fast.cli.rows import FileRun, number
from diffscore_fast.engine.memory import parse_size
from diffscore_fast.engine.profile import profile_run
from diffscore_fast.errors import InputError
from diffscore_fast.estimators.masks import MaskDesign
from diffscore_fast.estimators.reconstruction import ReconstructionConfig
from diffscore_fast.io.jsonl import Record
from diffscore_fast.results import SCORED, ScoreTable
from diffscore_fast.scorer import DiffScorer, ScoreConfig


def run_score(input_path: str, output_path: str, model: str, options: dict[str, Any]) -> bool:
    """Score a file.

    Returns
    -------
    bool
        Whether some row failed.

    Raises
    ------
    DiffScoreError
        If the options, the input, the output or the model cannot be used; nothing has been scored then.
    """
    config = _config(options)
    memory = None if options["memory"] is None else parse_size(options["memory"])
    if options["profile_run"] and not Path(options["profile_run"]).absolute().parent.is_dir():
        raise InputError(f"cannot write {options['profile_run']}: there is no such folder")
    columns = {"--candidate-column": options["candidate_column"]}
    if config.needs_source:
        columns = {"--source-column": options["source_column"], **columns}
    run = FileRun(input_path, output_path, columns, _added_fields(options, config), prefix=options["output_prefix"],
                  quiet=options["quiet"])  # fmt: skip
    scores, shown = array("d"), Table(title="first rows")
    shown.add_column("candidate", no_wrap=True, overflow="ellipsis", max_width=56)
    shown.add_column("score", justify="right")
    shown.add_column("± s.e.", justify="right")
    tokens = 0

    def batches(rows: Iterator[Any], progress: Callable[[int], None]) -> Iterator[ScoreTable]:
        pairs = (row if config.needs_source else (None, *row) for row in rows)
        return scorer.score_batches(pairs, config, progress)

    def fields(record: Record, table: ScoreTable, row: int) -> dict[str, Any]:
        nonlocal tokens
        scored = table.status[row] in SCORED
        if scored:
            scores.append(table.scores[row])
            tokens += int(table.num_tokens[row])
        if shown.row_count < options["show"]:
            text = "" if record.fields is None else str(record.fields.get(options["candidate_column"]))
            score, stderr = table.scores[row], table.stderr[row]
            shown.add_row(Text(" ".join(text[:400].split())), *("" if math.isnan(item) else f"{item:.3f}"
                                                               for item in (score, stderr)))  # fmt: skip
        return {
            "score": number(table.scores[row]),
            "stderr": number(table.stderr[row]),
            "tokens": int(table.num_tokens[row]),
            "truncated_tokens": int(table.truncated_tokens[row]),
            "profile": _profile(table, row) if scored and options["profile"] else None,
            "token_scores": _tokens(table, row) if scored else None,
        }

    try:
        scorer = DiffScorer(model, memory=memory, token_budget=options["token_budget"])
        if options["attention"] is None:
            config = _config({**options, "attention": scorer.spec.default_pattern})
        scorer.spec.pattern(config.attention)
        with profile_run() if options["profile_run"] else nullcontext() as profile:
            run.process(batches, fields)
    except BaseException:
        run.abandon()
        raise
    kind = "difference" if config.direction == "pmi" else config.reconstruction.kind
    lines = []
    if scores:
        lines = [("mean score", f"{statistics.fmean(scores):.4f} nats a token ({kind})"),
                 ("median score", f"{statistics.median(scores):.4f}"), ("tokens scored", f"{tokens:,}")]  # fmt: skip
    run.finish(lines, scorer.signature(config), kind, shown if shown.row_count else None)
    if profile is not None:
        run.report(profile, options["profile_run"])
    return run.failed(skip_too_long=config.overlength == "skip") > 0


def _config(options: dict[str, Any]) -> ScoreConfig:
    design = MaskDesign(options["draws"], options["mask_ratios"], options["masking"], options["levels"],
                        options["replicates"])  # fmt: skip
    weights = parse_numbers("--level-weights", options["level_weights"])
    return ScoreConfig(
        options["direction"], ReconstructionConfig(options["estimator"], design, weights), options["alpha"],
        options["seed"], options["attention"] or "prefix", options["overlength"], options["tokens"],
    )  # fmt: skip


def parse_numbers(option: str, text: str | None) -> tuple[float, ...] | None:
    """Comma-separated numbers of an option; None where it was not given."""
    if text is None:
        return None
    try:
        return tuple(float(item) for item in text.split(","))
    except ValueError:
        raise InputError(f"{option} {text!r}: not comma-separated numbers") from None


def _added_fields(options: dict[str, Any], config: ScoreConfig) -> list[str]:
    fields = ["score", "stderr", "tokens", "status", "message"]
    if config.overlength == "truncate-source":
        fields.append("truncated_tokens")
    if options["profile"]:
        fields.append("profile")
    if options["tokens"]:
        fields.append("token_scores")
    return fields


def _profile(table: ScoreTable, row: int) -> dict[str, float | None]:
    return {f"{ratio:g}": number(value) for ratio, value in zip(table.profile_ratios, table.profile[row], strict=True)}


def _tokens(table: ScoreTable, row: int) -> list[list[float | int | None]] | None:
    if table.tokens is None:
        return None
    owned = range(int(table.tokens.offsets[row]), int(table.tokens.offsets[row + 1]))
    return [[*map(int, table.tokens.spans[at]), number(table.tokens.log_probs[at])] for at in owned]
