"""Texts that are too long are found from their beginning; what is not too long is never called so."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from diffscore_fast import DiffScorer, LikelihoodBounds
from diffscore_fast.backbones.config import EMBEDDED_MODELS
from diffscore_fast.text.tokenizer import _PARTING_PATTERNS, TextTokenizer

MAX_TOKENS = 60
WORDS = [
    "cat",
    "sat",
    "unbelievable",
    "naïve",
    "Ångström",
    "x²",
    "3,000",
    "don't",
    "猫が",
    "e\u0301",
    "ΟΔΟΣ",
    "a\u200bb",
    "🙂",
]
GAPS = [" ", "  ", "\n", " \t ", "\u00a0", ". ", " - ", "\u0301 "]


@pytest.fixture(scope="module")
def mini():
    return TextTokenizer(EMBEDDED_MODELS["mini"] / "tokenizer.json", "[MASK]", "[CLS]")


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    """Byte-level BPE as GPT-2 has it, whose vocabulary joins a space to the letter behind it."""
    return made(tmp_path_factory, pre_tokenizers.ByteLevel(add_prefix_space=False))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """The same with Qwen 2's pattern."""
    split = pre_tokenizers.Split(Regex(_PARTING_PATTERNS[0]), "isolated")
    return made(tmp_path_factory, pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)]))


def made(tmp_path_factory, parts) -> TextTokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*letters, "Ġc", "Ġca", "at", "<mask>"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("Ġ", "c"), ("Ġc", "a"), ("a", "t")]))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = parts
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(tokenizer.to_str())
    return TextTokenizer(path, "<mask>", None)


def hostile_text(seed: int) -> str:
    generator = random.Random(seed)
    count = generator.randrange(1, 400)
    gaps = generator.choices(GAPS, [10] + [1] * 7, k=count)
    pieces = [word + gap for word, gap in zip(generator.choices(WORDS, k=count), gaps, strict=True)]
    if seed % 4 == 0:  # many characters, few tokens
        pieces[len(pieces) // 2 : len(pieces) // 2] = [" " * 3000, "q" * 3000]
    return "".join(pieces)


@pytest.mark.parametrize("name", ["mini", "byte_level", "qwen"])
def test_a_beginning_has_the_tokens_of_the_whole_and_only_a_long_text_has_one(request, name):
    tokenizer = request.getfixturevalue(name)
    assert tokenizer._parts_at_borders
    texts = [hostile_text(seed) for seed in range(300)]
    cut = 0
    for item, whole in zip(tokenizer.encode_up_to(texts, MAX_TOKENS), tokenizer.encode(texts), strict=True):
        assert (len(item.ids) > MAX_TOKENS) == (len(whole.ids) > MAX_TOKENS)
        assert item.ids.tolist() == whole.ids[: len(item.ids)].tolist()
        assert item.spans.tolist() == whole.spans[: len(item.ids)].tolist()
        assert item.is_beginning or len(item.ids) == len(whole.ids)
        assert not item.is_beginning or len(item.ids) == MAX_TOKENS + 1
        cut += item.is_beginning
    assert cut > 50


@pytest.mark.parametrize("name", ["mini", "byte_level", "qwen"])
def test_a_batch_has_the_tokens_of_each_text_alone_with_and_without_their_characters(request, name):
    tokenizer = request.getfixturevalue(name)
    texts = ["", " ", *(hostile_text(seed) for seed in range(40)), "\n", "[MASK] <mask>", "end"]
    batch, without = tokenizer.encode(texts), tokenizer.encode(texts, spans=False)
    for text, item, bare in zip(texts, batch, without, strict=True):
        alone = tokenizer._tokenizer.encode(text if text.strip() else "", add_special_tokens=False)
        assert item.ids.tolist() == bare.ids.tolist() == alone.ids and item.ids.dtype == bare.ids.dtype == np.int32
        assert [tuple(span) for span in item.spans.tolist()] == alone.offsets and bare.spans.shape == (0, 2)
    blank = tokenizer.encode([" "], keep_blank=True)[0]
    assert blank.ids.tolist() == tokenizer._tokenizer.encode(" ", add_special_tokens=False).ids


def test_many_characters_may_be_few_tokens(mini):
    for text in ("a" + " " * 200_000 + "b", "q" * 200_000, "word " + "\u200b" * 100_000 + " a b", " " * 100_000):
        (item,), (whole,) = mini.encode_up_to([text], MAX_TOKENS), mini.encode([text])
        assert len(whole.ids) <= MAX_TOKENS and item.ids.tolist() == whole.ids.tolist() and not item.is_beginning


def test_an_unknown_tokenizer_reads_the_whole_text(tmp_path):
    """A vocabulary whose pieces may reach over a space gives no certainty."""
    stored = json.loads((EMBEDDED_MODELS["mini"] / "tokenizer.json").read_text(encoding="utf-8"))
    unknown_splits = {"type": "Split", "pattern": {"Regex": "x"}, "behavior": "Isolated", "invert": False}
    spaced = {**stored["added_tokens"][0], "content": "a b", "special": False, "id": 30_000_000}
    for change in (
        {"pre_tokenizer": None},
        {"pre_tokenizer": unknown_splits},
        {"normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": ""}},
        {"added_tokens": [*stored["added_tokens"], spaced]},
    ):
        content = json.dumps({**stored, **change})
        tokenizer = TextTokenizer(tmp_path / "tokenizer.json", "[MASK]", "[CLS]", content=content)
        assert not tokenizer._parts_at_borders
        assert not tokenizer.encode_up_to(["the cat sat " * 1000], MAX_TOKENS)[0].is_beginning


def test_rows_and_bounds_say_so_and_a_cut_source_is_counted_whole(monkeypatch):
    scorer, bounds = DiffScorer("mini"), LikelihoodBounds("mini", block_size=4)
    read: list[int] = []
    plain = TextTokenizer.encode

    def encode(self, texts, **options):
        read.extend(len(text) for text in texts)
        return plain(self, texts, **options)

    monkeypatch.setattr(TextTokenizer, "encode", encode)
    huge = "the cat sat on the mat " * 100_000
    table = scorer.score([huge, "A cat."], ["A cat.", huge], draws=1)
    assert table.status == ["too_long", "too_long"]
    assert table.messages == [
        "the source has more than 2047 tokens, there is room for 2047",
        "the candidate has more than 2047 tokens, the model takes 2047",
    ]
    assert bounds.exact([huge]).messages == ["the text has more than 2047 tokens, the model takes 2047"]
    assert max(read) < 40_000
    source = "the cat sat on the mat " * 2_000
    cut = scorer.score([source], ["A cat."], draws=1, overlength="truncate-source")
    assert cut.status == ["truncated_source"] and cut.truncated_tokens.tolist() == [12_000 - 2047]
    short = scorer.score(["the cat sat on the mat " * 341 + "the"], ["A cat."], draws=1)
    assert short.status == ["ok"] and short.scores[0] == pytest.approx(cut.scores[0], abs=1e-5)
