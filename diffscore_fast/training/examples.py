"""Training examples: a prefix and a window from one article, related in one of several ways."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from diffscore_fast.backbones.spec import PatternName
from diffscore_fast.training.corpus import Corpus

Rng = np.random.Generator
Range = tuple[int, int]  # half-open, of tokens
Pair = tuple[Range, Range]  # prefix, window
MAX_TRIES = 50  # where an article has no such pair (too short, one paragraph), another article is drawn


@dataclass(frozen=True)
class Example:
    """Text to learn from: `window` int64 [W] is predicted, `prefix` int64 [P] is only read.

    `prefix` is empty unless the pattern is `prefix`, or `block` after a prefix. The layout adds the start token.
    `copies` of the window, each under a mask of its own, share one pass of the prefix, as the draws of a score do.
    """

    kind: str
    pattern: PatternName
    block_size: int
    prefix: np.ndarray
    window: np.ndarray
    copies: int = 1


@dataclass(frozen=True)
class Mixture:
    """Shares of patterns, block sizes and pair kinds, and the lengths they are drawn from (log-uniform, inclusive)."""

    patterns: Mapping[PatternName, float] = field(default_factory=lambda: {"full": 0.3, "prefix": 0.35, "block": 0.35})
    block_sizes: Mapping[int, float] = field(default_factory=lambda: {1: 0.5, 4: 0.2, 8: 0.15, 16: 0.15})
    pairs: Mapping[str, float] = field(
        default_factory=lambda: {
            "extract": 0.45,
            "body_to_lead": 0.2,
            "continuation": 0.1,
            "marginal": 0.1,
            "paragraph_to_paragraph": 0.05,
            "lead_to_body": 0.1,
        }
    )
    run_lengths: tuple[int, int] = (64, 320)  # `full` and `block`
    prefix_lengths: tuple[int, int] = (16, 400)
    window_lengths: tuple[int, int] = (16, 160)
    # Block sizes of the windows after a prefix; 0 stands for the whole window at once.
    window_blocks: Mapping[int, float] = field(default_factory=lambda: {0: 1.0})
    copies: int = 3  # masked copies of the window after one prefix, unless it is one of the long ones
    long_share: float = 0.03  # of prefix examples, drawn from the two ranges below instead
    long_prefix_lengths: tuple[int, int] = (1, 2000)
    long_window_lengths: tuple[int, int] = (1, 700)


class ExampleSampler:
    """Draws examples from a corpus. A draw depends on the generator only, not on earlier draws."""

    def __init__(self, corpus: Corpus, mixture: Mixture) -> None:
        self.corpus = corpus
        self.mixture = mixture
        ends = [corpus.article_tokens(article)[1] for article in range(corpus.first, corpus.last)]
        self._first_token = corpus.article_tokens(corpus.first)[0]
        self._ends = np.array(ends)

    def draw(self, rng: Rng) -> Example:
        """One example of a pattern and kind drawn by the mixture's shares."""
        pattern = _choose(rng, self.mixture.patterns)
        if pattern == "prefix":
            return self.draw_pair(rng, _choose(rng, self.mixture.pairs))
        block_size = _choose(rng, self.mixture.block_sizes) if pattern == "block" else 0
        return self.draw_run(rng, pattern, block_size, log_uniform(rng, *self.mixture.run_lengths))

    def draw_run(self, rng: Rng, pattern: PatternName, block_size: int, length: int) -> Example:
        """A run of tokens of one article."""
        start, stop = self.corpus.article_tokens(self._article(rng))
        place = int(rng.integers(start, max(start, stop - length) + 1))
        window = self._tokens(place, min(place + length, stop))
        return Example("run", pattern, block_size, window[:0], window)

    def draw_pair(self, rng: Rng, kind: str) -> Example:
        """A prefix and a window of one article, related as `kind` says."""
        long = rng.random() < self.mixture.long_share
        lengths = self.mixture.long_prefix_lengths if long else self.mixture.prefix_lengths
        window_lengths = self.mixture.long_window_lengths if long else self.mixture.window_lengths
        prefix_limit, window_limit = log_uniform(rng, *lengths), log_uniform(rng, *window_lengths)
        sizes = self.mixture.window_blocks
        block_size = _choose(rng, sizes) if len(sizes) > 1 else next(iter(sizes))
        relation = getattr(self, f"_{kind}")
        for _ in range(MAX_TRIES):
            pair = relation(rng, self._article(rng), prefix_limit, window_limit)
            if pair is not None:
                (prefix_start, prefix_stop), (start, stop) = pair
                prefix, window = self._tokens(prefix_start, prefix_stop), self._tokens(start, stop)
                copies = 1 if long or block_size else self.mixture.copies
                return Example(kind, "block" if block_size else "prefix", block_size, prefix, window, copies)
        raise ValueError(f"no article of the corpus has pairs of kind {kind!r} after {MAX_TRIES} tries")

    # Each relation returns the token ranges of prefix and window, or None where the article has no such pair.

    def _marginal(self, rng: Rng, article: int, prefix_limit: int, window_limit: int) -> Pair | None:
        start, stop = self._sentence_run(rng, *self._article_sentences(article), window_limit)
        return (start, start), (start, stop)

    def _continuation(self, rng: Rng, article: int, prefix_limit: int, window_limit: int) -> Pair | None:
        start, stop = self.corpus.article_tokens(article)
        if stop - start < 16:
            return None
        border = int(rng.integers(start + 1, stop))
        return (max(start, border - prefix_limit), border), (border, min(border + window_limit, stop))

    def _body_to_lead(self, rng: Rng, article: int, prefix_limit: int, window_limit: int) -> Pair | None:
        lead, last = self._own_paragraphs(article)
        if last - lead < 2:
            return None
        return self._paragraph_run(rng, lead + 1, last, prefix_limit), self._head(lead, lead + 1, window_limit)

    def _lead_to_body(self, rng: Rng, article: int, prefix_limit: int, window_limit: int) -> Pair | None:
        lead, last = self._own_paragraphs(article)
        if last - lead < 2:
            return None
        return self._head(lead, lead + 1, prefix_limit), self._paragraph_run(rng, lead + 1, last, window_limit)

    def _paragraph_to_paragraph(self, rng: Rng, article: int, prefix_limit: int, window_limit: int) -> Pair | None:
        first, last = self._own_paragraphs(article)
        if last - first < 2:
            return None
        one, other = rng.choice(last - first, size=2, replace=False) + first
        return self._head(one, one + 1, prefix_limit), self._head(other, other + 1, window_limit)

    def _extract(self, rng: Rng, article: int, prefix_limit: int, window_limit: int) -> Pair | None:
        """A run of paragraphs, then consecutive sentences of it: teaches to find content in the prefix."""
        first, last = self._own_paragraphs(article)
        if last <= first:
            return None
        start, stop = self._paragraph_run(rng, first, last, prefix_limit)
        inside = np.searchsorted(self.corpus.sentences, [start, stop - 1], side="right") - 1
        window = self._sentence_run(rng, int(inside[0]), int(inside[1]) + 1, window_limit)
        return (start, stop), (max(window[0], start), min(window[1], stop))

    def _own_paragraphs(self, article: int) -> tuple[int, int]:
        """Half-open range of an article's paragraphs after the title; the first of them is the lead."""
        return int(self.corpus.articles[article]) + 1, int(self.corpus.articles[article + 1])

    def _article_sentences(self, article: int) -> tuple[int, int]:
        paragraphs = self.corpus.articles[article : article + 2]
        first = paragraphs[0] + 1 if paragraphs[1] - paragraphs[0] > 1 else paragraphs[0]  # not the title, if it can be
        return int(self.corpus.paragraphs[first]), int(self.corpus.paragraphs[paragraphs[1]])

    def _sentence_run(self, rng: Rng, first: int, last: int, limit: int) -> tuple[int, int]:
        """Whole sentences from a random one of first..last - 1 on, at most `limit` tokens (one is cut if longer)."""
        offsets = self.corpus.sentences
        begin = int(rng.integers(first, last))
        end = int(np.searchsorted(offsets[begin : last + 1], offsets[begin] + limit, side="right")) - 1 + begin
        return int(offsets[begin]), int(min(offsets[max(end, begin + 1)], offsets[begin] + limit))

    def _paragraph_run(self, rng: Rng, first: int, last: int, limit: int) -> tuple[int, int]:
        """`limit` tokens from the start of a random paragraph of first..last - 1 on, fewer where the text ends."""
        return self._head(int(rng.integers(first, last)), last, limit)

    def _head(self, first: int, last: int, limit: int) -> tuple[int, int]:
        start, stop = self.corpus.paragraph_tokens(first, last)
        return start, min(stop, start + limit)

    def _article(self, rng: Rng) -> int:
        """An article, with probability proportional to its length."""
        place = rng.integers(self._first_token, self._ends[-1])
        return self.corpus.first + int(np.searchsorted(self._ends, place, side="right"))

    def _tokens(self, start: int, stop: int) -> np.ndarray:
        return self.corpus.tokens[start:stop].astype(np.int64)


def log_uniform(rng: Rng, low: int, high: int) -> int:
    """An integer whose logarithm is uniform between those of `low` and `high` (inclusive)."""
    return min(high, int(np.exp(rng.uniform(np.log(low), np.log(high + 1)))))


def _choose(rng: Rng, shares: Mapping):
    names = list(shares)
    weights = np.array([shares[name] for name in names])
    return names[int(rng.choice(len(names), p=weights / weights.sum()))]
