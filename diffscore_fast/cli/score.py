"""`diffscore score`: rows in, the same rows with their scores out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from diffscore_fast.backbones.spec import BackboneSpec
from diffscore_fast.cli.console import Console
from diffscore_fast.cli.job import FileJob
from diffscore_fast.cli.model import faster_type, model_arguments
from diffscore_fast.cli.rows import FileRun, number, print_profile
from diffscore_fast.cli.score_outputs import TO_TERMINAL, HeatMap, Summary
from diffscore_fast.distributed.kind import WorkerKind
from diffscore_fast.engine.profile import RunProfile, profile_run
from diffscore_fast.errors import InputError
from diffscore_fast.io.record import FieldType, Record
from diffscore_fast.io.score_cache import ScoreCache
from diffscore_fast.options import FullDraws
from diffscore_fast.scoring import config as scoring_config
from diffscore_fast.scoring.cached import CachedStream
from diffscore_fast.scoring.config import ScoreConfig
from diffscore_fast.scoring.scorer import DiffScorer
from diffscore_fast.scoring.table import ScoreTable
from diffscore_fast.status import SCORED
from diffscore_fast.text.templates import find_template

if TYPE_CHECKING:
    from diffscore_fast.distributed.ray_engine import RayScorer
    from diffscore_fast.distributed.scorer_pool import ScorerPool


class ScoreJob(FileJob):
    """What the options of `score` ask for: the configuration, the model, and the summary.

    Raises
    ------
    InputError
        If the options cannot be used together.
    """

    adds_earlier_rows = True

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.config = make_config(options)
        self.columns = {**context_column(options, self.config), "--candidate-column": options["candidate_column"]}
        if options["item_column"] is not None:
            self.columns["--item-column"] = options["item_column"]
        self.summary = Summary(options["show"], options["candidate_column"])
        self._arguments = model_arguments(options)
        is_source_scored = self.config.direction == "reverse"
        (scored,) = (
            context_column(options, self.config).values() if is_source_scored else (options["candidate_column"],)
        )
        self._heatmap = HeatMap(options["heatmap"], scored)
        self._profile: RunProfile | None = None
        self._workers: ScorerPool | RayScorer | None = None
        self._cached: CachedStream | None = None

    def check_extra_outputs(self, taken: Sequence[str]) -> None:
        """Raise `InputError` if an extra file cannot be written, or would write over files (`taken`) or another."""
        taken = [*taken, self.options["template"]]
        for option, path in self.extra_paths().items():
            check_extra_output(option, path, taken)
            taken.append(path)

    def check_first_rows(self) -> None:
        """Raise `InputError` if something needs the first rows; called where an earlier run has finished them."""
        if self.options["heatmap"] or self.options["show"]:
            raise InputError(
                "--heatmap and --show need the first rows, which an earlier run has finished; leave them out"
            )

    def added_fields(self) -> dict[str, FieldType]:
        """Names and types of the fields that are added to every row."""
        return _added_fields(self.options, self.config)

    def own_identity(self) -> list[Any]:
        """Which of the values are written."""
        return [{name: self.options[name] for name in ("profile", "tokens")}]

    def extra_paths(self) -> dict[str, str]:
        """Files that the command writes besides its output, by the name of their option."""
        found = {f"--{name.replace('_', '-')}": self.options[name] for name in ("heatmap", "profile_run", "cache")}
        return {option: path for option, path in found.items() if path not in (None, TO_TERMINAL)}

    def add_earlier(self, fields: dict[str, Any]) -> None:
        """Add a row, which an earlier run has scored, to the summary."""
        score, tokens = (fields.get(self.options["output_prefix"] + name) for name in ("score", "tokens"))
        if score not in (None, ""):
            self.summary.add_scored(float(score), int(tokens))  # type: ignore[arg-type]

    @contextmanager
    def loaded(self, model: str) -> Iterator[None]:
        """Load the model, here or in workers, which end with the block, and open the cache of scores."""
        options = self.options
        with self._opened_cache() as cache:
            if options["workers"] == 1 and options["engine"] == "processes":
                self._scorer = DiffScorer(model, **self._arguments)
                self.config = self._scorer.complete(config_for(options, self._scorer.spec))
                self.signature = self._scorer.signature(self.config)
                if cache is not None:
                    own_kind = WorkerKind.here(self._scorer.backbone.device, self.signature.implementation)
                    self._use_cache(cache, [own_kind])
                yield
                return
            with self._started_workers(model) as self._workers:
                self.config, self.signature = self._workers.config, self._workers.signature
                if cache is not None:
                    self._use_cache(cache, self._workers.kinds)
                if not options["quiet"]:
                    told = f"{options['workers']} workers: {' | '.join(map(str, self._workers.kinds))}"
                    Console(stderr=True).print(told, soft_wrap=True, highlight=False, markup=False)
                yield

    def _opened_cache(self) -> AbstractContextManager[ScoreCache | None]:
        path = self.options["cache"]
        return nullcontext() if path is None else closing(ScoreCache(path))

    def _use_cache(self, cache: ScoreCache, kinds: list[WorkerKind]) -> None:
        if len(set(kinds)) > 1:
            raise InputError("--cache needs workers of one kind: the last digits of a score depend on it")
        self._cached = CachedStream(cache, f"{self.signature} {kinds[0]!r} {self.config.token_scores}")

    def _started_workers(self, model: str) -> ScorerPool | RayScorer:
        from diffscore_fast.distributed.chunks import ScoreWork

        # The template by its content: a worker of a cluster may not have its file.
        options = {**self.options, "template": find_template(self.options["template"])}
        work = ScoreWork(model, self._arguments, partial(config_for, options))
        if options["engine"] == "ray":
            from diffscore_fast.distributed.ray_engine import RayScorer

            return RayScorer(work, options["workers"], address=options["address"], allow_mixed=options["allow_mixed"])
        from diffscore_fast.distributed.scorer_pool import ScorerPool

        return ScorerPool(work, options["workers"], allow_mixed=options["allow_mixed"])

    def process(self, run: FileRun) -> None:
        """Score the rows of a file."""
        config, rows_before = self.config, run.rows_before

        def batches(rows: Iterator[Any], progress: Callable[[int], None]) -> Iterator[ScoreTable]:
            def score(pairs: Iterator[Any]) -> Iterator[ScoreTable]:
                if self._workers is not None:
                    return self._workers.score_batches(pairs, progress, first=rows_before, name=run.input_path)
                return self._scorer.score_batches(pairs, config, progress, by_time=True)

            pairs = (row if config.needs_source else (None, *row) for row in rows)
            return score(pairs) if self._cached is None else self._cached.score_batches(pairs, score)

        run.process(batches, self._fields, str(self.signature))

    def _fields(self, record: Record, table: ScoreTable, row: int) -> dict[str, Any]:
        """The values that are added to a row."""
        scored = table.status[row] in SCORED
        self.summary.add(record, table, row)
        self._heatmap.add(record, table, row)
        return {
            "score": number(table.scores[row]),
            "stderr": number(table.stderr[row]),
            "tokens": int(table.num_tokens[row]),
            "reference": None if table.reference is None or not scored else int(table.reference[row]),
            "draws": int(table.num_draws[row]),
            "full_draws": int(table.full_draws[row]),
            "truncated_tokens": int(table.truncated_tokens[row]),
            "profile": _profile(table, row) if scored and self.options["profile"] else None,
            "token_scores": _tokens(table, row) if scored else None,
        }

    @contextmanager
    def profiled(self) -> Iterator[None]:
        """Time the stages of the work inside the block, if --profile-run asks for it."""
        with profile_run() if self.options["profile_run"] else nullcontext() as self._profile:
            yield

    @property
    def kind(self) -> str:
        """What the scores are, in words."""
        return self.config.kind

    @property
    def skips_too_long(self) -> bool:  # type: ignore[override]
        """Whether rows that are too long do not count as failed."""
        return self.config.overlength == "skip"

    @property
    def first_rows(self) -> Table | None:  # type: ignore[override]
        """The table for --show; None if it has no row."""
        return self.summary.first_rows if self.summary.first_rows.row_count else None

    def lines(self) -> list[tuple[str, str]]:
        """Lines of the summary."""
        lines = self.summary.lines(self.config.kind)
        if self._cached is not None:
            lines.append(("from the cache", f"{self._cached.hits:,} of {self._cached.rows:,} rows"))
        return lines + faster_type(self.options, self.signature.dtype)

    def write_extra_outputs(self, rows_in_all: int) -> None:
        """Write the heat map and the profile, if they are asked for."""
        self._heatmap.write(rows_in_all)
        if self._profile is not None:
            self._profile.write_trace(self.options["profile_run"])

    def show_extra_outputs(self, rows_in_all: int, *, to_stderr: bool) -> None:
        """Print the heat map and the time by stage, if they are asked for."""
        self._heatmap.show(rows_in_all, to_stderr=to_stderr)
        if self._profile is not None:
            print_profile(self._profile)


def check_extra_output(option: str, path: str, taken: Sequence[str]) -> None:
    """Raise `InputError` for an extra file that cannot be written, or that is one of the run's files (`taken`)."""
    if not Path(path).absolute().parent.is_dir():
        raise InputError(f"cannot write {path}: there is no such folder")
    if Path(path).is_dir() or (Path(path).exists() and not os.access(path, os.W_OK)):
        raise InputError(f"cannot write {path}: it is a folder, or permission is denied")
    if os.path.realpath(path) in map(os.path.realpath, taken):
        raise InputError(f"{option} {path} would write over another file of the run; name another")


