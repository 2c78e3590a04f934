from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffscore_fast.backbones.config import EMBEDDED_MODELS
from diffscore_fast.errors import InputError
from diffscore_fast.text.tokenizer import TextTokenizer
from diffscore_fast.training.vocabulary import CONTROL_TOKENS, choose_pieces, prune_tokenizer, read_pieces

WHOLE = EMBEDDED_MODELS["mini"] / "tokenizer.json"


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """The embedded model's tokenizer, and one pruned as far as it goes plus a hundred pieces."""
    pieces = read_pieces(WHOLE)
    counts = np.random.default_rng(0).integers(0, 1000, len(pieces))
    with pytest.raises(InputError, match="too few"):
        choose_pieces(pieces, counts, 10)
    single = [piece for piece in pieces if len(piece.removeprefix("##")) == 1]
    kept = choose_pieces(pieces, counts, len(single) + len(CONTROL_TOKENS) + 700)
    assert set(single) <= set(kept)
    assert kept[:5] == list(CONTROL_TOKENS)
    path = tmp_path_factory.mktemp("pruned") / "tokenizer.json"
    path.write_text(prune_tokenizer(WHOLE, kept), encoding="utf-8")
    assert len(kept) < len(pieces) - 1000
    return TextTokenizer(WHOLE, "[MASK]", "[CLS]"), TextTokenizer(path, "[MASK]", "[CLS]")


def unknown_words(tokenizer: TextTokenizer, text: str) -> list[tuple[int, int]]:
    unknown = json.loads(tokenizer._tokenizer.to_str())["model"]["vocab"]["[UNK]"]
    encoded = tokenizer.encode([text])[0]
    return [tuple(span) for span, index in zip(encoded.spans.tolist(), encoded.ids, strict=True) if index == unknown]


@settings(max_examples=50, deadline=None)
@given(st.text(st.characters(codec="utf-8", max_codepoint=0x30FF), max_size=40))
def test_pruning_makes_no_word_unknown(tokenizers, text):
    whole, pruned = tokenizers
    assert unknown_words(pruned, text) == unknown_words(whole, text)


def test_the_most_frequent_pieces_stay():
    pieces = [*CONTROL_TOKENS, "[unused1]", "a", "b", "##a", "##b", "ab", "ba", "aba", "##bb", "cat"]
    counts = np.array([9, 9, 9, 9, 9, 9, 1, 1, 1, 1, 5, 7, 6, 2, 0])
    # "cat" cannot be spelled without c and t as pieces, so it stays although it never occurs.
    assert choose_pieces(pieces, counts, 12) == [*CONTROL_TOKENS, "a", "b", "##a", "##b", "ba", "aba", "cat"]
