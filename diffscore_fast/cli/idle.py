"""Options that were given but would do nothing are refused, so that nobody relies on them."""

from __future__ import annotations

from typing import Any

import click
from click.core import ParameterSource


def is_given(name: str) -> bool:
    """Whether the option is on the command line."""
    return click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE


def refuse_idle_score_options(options: dict[str, Any]) -> None:
    """Raise `click.UsageError` for an option of `score` or `compare` that the others leave without effect."""
    in_workers = options.get("workers", 1) > 1 or options.get("engine", "processes") != "processes"
    for name, works, needed in (
        ("alpha", options["direction"] == "bidirectional", "--direction bidirectional"),
        ("aggregate", options["references_column"] is not None, "--references-column"),
        ("max_draws", options["target_stderr"] is not None, "--target-stderr"),
        ("tagger", options["mask_words"] != "all", "--mask-words"),
        (
            "source_column",
            options["direction"] != "marginal" and options["references_column"] is None,
            "a direction that reads sources, and no --references-column",
        ),
        ("allow_mixed", in_workers, "several --workers"),
        ("address", options.get("engine") == "ray", "--engine ray"),
        ("profile_run", not in_workers, "one process; leave out --workers and --engine"),
        ("show", not options.get("quiet"), "the summary; leave out --quiet"),
    ):
        _refuse_if_idle(name, works, needed)


def refuse_idle_bound_options(options: dict[str, Any]) -> None:
    """Raise `click.UsageError` for an option of `bound` that the others leave without effect."""
    _refuse_if_idle("surrogate_orders", options["surrogate"] == "self", "--surrogate self")
    _refuse_if_idle("force", options["method"] != "estimate", "an exact likelihood; leave out --method estimate")


def _refuse_if_idle(name: str, works: bool, needed: str) -> None:
    if is_given(name) and not works:
        raise click.UsageError(f"--{name.replace('_', '-')} needs {needed}")
