"""The options of the commands, in groups. Choices and defaults come from `diffscore_fast.options`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from diffscore_fast.io.dialect import QUOTINGS
from diffscore_fast.io.files import FORMATS
from diffscore_fast.options import (
    AGGREGATES,
    ATTENTION_OPTIONS,
    COUPLINGS,
    DEFAULT_AGGREGATE,
    DEFAULT_ALPHA,
    DEFAULT_BLOCK_SIZE,
    DEFAULT_CALIBRATION_DRAWS,
    DEFAULT_CALIBRATION_ROWS,
    DEFAULT_CONFIDENCE,
    DEFAULT_DEVICE,
    DEFAULT_DIFFERENCES,
    DEFAULT_DIRECTION,
    DEFAULT_DRAWS,
    DEFAULT_ENGINE,
    DEFAULT_ESTIMATOR,
    DEFAULT_IMPLEMENTATION,
    DEFAULT_LEVELS,
    DEFAULT_MASK_RATIOS,
    DEFAULT_MASK_WORDS,
    DEFAULT_MASKING,
    DEFAULT_MAX_DRAWS,
    DEFAULT_METHOD,
    DEFAULT_MODEL,
    DEFAULT_ORDER_DESIGN,
    DEFAULT_ORDERS,
    DEFAULT_OVERLENGTH,
    DEFAULT_RESAMPLES,
    DEFAULT_SEED,
    DEFAULT_SURROGATE,
    DEFAULT_SURROGATE_ORDERS,
    DEFAULT_TAGGER,
    DEFAULT_TEMPLATE,
    DEFAULT_Z,
    DIRECTIONS,
    DTYPES,
    ENGINES,
    ESTIMATORS,
    MASK_RATIOS,
    MASK_WORDS,
    MASKINGS,
    MAX_AUTO_EXACT_BLOCK_SIZE,
    MAX_DRAWS,
    MAX_EXACT_BLOCK_SIZE,
    MAX_LEVELS,
    MAX_ORDERS,
    MAX_Z,
    METHODS,
    ORDER_DESIGNS,
    OVERLENGTH_POLICIES,
    SURROGATES,
)
from diffscore_fast.text.templates import TEMPLATES

CommandFunction = TypeVar("CommandFunction", bound=Callable[..., Any])
Decorator = Callable[[CommandFunction], CommandFunction]


def group(*options: Decorator) -> Decorator:
    """One decorator for several options, which `--help` lists in this order."""

    def add(command: CommandFunction) -> CommandFunction:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def _option(name: str, help_text: str | None = None, **settings: Any) -> Decorator:
    """An option whose default is shown."""
    return click.option(name, show_default="default" in settings, help=help_text, **settings)


def _standard_output(context: click.Context, option: click.Parameter, path: str) -> str:
    """Standard output by its other names, which must not be taken for files."""
    return "-" if path in ("/dev/stdout", "/dev/fd/1", "/proc/self/fd/1") else path


def _input_format(name: str) -> Decorator:
    return click.option(
        "--format",
        "input_format",
        type=click.Choice(FORMATS),
        help=f"Format of {name}. Default: by the file's name, else JSON Lines.",
    )


model_options = group(
    _option("--model", "Embedded model, folder, or name in the local Hugging Face cache.", default=DEFAULT_MODEL),
    _option(
        "--device",
        "Where the model runs: cpu, cuda or cuda:N (AMD's GPUs too). `diffscore info` lists the devices.",
        default=DEFAULT_DEVICE,
    ),
    _option(
        "--dtype",
        "dtype of weights and hidden states. Default: float32 on a CPU; on a GPU the checkpoint's own. bfloat16 is "
        "about 3 times as fast on a CPU with units for it, and moves scores by 0.002 to 0.005 nats per token (root "
        "mean square). int8 is for scores on CPUs with AVX-512 VNNI.",
        type=click.Choice(DTYPES),
    ),
    _option(
        "--implementation",
        "cpu, triton, flash_attn or reference: runs every operation that has it; the others run by auto.",
        default=DEFAULT_IMPLEMENTATION,
        metavar="NAME",
    ),
    _option(
        "--adapter",
        "Folder of a LoRA adapter in PEFT's layout (safetensors), merged into a model with Llama's layers.",
        metavar="FOLDER",
    ),
    _option(
        "--memory",
        "Memory for scoring besides the loaded model, such as 800M or 2G. It changes no number on a CPU, and only "
        "rounding on a GPU.",
        metavar="SIZE",
    ),
    _option(
        "--token-budget",
        "Tokens per forward pass: limits memory. Default: 4096 (16384 on a GPU), or what --memory allows.",
        type=int,
    ),
)

delimited_options = group(
    _option(
        "--delimiter",
        "Character between the fields of CSV or TSV, such as ';'. Default: that of a first line such as sep=; or "
        "else a comma or tab.",
        metavar="CHARACTER",
    ),
    _option(
        "--quoting",
        "How CSV or TSV is written. rfc4180: fields may stand in quotes. none: a line is a row, every character "
        r"stands for itself. escaped: a line is a row, \t \n \r \\ stand for tab, line ends and backslash. auto: "
        "rfc4180 for CSV, none for TSV (escaped for TSV that is made from another format).",
        type=click.Choice(QUOTINGS),
        default="auto",
    ),
)

input_paths = click.argument("input_paths", metavar="INPUT...", nargs=-1, required=True)

# What `score` and `bound` read, write and run.
file_options = group(
    click.option(
        "-o",
        "--output",
        "output_path",
        required=True,
        metavar="OUTPUT",
        callback=_standard_output,
        help="File to write (.gz and .zst compress); '-' is standard output.",
    ),
    _input_format("INPUT"),
    click.option(
        "--output-format",
        type=click.Choice(FORMATS),
        help="Format of OUTPUT. Default: by the file's name, else that of INPUT.",
    ),
    click.option(
        "--resume",
        is_flag=True,
        help="Continue a stopped run of the same command after its last finished row (JSON Lines, CSV, TSV); without "
        "one, start at the first row.",
    ),
    delimited_options,
    model_options,
)

_output_prefix = click.option("--output-prefix", default="", help="Prefix of the names of the added fields.")
_quiet = click.option("--quiet", is_flag=True, help="No progress (a bar, or a line every half minute), no summary.")
_candidate_column = _option("--candidate-column", "Field that holds the candidate.", default="candidate")
_source_column = _option("--source-column", "Field that holds the source.", default="source")

# What `score` and `compare` compute.
score_options = group(
    _option(
        "--direction",
        "S(c), S(c|s), S(s|c), alpha S(c|s) + (1 - alpha) S(s|c), or S(c|s) - S(c).",
        type=click.Choice(DIRECTIONS),
        default=DEFAULT_DIRECTION,
    ),
    _option("--alpha", "Weight of S(c|s) in bidirectional.", default=DEFAULT_ALPHA),
    _option(
        "--draws",
        f"K, mask draws per text, at most {MAX_DRAWS:,}; an independent grid makes 18 for K = 20. A text with at most "
        "K masks is scored by all of them.",
        default=DEFAULT_DRAWS,
    ),
    _option(
        "--levels", f"Mask-ratio levels of the grid and the profile; at most {MAX_LEVELS:,}.", default=DEFAULT_LEVELS
    ),
    _option(
        "--mask-ratios",
        "How the draws choose their mask ratios.",
        type=click.Choice(MASK_RATIOS),
        default=DEFAULT_MASK_RATIOS,
    ),
    _option(
        "--masking",
        "bernoulli: each token independently. count: a fixed number of tokens.",
        type=click.Choice(MASKINGS),
        default=DEFAULT_MASKING,
    ),
    _option(
        "--coupling",
        "balanced: all tokens are masked about equally often, and replicates correct each other. independent: as "
        "published. Default: balanced, except for uniform mask ratios.",
        type=click.Choice(COUPLINGS),
    ),
    _option("--replicates", "Independent repetitions of the design, for the standard error.", type=int),
    _option(
        "--target-stderr",
        "Standard error to aim at: a pilot sets the number of draws of each row.",
        type=float,
        metavar="X",
    ),
    _option("--max-draws", "For --target-stderr: the largest number of draws of a row.", default=DEFAULT_MAX_DRAWS),
    _option(
        "--estimator",
        "mean_logprob: mean log-prob of the masked tokens. elbo: weighted 1/t, for a lower bound on the "
        "log-likelihood. weighted: by --level-weights.",
        type=click.Choice(ESTIMATORS),
        default=DEFAULT_ESTIMATOR,
    ),
    _option("--level-weights", "For --estimator weighted: comma-separated numbers, one per level."),
    _option("--seed", "Masks follow from the seed and the scored tokens alone.", default=DEFAULT_SEED),
    _option(
        "--item-column",
        "Field with the item of a row (its document or question; may be the source's field): outputs for one item "
        "share their masks place by place, so that their difference is less noisy. compare: by default the source, or "
        "where none is read the row.",
    ),
    _option(
        "--attention",
        "Attention pattern; default: block with --block-size, otherwise the model's own (mini: prefix). corrected is "
        "no pattern: it estimates the score under full from draws under prefix, of which some are read under full, "
        "too.",
        type=click.Choice(ATTENTION_OPTIONS),
    ),
    _option(
        "--block-size",
        "For --attention block: tokens per block; a masked token sees the source, earlier blocks unmasked, and its own "
        "block. Default: the model's own.",
        type=click.IntRange(min=1),
    ),
    _option(
        "--full-draws", "For --attention corrected: number of draws that are read under full, or auto.", metavar="J"
    ),
    _option(
        "--template",
        f"Words around the two texts: {', '.join(TEMPLATES)}, or a TOML or JSON file with the texts forward "
        "and reverse.",
        default=DEFAULT_TEMPLATE,
        metavar="NAME|FILE",
    ),
    _option(
        "--mask-words",
        "Mask and score only one class of words (needs spaCy).",
        type=click.Choice(MASK_WORDS),
        default=DEFAULT_MASK_WORDS,
    ),
    _option("--tagger", "spaCy model that finds the class of words.", default=DEFAULT_TAGGER),
    _option("--references-column", "Field with a list of references, which take the place of the source."),
    _option(
        "--aggregate",
        "Score of a row with references: the largest, or the mean.",
        type=click.Choice(AGGREGATES),
        default=DEFAULT_AGGREGATE,
    ),
    _option(
        "--overlength",
        "Texts that are too long for the model: a failed row, a skipped row, or the end of the source is cut. "
        "Candidates are never cut.",
        type=click.Choice(OVERLENGTH_POLICIES),
        default=DEFAULT_OVERLENGTH,
    ),
    _source_column,
)

worker_options = group(
    _option(
        "--cache",
        "File that keeps scores across runs (SQLite; made if it is not there): rows that were scored before under the "
        "same signature, instruction set and versions are taken from it. On a local disk; several runs may share it.",
        metavar="FILE",
    ),
    _option(
        "--workers",
        "Processes that score, each with a model of its own (with --device cuda, one per GPU). On a CPU the output is "
        "the same, byte for byte.",
        default=1,
        type=click.IntRange(min=1),
        metavar="N",
    ),
    _option(
        "--engine",
        "What the workers are: processes of this machine, or actors of a Ray cluster (needs the extra `ray`).",
        type=click.Choice(ENGINES),
        default=DEFAULT_ENGINE,
    ),
    _option(
        "--address",
        "For --engine ray: of the cluster. Default: the one that RAY_ADDRESS or this machine has, or else a new local "
        "one.",
        metavar="ADDRESS",
    ),
    click.option(
        "--allow-mixed",
        is_flag=True,
        help="Take workers with different instruction sets or kernels, whose scores agree to 1e-5 nats per token.",
    ),
)

# What `score` writes and prints.
score_output_options = group(
    _candidate_column,
    _output_prefix,
    click.option("--profile", is_flag=True, help="Add the mean log-prob of every mask-ratio level."),
    click.option("--tokens", is_flag=True, help="Add [start, end, log-prob] of every token."),
    click.option(
        "--heatmap",
        metavar="FILE",
        help="Write an HTML page of the first 200 rows, coloured by token score; '-' prints the first 20 to the "
        "terminal.",
    ),
    _option("--show", "Print the first N rows with their scores.", default=0, type=click.IntRange(0), metavar="N"),
    click.option("--profile-run", metavar="FILE.json", help="Print the time by stage, and write it as a Chrome trace."),
    _quiet,
)

calibrate_options = group(
    click.argument("input_path", metavar="FILE"),
    _input_format("FILE"),
    delimited_options,
    model_options,
    _option("--rows", "Size of the random sample of rows.", default=DEFAULT_CALIBRATION_ROWS),
    _option("--draws", "K of the published grid; 20 make 18 draws.", default=DEFAULT_CALIBRATION_DRAWS),
    _option("--seed", "Of the sample and of the masks.", default=DEFAULT_SEED),
    _source_column,
    _candidate_column,
)

bound_options = group(
    _option(
        "--block-size",
        f"L', tokens per block; default: {DEFAULT_BLOCK_SIZE}, or the model's own if it lacks that.",
        type=int,
    ),
    _option(
        "--method",
        f"auto: exact up to block size {MAX_AUTO_EXACT_BLOCK_SIZE}, unless an option of sampling is given.",
        type=click.Choice(METHODS),
        default=DEFAULT_METHOD,
    ),
    _option("--steps", "Parallel generation in this number of steps. Default: any-order generation.", type=int),
    _option("--step-probabilities", "Comma-separated probabilities of a token's step. Default: uniform."),
    _option("--orders", f"K, sampled orders; at most {MAX_ORDERS:,}.", default=DEFAULT_ORDERS),
    _option("--surrogate-orders", "M, orders of the self surrogate.", default=DEFAULT_SURROGATE_ORDERS),
    _option(
        "--surrogate",
        "Surrogate of the upper bound: the mean of other orders, one other order, or the same network at block size 1.",
        type=click.Choice(SURROGATES),
        default=DEFAULT_SURROGATE,
    ),
    click.option(
        "--plain", is_flag=True, help="No cross-fitting: the mean of M orders is the surrogate for the other K."
    ),
    _option("--folds", "Folds of the cross-fitting. Default: every draw is a fold.", type=int),
    _option(
        "--order-design",
        "antithetic pairs each order with its reverse.",
        type=click.Choice(ORDER_DESIGNS),
        default=DEFAULT_ORDER_DESIGN,
    ),
    _option(
        "--z",
        f"Standard errors by which intervals are widened, at most {MAX_Z:g}; for few orders, the quantile of Student's "
        "t with the same tail probability.",
        default=DEFAULT_Z,
    ),
    _option("--seed", "Orders follow from the seed and the text's tokens alone.", default=DEFAULT_SEED),
    click.option(
        "--autoregressive/--no-autoregressive",
        default=None,
        help="Also the log-likelihood under the same network at block size 1; default: if the model has that size.",
    ),
    click.option("--comparators", is_flag=True, help="Also CUBO, TVO and IS-VG-B: biased, not bounds."),
    click.option(
        "--force", is_flag=True, help=f"Exact likelihood beyond block size {MAX_EXACT_BLOCK_SIZE}, whatever it costs."
    ),
    _option("--text-column", "Field that holds the text.", default="text"),
    _output_prefix,
    _quiet,
)
# Options of `bound` that only sampled orders have: giving one asks for an estimate.
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

compare_options = group(
    click.argument("input_paths", metavar="A [B]", nargs=-1, required=True),
    click.option(
        "--candidate-columns", nargs=2, metavar="A B", help="Two systems in one file: the fields that hold them."
    ),
    _option("--candidate-column", "Field that holds the candidate, in two files.", default="candidate"),
    _option("--id-column", "Join the rows of two files by this field. Default: line by line."),
    _option("--confidence", "Coverage of the bootstrap interval.", default=DEFAULT_CONFIDENCE),
    _option("--resamples", "Of the bootstrap and of the permutation test.", default=DEFAULT_RESAMPLES),
    _option(
        "--differences",
        "Print the N rows that differ most.",
        type=click.IntRange(0),
        default=DEFAULT_DIFFERENCES,
        metavar="N",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table."),
    _input_format("A and B"),
    delimited_options,
    model_options,
)
