"""`diffscore bound`: a file of texts to the same file with bounds on their log-likelihood."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from diffscore_fast.bounds import LEAST_EFFECTIVE_DRAWS, BoundsConfig, LikelihoodBounds, make_generation
from diffscore_fast.cli.rows import FileRun, number
from diffscore_fast.cli.score import parse_numbers
from diffscore_fast.io.jsonl import Record
from diffscore_fast.results import SCORED, BoundsTable

EXACT_BY_DEFAULT = 8  # block size up to which the lattice is cheaper than sampling


def run_bound(input_path: str, output_path: str, model: str, options: dict[str, Any]) -> bool:
    """Bound a file of texts. Returns and raises as `run_score`."""
    method = options["method"]
    if method == "auto":
        method = "exact" if options["block_size"] <= EXACT_BY_DEFAULT else "estimate"
    steps = options["steps"]
    generation = make_generation("any-order" if steps is None else "parallel", steps,
                                 parse_numbers("--step-probabilities", options["step_probabilities"]))  # fmt: skip
    config = BoundsConfig(
        method == "exact", generation, options["orders"], options["surrogate_orders"], options["surrogate"],
        not options["plain"], options["folds"], options["order_design"], options["seed"], options["autoregressive"],
        options["comparators"], options["force"],
    )  # fmt: skip
    z = options["z"]
    added = ["lower", "upper", "stderr_lower", "stderr_upper", "interval", "tokens", "status", "message"]
    added += ["exact"] if config.exact else ["effective_draws"]
    added += ["autoregressive"] if config.autoregressive else []
    added += ["comparators"] if config.comparators and not config.exact else []
    run = FileRun(input_path, output_path, {"--text-column": options["text_column"]}, added,
                  prefix=options["output_prefix"], quiet=options["quiet"])  # fmt: skip
    totals = _Totals()

    def batches(rows: Iterator[Any], progress: Callable[[int], None]) -> Iterator[BoundsTable]:
        return bounds.bound_batches((text for (text,) in rows), config, progress)

    def fields(record: Record, table: BoundsTable, row: int) -> dict[str, Any]:
        if table.status[row] in SCORED:
            totals.add(table, row)
        low, high = (edge[row] for edge in table.interval(z))
        return {
            "lower": number(table.lower[row]), "upper": number(table.upper[row]),
            "stderr_lower": number(table.stderr_lower[row]), "stderr_upper": number(table.stderr_upper[row]),
            "interval": [number(low), number(high)], "tokens": int(table.num_tokens[row]),
            "exact": number(table.exact[row]), "effective_draws": number(table.effective_draws[row]),
            "autoregressive": number(table.autoregressive[row]),
            "comparators": {name: number(values[row]) for name, values in table.comparators.items()},
        }  # fmt: skip

    try:
        bounds = LikelihoodBounds(model, block_size=options["block_size"], token_budget=options["token_budget"])
        run.process(batches, fields)
    except BaseException:
        run.abandon()
        raise
    run.print_summary(totals.lines(z, config), bounds.signature(config))
    return run.failed() > 0


class _Totals:
    """Token-weighted sums over texts: a few numbers a text."""

    def __init__(self) -> None:
        self._texts: list[tuple[float, ...]] = []
        self._weak = 0

    def add(self, table: BoundsTable, row: int) -> None:
        self._texts.append((
            table.num_tokens[row], table.lower[row], table.upper[row], table.stderr_lower[row],
            table.stderr_upper[row], table.autoregressive[row], table.distinct_states[row], table.visited_states[row],
        ))  # fmt: skip
        self._weak += bool(table.effective_draws[row] < LEAST_EFFECTIVE_DRAWS)

    def lines(self, z: float, config: BoundsConfig) -> list[tuple[str, str]]:
        if not self._texts:
            return []
        tokens, lower, upper, error_lower, error_upper, autoregressive, distinct, visited = np.array(self._texts).T
        total = tokens.sum()

        def perplexity(value: float) -> str:
            return f"{np.exp(-value / total):.3f}"

        low = perplexity(upper.sum() + z * np.sqrt((error_upper**2).sum()))
        high = perplexity(lower.sum() - z * np.sqrt((error_lower**2).sum()))
        lines = [("tokens", f"{int(total):,}")]
        if config.exact:
            lines.append(("perplexity", perplexity(lower.sum())))
        else:
            lines.append((f"perplexity interval (z = {z:g})", f"[{low}, {high}]"))
        if len(tokens) > 1:
            samples = np.random.default_rng(0).integers(len(tokens), size=(1000, len(tokens)))
            edges = []
            for values, quantile in ((upper, 0.025), (lower, 0.975)):
                ratios = np.exp(-values[samples].sum(1) / tokens[samples].sum(1))
                edges.append(f"{np.quantile(ratios, quantile):.3f}")
            lines.append(("  95 % over texts", f"[{edges[0]}, {edges[1]}]"))
        if config.autoregressive:
            lines.append(("autoregressive perplexity", perplexity(autoregressive.sum())))
        lines.append(("states evaluated", f"{int(distinct.sum()):,} of {int(visited.sum()):,}"))
        if self._weak:
            lines.append(("warning", f"in {self._weak} texts one draw holds most of a block's weight; "
                          "more orders, or exact, are needed"))  # fmt: skip
        return lines
