"""Pruning a word-piece vocabulary to the pieces that a text uses, without losing the ability to encode any word."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from diffscore_fast.errors import InputError
from diffscore_fast.text.tokenizer import TextTokenizer

CONTROL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
CONTINUING = "##"


def count_pieces(text_path: Path, tokenizer: TextTokenizer, lines_per_call: int = 4096) -> np.ndarray:
    """How often each piece occurs in a text file: int64 [V]."""
    counts = np.zeros(tokenizer.vocab_size, dtype=np.int64)
    lines: list[str] = []

    def count() -> None:
        for item in tokenizer.encode(lines):
            counts[:] += np.bincount(item.ids, minlength=len(counts))
        lines.clear()

    with text_path.open(encoding="utf-8") as file:
        for line in file:
            lines.append(line.strip())
            if len(lines) == lines_per_call:
                count()
    count()
    return counts


def choose_pieces(pieces: Sequence[str], counts: np.ndarray, size: int) -> list[str]:
    """`size` of the pieces: control tokens, single characters, pieces that characters cannot spell, then by count.

    WordPiece takes the longest piece that fits, from left to right, and makes the whole word unknown where none fits.
    This cannot happen while every character of the word is a piece of its own: plain at the start, with ## after it. So
    a piece may be dropped only if all its characters are kept in the form that their place needs. A piece such as a
    rare ligature whose ## form does not exist is kept.
    """
    known = set(pieces)
    counted = {piece: int(count) for piece, count in zip(pieces, counts, strict=True)}
    kept = [piece for piece in pieces if piece in CONTROL_TOKENS]
    ordinary = [piece for piece in pieces if not (piece.startswith("[") and piece.endswith("]") and len(piece) > 2)]
    needed = [piece for piece in ordinary if len(piece.removeprefix(CONTINUING)) == 1 or not _spelled(piece, known)]
    rest = sorted(set(ordinary) - set(needed), key=lambda piece: (-counted[piece], piece))
    free = size - len(kept) - len(needed)
    if free < 0:
        raise InputError(f"{size} pieces are too few: control tokens and single characters are {len(kept + needed)}")
    chosen = set(needed) | set(rest[:free])
    return kept + [piece for piece in ordinary if piece in chosen]


def prune_tokenizer(path: Path, pieces: Sequence[str]) -> str:
    """The tokenizer.json at `path` with only `pieces`, renumbered in their order; returns the JSON text.

    The template that adds [CLS] and [SEP] and the length limit go as well: the package adds control tokens itself.
    """
    settings = json.loads(path.read_text(encoding="utf-8"))
    numbers = {piece: number for number, piece in enumerate(pieces)}
    settings["model"]["vocab"] = numbers
    settings["added_tokens"] = [
        {**token, "id": numbers[token["content"]]}
        for token in settings["added_tokens"]
        if token["content"] in CONTROL_TOKENS
    ]
    settings["post_processor"] = settings["truncation"] = settings["padding"] = None
    return json.dumps(settings, ensure_ascii=False, indent=1)


def read_pieces(path: Path) -> list[str]:
    """The pieces of a WordPiece tokenizer.json in the order of their ids."""
    vocabulary = json.loads(path.read_text(encoding="utf-8"))["model"]["vocab"]
    return sorted(vocabulary, key=vocabulary.__getitem__)


def _spelled(piece: str, known: set[str]) -> bool:
    """Whether single-character pieces can stand for the piece at its place in a word."""
    bare = piece.removeprefix(CONTINUING)
    first = bare[0] if bare == piece else CONTINUING + bare[0]
    return first in known and all(CONTINUING + character in known for character in bare[1:])
