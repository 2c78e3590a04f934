"""DiffScorer: text evaluation by masked reconstruction (DiffScore, arXiv 2605.11601)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from diffscore_fast.arguments import checked_column, checked_seed
from diffscore_fast.engine.ragged import offsets_of
from diffscore_fast.engine.random import target_key
from diffscore_fast.engine.runner import Estimator
from diffscore_fast.engine.windows import Attention, Sequences
from diffscore_fast.errors import InputError
from diffscore_fast.estimators.eligible import WithinEligible
from diffscore_fast.estimators.masks import MaskDesign
from diffscore_fast.estimators.reconstruction import (
    MaskedReconstruction,
    ReconstructionConfig,
    ReconstructionResult,
)
from diffscore_fast.model import ScoringModel, portions, token_estimate
from diffscore_fast.references import AGGREGATES, Aggregate, aggregate, expand
from diffscore_fast.results import (
    SCORED,
    ScoreTable,
    Signature,
    TokenScores,
)
from diffscore_fast.rows import RowTokenizer, scored_texts
from diffscore_fast.text.tagger import DEFAULT_TAGGER, MASK_WORDS, MaskWords
from diffscore_fast.text.templates import PLAIN, Template, find_template
from diffscore_fast.text.tokenizer import Encoded

Direction = Literal["marginal", "conditional", "reverse", "bidirectional", "pmi"]
Overlength = Literal["error", "skip", "truncate-source"]

DIRECTIONS = ("marginal", "conditional", "reverse", "bidirectional", "pmi")
OVERLENGTH = ("error", "skip", "truncate-source")
ATTENTIONS = ("full", "prefix")
# Rows are planned in portions of about this many window tokens: a bound on memory, and on what a killed run loses.
TOKENS_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class ScoreConfig:
    """How rows are scored. Field by field as the keyword arguments of `DiffScorer.score`."""

    direction: Direction = "conditional"
    reconstruction: ReconstructionConfig = ReconstructionConfig()
    alpha: float = 0.5
    seed: int = 0
    attention: str = "prefix"
    overlength: Overlength = "error"
    token_scores: bool = False
    template: Template = PLAIN
    aggregate: Aggregate | None = None  # of references, which stand in the source's place; None where there are none
    mask_words: MaskWords = "all"
    tagger: str = DEFAULT_TAGGER

    def __post_init__(self) -> None:
        for value, known, what in (
            (self.direction, DIRECTIONS, "direction"),
            (self.attention, ATTENTIONS, "attention"),
            (self.overlength, OVERLENGTH, "overlength policy"),
            (self.mask_words, MASK_WORDS, "class of words"),
            (self.aggregate, (None, *AGGREGATES), "aggregate"),
        ):
            if value not in known:
                raise InputError(f"{what} {value!r} is unknown; use {', '.join(filter(None, known))}")
        if self.aggregate is not None and not self.needs_source:
            raise InputError("marginal reads no references; use another direction")
        if self.aggregate == "mean" and self.direction == "reverse" and self.token_scores:
            raise InputError("the mean over references scores no single text in reverse; for token scores use max")
        if not 0.0 <= self.alpha <= 1.0:
            raise InputError(f"alpha must lie in [0, 1], not {self.alpha}")
        object.__setattr__(self, "seed", checked_seed(self.seed))

    @property
    def needs_source(self) -> bool:
        return self.direction != "marginal"

    @property
    def context_name(self) -> str:
        """What messages call the text beside the candidate."""
        return "source" if self.aggregate is None else "reference"

    @property
    def kind(self) -> str:
        """What the numbers are; see `ScoreTable`."""
        if self.direction == "pmi":
            return "difference"
        # The best of several noisy lower bounds is none: its expectation may lie above every likelihood.
        bound = self.aggregate == "max" and self.reconstruction.kind == "lower bound"
        return "maximum of lower bounds" if bound else self.reconstruction.kind

    @property
    def passes(self) -> tuple[tuple[str, float], ...]:
        """(simple direction, coefficient) pairs whose sum is the score."""
        if self.direction == "bidirectional":
            return ("conditional", self.alpha), ("reverse", 1.0 - self.alpha)
        if self.direction == "pmi":
            return ("conditional", 1.0), ("marginal", -1.0)
        return ((self.direction, 1.0),)


class DiffScorer(ScoringModel):
    """Scores candidates by masked reconstruction with a masked-diffusion language model.

    Parameters as for `ScoringModel`, without `attention`.

    Raises
    ------
    CheckpointError
        If the model folder is incomplete, damaged, or fails its own check.

    Examples
    --------
    >>> scorer = DiffScorer("mini")
    >>> table = scorer.score(["The cat sat on the mat."], ["A cat sat."], draws=5)
    >>> table.status
    ['ok']
    """

    def score(
        self,
        sources: Sequence[str | None] | None,
        candidates: Sequence[str | None],
        *,
        direction: Direction = "conditional",
        draws: int = 20,
        seed: int = 0,
        estimator: Literal["mean_logprob", "elbo", "weighted"] = "mean_logprob",
        mask_ratios: Literal["grid", "stratified", "uniform"] = "grid",
        masking: Literal["bernoulli", "count"] = "bernoulli",
        levels: int = 10,
        replicates: int | None = None,
        level_weights: Sequence[float] | None = None,
        length_normalised: bool = False,
        alpha: float = 0.5,
        attention: Literal["full", "prefix"] | None = None,
        overlength: Overlength = "error",
        token_scores: bool = False,
        template: str | Path | Template = "plain",
        references: Sequence[Sequence[str | None] | str | None] | None = None,
        aggregate: Aggregate = "max",
        mask_words: MaskWords = "all",
        tagger: str = DEFAULT_TAGGER,
        progress: Callable[[int], None] | None = None,
    ) -> ScoreTable:
        """Score candidates, each against its source.

        Parameters
        ----------
        sources : sequence of str, or None
            One a candidate. None is allowed for `marginal`, which reads no source.
        candidates : sequence of str
            Texts to score. An entry that is None, empty, no text, or too long gets a status and no score.
        direction : {"marginal", "conditional", "reverse", "bidirectional", "pmi"}
            S(c | nothing), S(c | s), S(s | c), alpha * conditional + (1 - alpha) * reverse, or
            conditional - marginal on common masks.
        draws : int
            K, the number of mask draws; the design may make another number, which the signature reports.
        seed : int
            With the target's tokens it determines the masks.
        estimator, level_weights, length_normalised
            See `ReconstructionConfig`.
        mask_ratios, masking, levels, replicates
            See `MaskDesign`.
        alpha : float
            Weight of `conditional` in `bidirectional`.
        attention : {"full", "prefix"}, optional
            `full`: every token sees every token. `prefix`: the source does not see the candidate, and is computed
            once for all its candidates and draws. The model's default if not given.
        overlength : {"error", "skip", "truncate-source"}
            What happens where a text exceeds the model's positions: status `too_long` (the command line counts it
            as failed for "error", as skipped for "skip"), or the end of the source is cut, counted and reported.
            Candidates are never cut.
        token_scores : bool
            Also return the score of every token with the characters it covers.
        template : str, Path or Template
            Words around the two texts: a name (see `diffscore_fast.text.templates`), or a TOML or JSON file.
        references : sequence of lists of str, optional
            Several texts a candidate that stand in the source's place, in place of `sources`: `conditional` is
            S(c | r), `reverse` S(r | c). A reference that is None, empty, no text or too long is left out.
        aggregate : {"max", "mean"}
            The best reference's score, or the mean over references.
        mask_words : {"all", "content", "function", "entities"}
            Mask and score one class of words alone, told by a spaCy model; the other words stay visible.
        tagger : str
            The spaCy model.
        progress : callable, optional
            Called with the number of window tokens just evaluated. What it raises ends the call, and leaves the scorer
            as good as before.

        Returns
        -------
        ScoreTable

        Raises
        ------
        InputError
            For unknown options, unequal lengths, or a bare string where a list belongs.
        DependencyError
            If a class of words is asked for, and spaCy or its model is not installed.
        UnsupportedPatternError
            If the model was not trained with that attention.
        """
        design = MaskDesign(draws, mask_ratios, masking, levels, replicates)
        weights = None if level_weights is None else tuple(float(weight) for weight in level_weights)
        config = ScoreConfig(
            direction, ReconstructionConfig(estimator, design, weights, length_normalised), alpha, seed,
            attention or self.spec.default_pattern, overlength, token_scores, find_template(template),
            None if references is None else aggregate, mask_words, tagger,
        )  # fmt: skip
        self.spec.pattern(config.attention)
        sources = _checked_columns(config, sources, references, candidates)
        tables = list(self.score_batches(zip(sources, candidates, strict=True), config, progress))
        return ScoreTable.join(tables) if tables else self._score_batch([], config, None)

    def score_batches(self, rows: Iterator[tuple[Any, Any]] | Sequence[tuple[Any, Any]], config: ScoreConfig,
                      progress: Callable[[int], None] | None = None) -> Iterator[ScoreTable]:  # fmt: skip
        """Score a stream of (source, candidate) rows in bounded memory: tables of consecutive rows, in order.

        A value may be anything: what is not text becomes a status. The cuts between tables change no score. Where the
        configuration aggregates references, the first value of a row is the list of them.
        """
        draws = config.reconstruction.design.num_draws

        def size_of(row: tuple[Any, Any]) -> int:
            pairs = [row] if config.aggregate is None else expand([row])[0]
            return draws * sum(token_estimate(text) for pair in pairs for text in scored_texts(config, *pair))

        for portion in portions(rows, size_of, TOKENS_AT_ONCE):
            yield self._score_batch(portion, config, progress)

    def _score_batch(self, rows: list[tuple[Any, Any]], config: ScoreConfig,
                     progress: Callable[[int], None] | None) -> ScoreTable:  # fmt: skip
        if config.aggregate is not None:
            pairs, offsets = expand(rows)
            return aggregate(self._score_pairs(pairs, config, progress), pairs, offsets, config.aggregate)
        return self._score_pairs(rows, config, progress)

    @cached_property
    def _rows(self) -> RowTokenizer:
        return RowTokenizer(self._tokenizer)

    def _score_pairs(self, pairs: list[tuple[Any, Any]], config: ScoreConfig,
                     progress: Callable[[int], None] | None) -> ScoreTable:  # fmt: skip
        pattern = self.spec.pattern(config.attention)
        rows = self._rows.tokenise(pairs, config, self._room(config.attention), pattern)
        status = rows.status
        scored = [row for row, state in enumerate(status) if state in SCORED]
        design = config.reconstruction.design
        count, levels = len(status), len(design.level_ratios)
        replicates = np.zeros((len(scored), design.num_replicates))
        profile = np.zeros((len(scored), levels))
        num_tokens = np.zeros(len(scored), dtype=np.int64)
        tokens: TokenScores | None = None
        if scored:
            for index, (direction, coefficient) in enumerate(config.passes):
                contexts, targets = rows.sides(direction, scored)
                result = self._reconstruct(contexts, targets, config, progress)
                replicates += coefficient * result.replicate_scores
                profile += coefficient * result.profile
                if index == 0 or config.direction == "bidirectional":
                    num_tokens += [item.num_eligible for item in targets]
                if config.token_scores:
                    tokens = _token_scores(config, tokens, result, targets, scored, count)
        return ScoreTable(
            scores=_spread(replicates.mean(axis=1) if scored else np.zeros(0), scored, count),
            stderr=_spread(_standard_error(replicates), scored, count),
            num_tokens=_spread(num_tokens, scored, count, fill=0),
            status=status,
            messages=rows.messages,
            truncated_tokens=rows.truncated,
            profile=_spread(profile, scored, count),
            profile_ratios=design.level_ratios,
            kind=config.kind,
            signature=self.signature(config),
            tokens=tokens or (TokenScores.none(count) if config.token_scores else None),
        )

    def signature(self, config: ScoreConfig) -> Signature:
        """What scores under this configuration depend on beside the row."""
        design, by_class = config.reconstruction.design, config.mask_words != "all"
        return Signature(
            **self._identity, direction=config.direction,
            alpha=config.alpha if config.direction == "bidirectional" else None,
            estimator=config.reconstruction.estimator, level_weights=config.reconstruction.level_weights,
            length_normalised=config.reconstruction.length_normalised, masking=design.masking,
            mask_words=config.mask_words if by_class else None,
            tagger=self._rows.tagger(config.tagger).identity if by_class else None,
            ratios=design.ratios, draws=design.num_draws, levels=design.levels, replicates=design.num_replicates,
            seed=config.seed, attention=config.attention,
            template=config.template.name, references=config.aggregate, overlength=config.overlength,
        )  # fmt: skip

    def _reconstruct(self, contexts: list[np.ndarray], targets: list[Encoded], config: ScoreConfig,
                     progress: Callable[[int], None] | None) -> ReconstructionResult:  # fmt: skip
        unique: dict[bytes, int] = {}
        context_of = np.array([unique.setdefault(item.tobytes(), len(unique)) for item in contexts], dtype=np.int64)
        distinct = [np.frombuffer(item, dtype=np.int32) for item in unique]
        sequences = Sequences.build(distinct, context_of, [item.ids for item in targets])
        keys = np.array([target_key(config.seed, item.ids) for item in targets], dtype=np.uint64)

        def build(sequences: Sequences) -> MaskedReconstruction:
            return MaskedReconstruction(config.reconstruction, sequences, keys)

        estimator: Estimator[ReconstructionResult] = build(sequences)
        if config.mask_words != "all":
            eligible = np.concatenate([item.eligible for item in targets])  # type: ignore[misc]
            estimator = WithinEligible(eligible, sequences, build)
        return self._runner.evaluate(estimator, sequences, Attention(config.attention), progress)


def _checked_columns(config: ScoreConfig, sources: Any, references: Any, candidates: Any) -> Sequence[Any]:
    """Validate the columns; returns the sources or references, filled in where the direction reads none."""
    checked_column("candidates", candidates)
    if references is not None:
        if sources is not None:
            raise InputError("references stand in the source's place; give one of the two, and None for sources")
        checked_column("references", references)
        if len(references) != len(candidates):
            raise InputError(f"{len(references)} lists of references but {len(candidates)} candidates")
        return references
    if sources is not None:
        checked_column("sources", sources)
    if sources is None:
        if config.needs_source:
            raise InputError(f"direction {config.direction!r} reads sources; give one a candidate")
        return [None] * len(candidates)
    if len(sources) != len(candidates):
        raise InputError(f"{len(sources)} sources but {len(candidates)} candidates; they are paired one to one")
    return sources


def _standard_error(replicates: np.ndarray) -> np.ndarray:
    """Standard error of the mean over replicates [n, R]; NaN for a single one."""
    count = replicates.shape[1]
    if count < 2:
        return np.full(len(replicates), np.nan)
    return replicates.std(axis=1, ddof=1) / np.sqrt(count)


def _spread(values: np.ndarray, rows: list[int], count: int, fill: float = np.nan) -> np.ndarray:
    """Values of the scored rows among all rows."""
    out = np.full((count, *values.shape[1:]), fill, dtype=values.dtype)
    out[rows] = values
    return out


def _token_scores(config: ScoreConfig, before: TokenScores | None, result: ReconstructionResult,
                  targets: list[Encoded], rows: list[int], count: int) -> TokenScores:  # fmt: skip
    """Token scores of a pass; pmi's are differences, bidirectional's those of its conditional part."""
    if before is not None:
        if config.direction == "bidirectional":
            return before
        difference = before.log_probs - result.token_log_probs
        return TokenScores(before.offsets, before.spans, difference, before.counts)
    lengths = np.zeros(count, dtype=np.int64)
    lengths[rows] = [len(item.ids) for item in targets]
    spans = np.concatenate([item.spans for item in targets])
    return TokenScores(offsets_of(lengths), spans, result.token_log_probs, result.token_counts)
