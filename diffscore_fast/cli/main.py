"""The `diffscore` command: its options, and nothing else. Work happens in the modules it calls."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import click
from click.core import ParameterSource

from diffscore_fast.errors import DiffScoreError
from diffscore_fast.version import __version__

# Options of `bound` that only sampled orders have; giving one asks for an estimate.
SAMPLING_OPTIONS = ("orders", "surrogate_orders", "surrogate", "plain", "folds", "order_design", "z", "seed",
                    "comparators")  # fmt: skip
EXIT_SOME_FAILED = 3
EXIT_UNUSABLE = 2
EXIT_INTERRUPTED = 130


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="diffscore")
def main() -> None:
    """Score text with masked-diffusion language models."""


@main.command()
@click.argument("input_path", metavar="INPUT")
@click.option("-o", "--output", "output_path", required=True, metavar="OUTPUT",
              help="File to write (.gz compresses); '-' is standard output.")  # fmt: skip
@click.option("--model", default="mini", show_default=True, help="Embedded model by name, or a model folder.")
@click.option("--direction", type=click.Choice(["marginal", "conditional", "reverse", "bidirectional", "pmi"]),
              default="conditional", show_default=True,
              help="S(c), S(c|s), S(s|c), alpha S(c|s) + (1 - alpha) S(s|c), or S(c|s) - S(c).")  # fmt: skip
@click.option("--alpha", default=0.5, show_default=True, help="Weight of S(c|s) in bidirectional.")
@click.option(
    "--draws", default=20, show_default=True, help="K, mask draws a text; a grid of 10 levels makes 18 of 20."
)
@click.option("--levels", default=10, show_default=True, help="Mask-ratio levels of the grid and the profile.")
@click.option("--mask-ratios", type=click.Choice(["grid", "stratified", "uniform"]), default="grid", show_default=True,
              help="How the draws choose their mask ratios.")  # fmt: skip
@click.option("--masking", type=click.Choice(["bernoulli", "count"]), default="bernoulli", show_default=True,
              help="Each token independently, or a fixed number of tokens.")  # fmt: skip
@click.option("--replicates", type=int, help="Independent repetitions of the design, for the standard error.")
@click.option("--estimator", type=click.Choice(["mean_logprob", "elbo", "weighted"]), default="mean_logprob",
              show_default=True, help="What is made of the draws.")  # fmt: skip
@click.option("--level-weights", help="For --estimator weighted: comma-separated numbers, one a level.")
@click.option("--seed", default=0, show_default=True, help="Masks follow from the seed and the scored tokens alone.")
@click.option("--attention", type=click.Choice(["full", "prefix"]), help="Default: the model's own (mini: prefix).")
@click.option("--overlength", type=click.Choice(["error", "skip", "truncate-source"]), default="error",
              show_default=True, help="A text beyond the model's length: a failed row, a skipped row, or the end of "
              "the source is cut. Candidates are never cut.")  # fmt: skip
@click.option("--source-column", default="source", show_default=True, help="Field that holds the source.")
@click.option("--candidate-column", default="candidate", show_default=True, help="Field that holds the candidate.")
@click.option("--output-prefix", default="", help="Put before the names of the fields that are added.")
@click.option("--profile", is_flag=True, help="Add the mean log-prob of every mask-ratio level.")
@click.option("--tokens", is_flag=True, help="Add [start, end, log-prob] of every token.")
@click.option("--show", default=0, metavar="N", help="Print the first N rows with their scores.")
@click.option("--token-budget", type=int, help="Tokens evaluated at once: bounds memory only. Default: 4096, or as "
              "--memory allows.")  # fmt: skip
@click.option("--memory", metavar="SIZE", help="What scoring may take beside the loaded model, such as 800M or 2G.")
@click.option("--profile-run", metavar="FILE.json", help="Print where the time goes, and write it as a Chrome trace.")
@click.option("--quiet", is_flag=True, help="No progress and no summary.")
def score(input_path: str, output_path: str, model: str, **options: Any) -> None:
    """Score every row of INPUT, JSON Lines (gzip too; '-' is standard input), and write it with its score to OUTPUT.

    Rows keep their order and all their fields; score, stderr, tokens and status are added. Exit code 0: every row
    scored, or skipped by policy; 3: some rows failed; 2: wrong usage or unusable input, nothing written.
    """
    from diffscore_fast.cli.score import run_score

    _run(run_score, input_path, output_path, model, options)


@main.command()
@click.argument("input_path", metavar="INPUT")
@click.option("-o", "--output", "output_path", required=True, metavar="OUTPUT",
              help="File to write (.gz compresses); '-' is standard output.")  # fmt: skip
@click.option("--model", default="mini", show_default=True, help="Embedded model by name, or a model folder.")
@click.option("--block-size", default=8, show_default=True, help="L', tokens a block.")
@click.option("--method", type=click.Choice(["auto", "exact", "estimate"]), default="auto", show_default=True,
              help="auto: exact up to block size 8, where it is cheaper than sampling, unless an option "
              "of sampling is given.")  # fmt: skip
@click.option("--steps", type=int, help="Parallel generation in that many steps; any-order if not given.")
@click.option("--step-probabilities", help="Comma-separated chances of a token's step; uniform if not given.")
@click.option("--orders", default=32, show_default=True, help="K, sampled orders.")
@click.option("--surrogate-orders", default=32, show_default=True, help="M, orders of the self surrogate.")
@click.option("--surrogate", type=click.Choice(["self", "single", "autoregressive"]), default="self",
              show_default=True, help="What the tangent is laid at.")  # fmt: skip
@click.option("--plain", is_flag=True, help="Play M orders against K, in place of cross-fitting all K + M.")
@click.option("--folds", type=int, help="Folds of the cross-fitting; every draw by itself if not given.")
@click.option("--order-design", type=click.Choice(["independent", "antithetic"]), default="independent",
              show_default=True, help="antithetic pairs each order with its reverse.")  # fmt: skip
@click.option("--z", default=3.0, show_default=True, help="Standard errors by which intervals are widened.")
@click.option("--seed", default=0, show_default=True, help="Orders follow from the seed and the text's tokens alone.")
@click.option("--autoregressive/--no-autoregressive", default=True, show_default=True,
              help="Also the log-likelihood of the same network at block size 1.")  # fmt: skip
@click.option("--comparators", is_flag=True, help="Also CUBO, TVO and IS-VG-B: biased, not bounds.")
@click.option("--force", is_flag=True, help="Exact likelihood beyond block size 12, whatever it takes.")
@click.option("--text-column", default="text", show_default=True, help="Field that holds the text.")
@click.option("--output-prefix", default="", help="Put before the names of the fields that are added.")
@click.option("--token-budget", type=int, help="Tokens evaluated at once: bounds memory only. Default: 4096, or as "
              "--memory allows.")  # fmt: skip
@click.option("--memory", metavar="SIZE", help="What bounding may take beside the loaded model, such as 800M or 2G.")
@click.option("--quiet", is_flag=True, help="No progress and no summary.")
def bound(input_path: str, output_path: str, model: str, **options: Any) -> None:
    """Bracket the log-likelihood of every text of INPUT (JSON Lines, as for `score`) under a block model.

    Adds lower, upper, their standard errors and the widened interval, in nats a text. Exit codes as for `score`.
    """
    from diffscore_fast.cli.bound import run_bound

    source = click.get_current_context().get_parameter_source
    given = [name for name in SAMPLING_OPTIONS if source(name) is ParameterSource.COMMANDLINE]
    options["sampling_options"] = ["--" + name.replace("_", "-") for name in given]
    _run(run_bound, input_path, output_path, model, options)


@main.command()
def info() -> None:
    """Print versions, devices, models, and which implementation each operation resolves to."""
    from diffscore_fast.cli.info import print_info

    print_info()


def _run(command: Callable[[str, str, str, dict[str, Any]], bool], input_path: str, output_path: str, model: str,
         options: dict[str, Any]) -> None:  # fmt: skip
    try:
        failed = command(input_path, output_path, model, options)
    except DiffScoreError as error:
        click.echo(f"diffscore: {error}", err=True)
        sys.exit(EXIT_UNUSABLE)
    except OSError as error:  # a full disk, a broken pipe: what was finished has been named
        click.echo(f"diffscore: {error}", err=True)
        sys.exit(EXIT_UNUSABLE)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    sys.exit(EXIT_SOME_FAILED if failed else 0)


if __name__ == "__main__":
    main()
