"""The `diffscore` command: its options, and nothing else. Work happens in the modules it calls."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import click
from click.core import ParameterSource

from diffscore_fast.cli.terminal import EXIT_UNUSABLE, Command, in_words
from diffscore_fast.errors import DiffScoreError, is_out_of_memory
from diffscore_fast.io.dialect import QUOTINGS
from diffscore_fast.io.files import FORMATS
from diffscore_fast.version import __version__

# Options of `bound` that only sampled orders have; giving one asks for an estimate.
SAMPLING_OPTIONS = (
    "orders",
    "surrogate_orders",
    "surrogate",
    "plain",
    "folds",
    "order_design",
    "z",
    "seed",
    "comparators",
)
# Options of `score` that are about its files, not about the number; `compare` has all the others.
FILE_OPTIONS = (
    "input_path",
    "output_path",
    "output_format",
    "output_prefix",
    "profile",
    "tokens",
    "heatmap",
    "show",
    "profile_run",
    "quiet",
    "resume",
)
EXIT_SOME_FAILED = 3
EXIT_INTERRUPTED = 130


def _standard_output(context: click.Context, option: click.Parameter, path: str) -> str:
    """Standard output by its other names, which a file of its own must not replace."""
    return "-" if path in ("/dev/stdout", "/dev/fd/1", "/proc/self/fd/1") else path


def reads_delimited(command: Callable[..., None]) -> Callable[..., None]:
    """How the CSV and TSV files of a command are written."""
    for option in reversed(
        (
            click.option(
                "--delimiter",
                metavar="CHARACTER",
                help="Between the fields of CSV or TSV, such as ';'. Default: a first line such as sep=; or else "
                "a comma or tab.",
            ),
            click.option(
                "--quoting",
                type=click.Choice(QUOTINGS),
                default="auto",
                show_default=True,
                help="rfc4180: fields of CSV or TSV may stand in quotes. none: a line is a row, every character "
                r"stands for itself. escaped: a line is a row, \t \n \r \\ stand for tab, line ends, backslash. "
                "auto: rfc4180 for CSV, none for TSV (escaped for TSV made of another format).",
            ),
        )
    ):
        command = option(command)
    return command


def file_and_model(command: Callable[..., None]) -> Callable[..., None]:
    """What `score` and `bound` read, write and run."""
    command = reads_delimited(runs_model(command))
    for option in reversed(
        (
            click.argument("input_path", metavar="INPUT"),
            click.option(
                "-o",
                "--output",
                "output_path",
                required=True,
                metavar="OUTPUT",
                callback=_standard_output,
                help="File to write (.gz and .zst compress); '-' is standard output.",
            ),
            click.option(
                "--format",
                "input_format",
                type=click.Choice(FORMATS),
                help="Format of INPUT; by its name if not given, else JSON Lines.",
            ),
            click.option(
                "--output-format",
                type=click.Choice(FORMATS),
                help="Format of OUTPUT; by its name if not given, else that of INPUT.",
            ),
            click.option(
                "--resume",
                is_flag=True,
                help="Go on behind the rows that a stopped run of the same command has left (JSON Lines, CSV, "
                "TSV); from the start if there are none.",
            ),
        )
    ):
        command = option(command)
    return command


def runs_model(command: Callable[..., None]) -> Callable[..., None]:
    """Which model, and where and how it runs."""
    for option in reversed(
        (
            click.option(
                "--model",
                default="mini",
                show_default=True,
                help="Embedded model, folder, or cached Hugging Face name.",
            ),
            click.option(
                "--device",
                default="cpu",
                show_default=True,
                help="Where it runs: cpu, cuda or cuda:N (AMD's GPUs too); `diffscore info` lists what there is.",
            ),
            click.option(
                "--dtype",
                type=click.Choice(["float32", "bfloat16", "float16"]),
                help="Type of weights and hidden states. Default: float32 on a CPU, whatever the processor; on a "
                "GPU the checkpoint's own. bfloat16 is 1.9 times as fast on a CPU with units for it, and moves "
                "scores by 0.002 to 0.004 nats per token (root mean square).",
            ),
            click.option(
                "--implementation",
                default="auto",
                show_default=True,
                metavar="NAME",
                help="cpu, triton, flash_attn or reference: operations that have it run by it, the others by auto.",
            ),
            click.option(
                "--memory",
                metavar="SIZE",
                help="What it may take beside the loaded model, such as 800M or 2G. On a CPU it changes no "
                "number, on a GPU rounding.",
            ),
            click.option(
                "--token-budget",
                type=int,
                help="Tokens evaluated at once: bounds memory only. Default: 4096 (on a GPU 16384), or as "
                "--memory allows.",
            ),
        )
    ):
        command = option(command)
    return command


@click.group(cls=Command, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="diffscore")
def main() -> None:
    """Score text with masked-diffusion language models."""


@main.command()
@file_and_model
@click.option(
    "--direction",
    type=click.Choice(["marginal", "conditional", "reverse", "bidirectional", "pmi"]),
    default="conditional",
    show_default=True,
    help="S(c), S(c|s), S(s|c), alpha S(c|s) + (1 - alpha) S(s|c), or S(c|s) - S(c).",
)
@click.option("--alpha", default=0.5, show_default=True, help="Weight of S(c|s) in bidirectional.")
@click.option(
    "--draws",
    default=8,
    show_default=True,
    help="K, mask draws a text; an independent grid makes 18 of 20. "
    "A text with no more than K masks is scored by all of them. At most 10,000.",
)
@click.option(
    "--levels", default=10, show_default=True, help="Mask-ratio levels of the grid and the profile; at most 1,000."
)
@click.option(
    "--mask-ratios",
    type=click.Choice(["grid", "stratified", "uniform"]),
    default="grid",
    show_default=True,
    help="How the draws choose their mask ratios.",
)
@click.option(
    "--masking",
    type=click.Choice(["bernoulli", "count"]),
    default="bernoulli",
    show_default=True,
    help="Each token independently, or a fixed number of tokens.",
)
@click.option(
    "--coupling",
    type=click.Choice(["balanced", "independent"]),
    help="balanced: masks share the tokens out evenly, and replicates correct each other; independent: as "
    "published. Default: balanced, but for uniform mask ratios.",
)
@click.option("--replicates", type=int, help="Independent repetitions of the design, for the standard error.")
@click.option(
    "--target-stderr", type=float, metavar="X", help="Standard error to aim at: a pilot sets each row's draws."
)
@click.option("--max-draws", default=128, show_default=True, help="Most draws a row may get for it.")
@click.option(
    "--estimator",
    type=click.Choice(["mean_logprob", "elbo", "weighted"]),
    default="mean_logprob",
    show_default=True,
    help="What is made of the draws.",
)
@click.option("--level-weights", help="For --estimator weighted: comma-separated numbers, one a level.")
@click.option("--seed", default=0, show_default=True, help="Masks follow from the seed and the scored tokens alone.")
@click.option(
    "--attention",
    type=click.Choice(["full", "prefix", "corrected"]),
    help="Default: the model's own (mini: prefix). corrected: prefix, made unbiased for full.",
)
@click.option("--full-draws", metavar="J", help="For --attention corrected: draws read under full as well, or auto.")
@click.option(
    "--template",
    default="plain",
    show_default=True,
    metavar="NAME|FILE",
    help="Words around the two texts: plain, summarisation, translation, data-to-text, dialogue, "
    "simplification, or a TOML or JSON file with the texts forward and reverse.",
)
@click.option(
    "--mask-words",
    type=click.Choice(["all", "content", "function", "entities"]),
    default="all",
    show_default=True,
    help="Mask and score one class of words alone (needs spaCy).",
)
@click.option("--tagger", default="en_core_web_sm", show_default=True, help="spaCy model that tells the class.")
@click.option("--references-column", help="Field with a list of references, read in the source's place.")
@click.option(
    "--aggregate",
    type=click.Choice(["max", "mean"]),
    default="max",
    show_default=True,
    help="What is made of a row's references.",
)
@click.option(
    "--overlength",
    type=click.Choice(["error", "skip", "truncate-source"]),
    default="error",
    show_default=True,
    help="A text beyond the model's length: a failed row, a skipped row, or the end of "
    "the source is cut. Candidates are never cut.",
)
@click.option("--source-column", default="source", show_default=True, help="Field that holds the source.")
@click.option("--candidate-column", default="candidate", show_default=True, help="Field that holds the candidate.")
@click.option("--output-prefix", default="", help="Put before the names of the fields that are added.")
@click.option("--profile", is_flag=True, help="Add the mean log-prob of every mask-ratio level.")
@click.option("--tokens", is_flag=True, help="Add [start, end, log-prob] of every token.")
@click.option(
    "--heatmap",
    metavar="FILE",
    help="Write the first 200 rows, coloured by token, as an HTML page; '-' prints the first 20 to the terminal.",
)
@click.option(
    "--show", default=0, type=click.IntRange(0), metavar="N", help="Print the first N rows with their scores."
)
@click.option("--profile-run", metavar="FILE.json", help="Print where the time goes, and write it as a Chrome trace.")
@click.option("--quiet", is_flag=True, help="No progress (a bar, or a line every half minute) and no summary.")
def score(input_path: str, output_path: str, model: str, **options: Any) -> None:
    """Score every row of INPUT and write it with its score to OUTPUT.

    Files are JSON Lines, CSV, TSV (each also in gzip or zstd) or Parquet; '-' is standard input. A .json file may hold
    one array of objects; the output is JSON Lines then. Rows keep their order and all their fields; score, stderr,
    tokens and status are added. Exit code 0: every row scored, or skipped by policy; 3: some rows failed; 2: wrong
    usage, or a file or model that cannot be used; 128 + n: stopped by signal n; 141: the reader of a pipe closed it.
    Rows of a run that did not end stay in OUTPUT.partial; --resume goes on behind them.
    """
    from diffscore_fast.cli.score import run_score

    _refuse_idle(options)
    _run(run_score, input_path, output_path, model, options)


@main.command()
@click.argument("input_path", metavar="FILE")
@click.option(
    "--format",
    "input_format",
    type=click.Choice(FORMATS),
    help="Format of FILE; by its name if not given, else JSON Lines.",
)
@reads_delimited
@runs_model
@click.option("--rows", default=64, show_default=True, help="Rows read, each of the file as likely as another.")
@click.option("--draws", default=20, show_default=True, help="K of the published grid; 20 make 18.")
@click.option("--seed", default=0, show_default=True)
@click.option("--source-column", default="source", show_default=True, help="Field that holds the source.")
@click.option("--candidate-column", default="candidate", show_default=True, help="Field that holds the candidate.")
def calibrate(input_path: str, model: str, **options: Any) -> None:
    """Compare attention `prefix` with `full` on rows of FILE (as for `score`), under common masks.

    Prints rank correlation, mean and worst difference (prefix - full, nats a token) of all rows, by mask ratio and by
    prefix length.
    """
    from diffscore_fast.cli.calibrate import run_calibrate

    _run(run_calibrate, input_path, model, options)


@main.command()
@file_and_model
@click.option("--block-size", default=8, show_default=True, help="L', tokens a block.")
@click.option(
    "--method",
    type=click.Choice(["auto", "exact", "estimate"]),
    default="auto",
    show_default=True,
    help="auto: exact up to block size 8, unless an option of sampling is given.",
)
@click.option("--steps", type=int, help="Parallel generation in that many steps; any-order if not given.")
@click.option("--step-probabilities", help="Comma-separated chances of a token's step; uniform if not given.")
@click.option("--orders", default=32, show_default=True, help="K, sampled orders; at most 100,000.")
@click.option("--surrogate-orders", default=32, show_default=True, help="M, orders of the self surrogate.")
@click.option(
    "--surrogate",
    type=click.Choice(["self", "single", "autoregressive"]),
    default="self",
    show_default=True,
    help="What the tangent is laid at.",
)
@click.option("--plain", is_flag=True, help="Play M orders against K, in place of cross-fitting all K + M.")
@click.option("--folds", type=int, help="Folds of the cross-fitting; every draw by itself if not given.")
@click.option(
    "--order-design",
    type=click.Choice(["independent", "antithetic"]),
    default="independent",
    show_default=True,
    help="antithetic pairs each order with its reverse.",
)
@click.option(
    "--z",
    default=3.0,
    show_default=True,
    help="Standard errors by which intervals are widened, at most 30; with few orders Student's t "
    "quantile that is exceeded as rarely.",
)
@click.option("--seed", default=0, show_default=True, help="Orders follow from the seed and the text's tokens alone.")
@click.option(
    "--autoregressive/--no-autoregressive",
    default=True,
    show_default=True,
    help="Also the log-likelihood of the same network at block size 1.",
)
@click.option("--comparators", is_flag=True, help="Also CUBO, TVO and IS-VG-B: biased, not bounds.")
@click.option("--force", is_flag=True, help="Exact likelihood beyond block size 12, whatever it takes.")
@click.option("--text-column", default="text", show_default=True, help="Field that holds the text.")
@click.option("--output-prefix", default="", help="Put before the names of the fields that are added.")
@click.option("--quiet", is_flag=True, help="No progress (a bar, or a line every half minute) and no summary.")
def bound(input_path: str, output_path: str, model: str, **options: Any) -> None:
    """Bracket the log-likelihood of every text of INPUT (files as for `score`) under a block model.

    Adds lower, upper, their standard errors and the widened interval, in nats a text. Exit codes as for `score`.
    """
    from diffscore_fast.cli.bound import run_bound

    source = click.get_current_context().get_parameter_source
    for name, works, needed in (
        ("surrogate_orders", options["surrogate"] == "self", "--surrogate self"),
        ("force", options["method"] != "estimate", "an exact likelihood; leave out --method estimate"),
    ):
        _refuse_if_idle(name, works, needed)
    given = [name for name in SAMPLING_OPTIONS if source(name) is ParameterSource.COMMANDLINE]
    options["sampling_options"] = ["--" + name.replace("_", "-") for name in given]
    _run(run_bound, input_path, output_path, model, options)


@main.command()
@click.argument("input_paths", metavar="A [B]", nargs=-1, required=True)
@click.option("--candidate-columns", nargs=2, metavar="A B", help="Two systems in one file: the fields that hold them.")
@click.option("--candidate-column", default="candidate", show_default=True, help="Field of the candidate in two files.")
@click.option("--id-column", help="Join the rows of two files by this field; line by line if not given.")
@click.option("--confidence", default=0.95, show_default=True, help="Coverage of the bootstrap interval.")
@click.option("--resamples", default=9999, show_default=True, help="Of the bootstrap and the permutation test.")
@click.option(
    "--differences",
    type=click.IntRange(0),
    default=3,
    show_default=True,
    metavar="N",
    help="Print the N rows that differ most.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object in place of the table.")
def compare(input_paths: tuple[str, ...], model: str, **options: Any) -> None:
    """Compare two systems: two files A and B, or two fields of one file A (--candidate-columns).

    Both are scored alike, with options as for `score`. Prints the mean difference with its paired bootstrap interval,
    the p-value of a paired permutation test, and the rows that differ most. Rows without a score on either side are
    counted and left out of both. Exit codes as for `score`.
    """
    from diffscore_fast.cli.compare import run_compare

    _refuse_idle(options)
    _run(run_compare, input_paths, model, options)


compare.params += [
    option for option in score.params if option.name not in {*FILE_OPTIONS, *(item.name for item in compare.params)}
]


@main.command()
@click.option("--model", help="Also describe this model: a folder, or a name in the local Hugging Face cache.")
def info(model: str | None) -> None:
    """Print versions, devices, models, and which implementation each operation resolves to."""
    from diffscore_fast.cli.info import print_info

    _run(print_info, model)


def _refuse_idle(options: dict[str, Any]) -> None:
    """Refuse an option that was given and would do nothing, so that nobody believes it did."""
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
        ("show", not options.get("quiet"), "the summary; leave out --quiet"),
    ):
        _refuse_if_idle(name, works, needed)


def _refuse_if_idle(name: str, works: bool, needed: str) -> None:
    given = click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE
    if given and not works:
        raise click.UsageError(f"--{name.replace('_', '-')} needs {needed}")


class _Terminated(KeyboardInterrupt):
    """A signal that ends the process: a run leaves its rows as it does when interrupted by hand."""


def _terminate(number: int, frame: Any) -> None:
    raise _Terminated(number)


def _run(command: Callable[..., bool | None], *arguments: Any) -> None:
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores SIGHUP, and means it
            signal.signal(number, _terminate)
    try:
        failed = command(*arguments)
    except BrokenPipeError:  # of the reader of the rows or of the summary: for `Command`
        raise
    except (DiffScoreError, OSError) as error:  # a full disk: what was finished has been named
        with suppress(OSError):
            click.echo(f"diffscore: {in_words(error) if isinstance(error, OSError) else error}", err=True)
        sys.exit(EXIT_UNUSABLE)
    except _Terminated as stopped:
        sys.exit(128 + stopped.args[0])
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        with suppress(OSError):
            click.echo(
                f"diffscore: memory ran out ({reason}); state less with --memory, use a smaller model, or leave "
                "very long rows out",
                err=True,
            )
        sys.exit(EXIT_UNUSABLE)
    sys.exit(EXIT_SOME_FAILED if failed else 0)


if __name__ == "__main__":
    main()