def context_column(options: dict[str, Any], config: ScoreConfig) -> dict[str, str]:
    """The option for the field of the sources or references, and that field; empty if the direction reads none."""
    if not config.needs_source:
        return {}
    if config.aggregate is not None:
        return {"--references-column": options["references_column"]}
    return {"--source-column": options["source_column"]}


# The arguments of `scoring.config.make_config` that are options of the same name.
_AS_GIVEN = (
    *("direction", "draws", "seed", "estimator", "mask_ratios", "masking", "levels", "replicates", "coupling"),
    *("target_stderr", "max_draws", "alpha", "attention", "block_size", "overlength", "template"),
    *("mask_words", "tagger"),
)


def config_for(options: dict[str, Any], spec: BackboneSpec) -> ScoreConfig:
    """The configuration for the options of `score` and a model, whose default pattern is taken if none is named."""
    return make_config(options, spec.default_pattern)


def make_config(options: dict[str, Any], default_pattern: str = "prefix") -> ScoreConfig:
    """The configuration for the options of `score`; before the model is loaded, for the pattern of most models."""
    return scoring_config.make_config(
        default_pattern,
        **{name: options[name] for name in _AS_GIVEN},
        masks_by_item=options["item_column"] is not None,
        level_weights=parse_numbers("--level-weights", options["level_weights"]),
        full_draws=_parse_full_draws(options["full_draws"]),
        token_scores=options["tokens"] or options["heatmap"] is not None,
        aggregate=None if options["references_column"] is None else options["aggregate"],
    )


