"""Text file to token arrays: articles of paragraphs of sentences, as one token array and three offset arrays."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from diffscore_fast.errors import InputError
from diffscore_fast.text.tokenizer import TextTokenizer

# A sentence ends at . ! or ? (with closing quotes or brackets) before white space and an upper-case letter or an
# opening quote. Abbreviations sometimes split a sentence too early, which does not matter for training pairs.
SENTENCE_START = re.compile(r"(?<=[.!?])[\"')\]”’]*\s+(?=[A-Z\"'(“‘])")
ARTICLES_CHUNK = 256
ARRAYS = ("tokens", "sentences", "paragraphs", "articles")


@dataclass(frozen=True)
class Corpus:
    """Tokenised articles; the first paragraph of an article is its title.

    tokens : uint16 [N], all articles end to end, no control tokens
    sentences : int64 [S + 1], token offsets of sentences
    paragraphs : int64 [P + 1], sentence offsets of paragraphs
    articles : int64 [A + 1], paragraph offsets of articles
    first, last : the half-open range of articles that this view may use
    """

    tokens: np.ndarray
    sentences: np.ndarray
    paragraphs: np.ndarray
    articles: np.ndarray
    first: int
    last: int

    def split(self, held_out: float) -> tuple[Corpus, Corpus]:
        """The articles to train on, and the last `held_out` fraction of them, which training never sees."""
        count = self.last - self.first
        border = self.last - max(1, round(count * held_out))
        if border <= self.first:
            raise InputError(f"{count} articles are too few to hold out {held_out:.2%} of them")
        shared = (self.tokens, self.sentences, self.paragraphs, self.articles)
        return Corpus(*shared, self.first, border), Corpus(*shared, border, self.last)

    def num_tokens(self) -> int:
        start, stop = self.article_tokens(self.first)[0], self.article_tokens(self.last - 1)[1]
        return int(stop - start)

    def article_tokens(self, article: int) -> tuple[int, int]:
        """Half-open token range of an article, title included."""
        first, last = self.articles[article], self.articles[article + 1]
        return self.paragraph_tokens(first, last)

    def paragraph_tokens(self, first: int, last: int) -> tuple[int, int]:
        """Half-open token range of paragraphs first..last - 1."""
        return int(self.sentences[self.paragraphs[first]]), int(self.sentences[self.paragraphs[last]])


def prepare_corpus(text_path: Path, tokenizer: TextTokenizer, folder: Path) -> Corpus:
    """Tokenise a text file (blank line between articles, first line a title, one paragraph a line) into `folder`."""
    if tokenizer.vocab_size > np.iinfo(np.uint16).max:
        raise InputError(f"a vocabulary of {tokenizer.vocab_size} does not fit the corpus format's 16 bits per token")
    # A tokenizer that spells white space has a line break after each paragraph; to others it is nothing.
    line_break = tokenizer.encode(["\n"], keep_blank=True)[0].ids.astype(np.uint16)
    tokens: list[np.ndarray] = []
    sentences, paragraphs, articles = [0], [0], [0]
    for texts in _batches(read_articles(text_path), ARTICLES_CHUNK):
        lines = [line for text in texts for line in text]
        encoded = iter(tokenizer.encode(lines))
        for text in texts:
            for line in text:
                item = next(encoded)
                if not len(item.ids):
                    continue
                starts = [match.end() for match in SENTENCE_START.finditer(line)]
                cuts = np.unique(np.searchsorted(item.spans[:, 0], starts))
                cuts = cuts[(cuts > 0) & (cuts < len(item.ids))]
                base = sentences[-1]
                sentences.extend((base + cuts).tolist())
                sentences.append(base + len(item.ids) + len(line_break))
                paragraphs.append(len(sentences) - 1)
                tokens += [item.ids.astype(np.uint16), line_break]
            if len(paragraphs) - 1 > articles[-1]:
                articles.append(len(paragraphs) - 1)
    folder.mkdir(parents=True, exist_ok=True)
    arrays = (np.concatenate(tokens), np.array(sentences), np.array(paragraphs), np.array(articles))
    for name, array in zip(ARRAYS, arrays, strict=True):
        np.save(folder / f"{name}.npy", array)
    return load_corpus(folder)


def load_corpus(folder: Path) -> Corpus:
    """A prepared corpus; the tokens stay on disk and are mapped."""
    if not (folder / "tokens.npy").is_file():
        raise InputError(f"{folder}: no prepared corpus; run `python -m diffscore_fast.training prepare` first")
    tokens = np.load(folder / "tokens.npy", mmap_mode="r")
    sentences, paragraphs, articles = (np.load(folder / f"{name}.npy") for name in ARRAYS[1:])
    return Corpus(tokens, sentences, paragraphs, articles, 0, len(articles) - 1)


def read_articles(path: Path) -> Iterator[list[str]]:
    """Articles as lists of lines."""
    lines: list[str] = []
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.strip():
                lines.append(line.strip())
            elif lines:
                yield lines
                lines = []
    if lines:
        yield lines


def _batches(items: Iterator[list[str]], size: int) -> Iterator[list[list[str]]]:
    batch: list[list[str]] = []
    for item in items:
        batch.append(item)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch
