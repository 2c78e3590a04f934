"""`diffscore bound`: texts in, the same rows with bounds on their log-likelihood out."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from diffscore_fast.backbones.loader import read_spec
from diffscore_fast.backbones.spec import BackboneSpec, PatternSpec
from diffscore_fast.bounds.config import BoundsConfig, check_lattice, make_generation
from diffscore_fast.bounds.intervals import checked_z, widened_perplexity
from diffscore_fast.bounds.likelihood import LikelihoodBounds
from diffscore_fast.bounds.table import BoundsTable
from diffscore_fast.cli.job import FileJob
from diffscore_fast.cli.model import faster_type, model_arguments
from diffscore_fast.cli.rows import FileRun, number
from diffscore_fast.cli.score import parse_numbers
from diffscore_fast.errors import InputError
from diffscore_fast.io.record import FieldType, Record
from diffscore_fast.options import DEFAULT_BLOCK_SIZE, MAX_AUTO_EXACT_BLOCK_SIZE
from diffscore_fast.status import SCORED

RESAMPLES = 400
TOTALS = (
    "num_tokens",
    "lower",
    "upper",
    "stderr_lower",
    "stderr_upper",
    "degrees_lower",
    "degrees_upper",
    "autoregressive",
    "distinct_states",
    "visited_states",
)


class BoundJob(FileJob):
    """What the options of `bound` ask for: the configuration, the model, and the summary.

    Raises
    ------
    InputError
        If the options cannot be used together.
    """

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        self.options = options
        self.columns = {"--text-column": options["text_column"]}
        spec = read_spec(model)
        given = options["block_size"]
        self._block_size = spec.block_size_near(DEFAULT_BLOCK_SIZE) if given is None else given
        self.config = _config(options, spec, self._block_size)
        self._z = checked_z(options["z"])
        self._arguments = model_arguments(options)
        self._totals = _Totals()

    @property
    def kind(self) -> str:
        """What the numbers are, in words."""
        return "exact" if self.config.exact else "lower bound, upper bound"

    def added_fields(self) -> dict[str, FieldType]:
        """Names and types of the fields that are added to every row."""
        added: dict[str, FieldType] = {
            "lower": "number",
            "upper": "number",
            "stderr_lower": "number",
            "stderr_upper": "number",
            "interval": "numbers",
            "tokens": "count",
            "status": "text",
            "message": "text",
            "exact" if self.config.exact else "effective_draws": "number",
        }
        if self.config.autoregressive:
            added["autoregressive"] = "number"
        if self.config.comparators and not self.config.exact:
            added["comparators"] = "named_numbers"
        return added

    def own_identity(self) -> list[Any]:
        """The width of intervals, and which of the values are written."""
        return [self._z, list(self.added_fields())]

    @contextmanager
    def loaded(self, model: str) -> Iterator[None]:
        """Load the model."""
        self._bounds = LikelihoodBounds(model, block_size=self._block_size, **self._arguments)
        self.signature = self._bounds.signature(self.config)
        yield

    def process(self, run: FileRun) -> None:
        """Bound the texts of a file."""

        def batches(rows: Iterator[Any], progress: Callable[[int], None]) -> Iterator[BoundsTable]:
            return self._bounds.bound_batches((text for (text,) in rows), self.config, progress, by_time=True)

        run.process(batches, self._fields, f"{self.signature} z:{self._z}")

    def lines(self) -> list[tuple[str, str]]:
        """Lines of the summary."""
        return self._totals.lines(self._z, self.config) + faster_type(self.options, self.signature.dtype)

    def _fields(self, record: Record, table: BoundsTable, row: int) -> dict[str, Any]:
        if table.status[row] in SCORED:
            self._totals.add(table, row)
        low, high = (edge[row] for edge in table.interval(self._z))
        return {
            "lower": number(table.lower[row]),
            "upper": number(table.upper[row]),
            "stderr_lower": number(table.stderr_lower[row]),
            "stderr_upper": number(table.stderr_upper[row]),
            "interval": [number(low), number(high)],
            "tokens": int(table.num_tokens[row]),
            "exact": number(table.exact[row]),
            "effective_draws": number(table.effective_draws[row]),
            "autoregressive": number(table.autoregressive[row]),
            "comparators": {name: number(values[row]) for name, values in table.comparators.items()},
        }


def _config(options: dict[str, Any], spec: BackboneSpec, block_size: int) -> BoundsConfig:
    method, sampling = options["method"], options["sampling_options"]
    if method == "auto":
        method = "exact" if block_size <= MAX_AUTO_EXACT_BLOCK_SIZE and not sampling else "estimate"
    if method == "exact" and sampling:
        raise InputError(f"{', '.join(sampling)}: only for sampled orders, not for --method exact")
    if method == "exact":
        check_lattice(block_size, options["force"])
    autoregressive = options["autoregressive"]
    if autoregressive is None:
        autoregressive = 1 in spec.patterns.get("block", PatternSpec(0)).block_sizes
    steps = options["steps"]
    generation = make_generation(
        "any-order" if steps is None else "parallel",
        steps,
        parse_numbers("--step-probabilities", options["step_probabilities"]),
    )
    return BoundsConfig(
        exact=method == "exact",
        generation=generation,
        orders=options["orders"],
        surrogate_orders=options["surrogate_orders"],
        surrogate=options["surrogate"],
        cross_fitted=not options["plain"],
        folds=options["folds"],
        design=options["order_design"],
        seed=options["seed"],
        autoregressive=autoregressive,
        comparators=options["comparators"],
        forced=options["force"],
    )


class _Totals:
    """A few numbers per text, for sums over all texts and their spread."""

    def __init__(self) -> None:
        self._columns = {name: array("d") for name in TOTALS}
        self._keys = array("Q")
        self._unreliable = 0

    def add(self, table: BoundsTable, row: int) -> None:
        """Add a text that has bounds."""
        for name, column in self._columns.items():
            column.append(getattr(table, name)[row])
        self._keys.append(int(table.keys[row]))
        self._unreliable += bool(table.unreliable[row])

    def lines(self, z: float, config: BoundsConfig) -> list[tuple[str, str]]:
        """Lines of the summary: perplexity per token, its spread over texts, and states."""
        (
            tokens,
            lower,
            upper,
            error_lower,
            error_upper,
            freedom_lower,
            freedom_upper,
            autoregressive,
            distinct,
            visited,
        ) = (np.array(self._columns[name]) for name in TOTALS)
        if not len(tokens):
            return []
        total = tokens.sum()

        def perplexity(value: float) -> str:
            return f"{np.exp(-value / total):.3f}"

        keys = np.array(self._keys)
        low, high = (
            f"{widened_perplexity(values, errors, freedom, keys, total, side):.3f}"
            for values, errors, freedom, side in (
                (upper, error_upper, freedom_upper, z),
                (lower, error_lower, freedom_lower, -z),
            )
        )
        lines = [("tokens", f"{int(total):,}")]
        if config.exact:
            lines.append(("perplexity", perplexity(lower.sum())))
        else:
            lines.append((f"perplexity interval (z = {z:g})", f"[{low}, {high}]"))
        if len(tokens) > 1:
            generator = np.random.default_rng(0)
            resampled = []
            for _ in range(RESAMPLES):  # one by one: there may be millions of texts
                chosen = generator.integers(len(tokens), size=len(tokens))
                resampled.append([values[chosen].sum() / tokens[chosen].sum() for values in (upper, lower)])
            low, high = np.exp(-np.quantile(resampled, [0.975, 0.025], axis=0, method="inverted_cdf"))
            edges = [f"{low[0]:.3f}", f"{high[1]:.3f}"]
            lines.append(("  95 % over texts", f"[{edges[0]}, {edges[1]}]"))
        if config.autoregressive:
            lines.append(("autoregressive perplexity", perplexity(autoregressive.sum())))
        lines.append(("states evaluated", f"{int(distinct.sum()):,} of {int(visited.sum()):,}"))
        if self._unreliable:
            lines.append(
                (
                    "warning",
                    f"in {self._unreliable} texts a block has too few independent draws for a standard error, or one "
                    "draw has most of its weight; use more orders, or --method exact",
                )
            )
        return lines