def _parse_full_draws(text: str | None) -> FullDraws | None:
    if text is None or text == "auto":
        return text  # type: ignore[return-value]
    try:
        return int(text)
    except ValueError:
        raise InputError(f"--full-draws {text!r}: neither a whole number nor auto") from None


def parse_numbers(option: str, text: str | None) -> tuple[float, ...] | None:
    """The comma-separated numbers of an option; None if it was not given."""
    if text is None:
        return None
    try:
        return tuple(float(item) for item in text.split(","))
    except ValueError:
        raise InputError(f"{option} {text!r}: not comma-separated numbers") from None


def _added_fields(options: dict[str, Any], config: ScoreConfig) -> dict[str, FieldType]:
    """Names and types of the fields that are added to every row."""
    fields: dict[str, FieldType] = {
        "score": "number",
        "stderr": "number",
        "tokens": "count",
        "draws": "count",
        "status": "text",
        "message": "text",
    }
    if config.corrected:
        fields["full_draws"] = "count"
    if config.overlength == "truncate-source":
        fields["truncated_tokens"] = "count"
    if config.aggregate == "max":
        fields["reference"] = "count"
    if options["profile"]:
        fields["profile"] = "named_numbers"
    if options["tokens"]:
        fields["token_scores"] = "spans"
    return fields


def _profile(table: ScoreTable, row: int) -> dict[str, float | None]:
    return {f"{ratio:g}": number(value) for ratio, value in zip(table.profile_ratios, table.profile[row], strict=True)}


def _tokens(table: ScoreTable, row: int) -> list[tuple[int, int, float | None]] | None:
    if table.tokens is None:
        return None
    owned = slice(int(table.tokens.offsets[row]), int(table.tokens.offsets[row + 1]))
    spans, log_probs = table.tokens.spans[owned].tolist(), table.tokens.log_probs[owned].tolist()
    return [(start, end, number(value)) for (start, end), value in zip(spans, log_probs, strict=True)]
