"""DiffScorer: text evaluation by masked reconstruction (DiffScore, arXiv 2605.11601)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from diffscore_fast.arguments import checked_column, checked_seed
from diffscore_fast.engine.profile import stage
from diffscore_fast.engine.ragged import offsets_of
from diffscore_fast.engine.random import target_key
from diffscore_fast.engine.windows import Attention, Sequences
from diffscore_fast.errors import InputError
from diffscore_fast.estimators.masks import MaskDesign
from diffscore_fast.estimators.reconstruction import (
    MaskedReconstruction,
    ReconstructionConfig,
    ReconstructionResult,
)
from diffscore_fast.model import ScoringModel, portions, token_estimate
from diffscore_fast.results import (
    EMPTY_CANDIDATE,
    EMPTY_SOURCE,
    OK,
    SCORED,
    TOO_LONG,
    TRUNCATED_SOURCE,
    ScoreTable,
    Signature,
    TokenScores,
)
from diffscore_fast.text.checks import check_text
from diffscore_fast.text.tokenizer import Encoded

Direction = Literal["marginal", "conditional", "reverse", "bidirectional", "pmi"]
Overlength = Literal["error", "skip", "truncate-source"]

DIRECTIONS = ("marginal", "conditional", "reverse", "bidirectional", "pmi")
OVERLENGTH = ("error", "skip", "truncate-source")
ATTENTIONS = ("full", "prefix")
# Rows are planned in portions of at most about this many tokens: a bound on memory, and on what a killed run loses.
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

    def __post_init__(self) -> None:
        for value, known, what in (
            (self.direction, DIRECTIONS, "direction"),
            (self.attention, ATTENTIONS, "attention"),
            (self.overlength, OVERLENGTH, "overlength policy"),
        ):
            if value not in known:
                raise InputError(f"{what} {value!r} is unknown; use {', '.join(known)}")
        if not 0.0 <= self.alpha <= 1.0:
            raise InputError(f"alpha must lie in [0, 1], not {self.alpha}")
        object.__setattr__(self, "seed", checked_seed(self.seed))

    @property
    def needs_source(self) -> bool:
        return self.direction != "marginal"

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
        progress : callable, optional
            Called with the number of window tokens just evaluated; it must not call the scorer.

        Returns
        -------
        ScoreTable

        Raises
        ------
        InputError
            For unknown options, unequal lengths, or a bare string where a list belongs.
        UnsupportedPatternError
            If the model was not trained with that attention.
        """
        design = MaskDesign(draws, mask_ratios, masking, levels, replicates)
        weights = None if level_weights is None else tuple(float(weight) for weight in level_weights)
        config = ScoreConfig(
            direction, ReconstructionConfig(estimator, design, weights, length_normalised), alpha, seed,
            attention or self.spec.default_pattern, overlength, token_scores,
        )  # fmt: skip
        self.spec.pattern(config.attention)
        sources = _checked_columns(config, sources, candidates)
        tables = list(self.score_batches(zip(sources, candidates, strict=True), config, progress))
        return ScoreTable.join(tables) if tables else self._score_rows([], [], [], [], config, None)

    def score_batches(self, rows: Iterator[tuple[Any, Any]] | Sequence[tuple[Any, Any]], config: ScoreConfig,
                      progress: Callable[[int], None] | None = None) -> Iterator[ScoreTable]:  # fmt: skip
        """Score a stream of (source, candidate) rows in bounded memory: tables of consecutive rows, in order.

        A value may be anything: what is not text becomes a status. The cuts between tables change no score.
        """
        draws = config.reconstruction.design.num_draws

        def size_of(row: tuple[Any, Any]) -> int:
            both = sum(map(token_estimate, row))
            windows = both if config.attention == "full" else sum(map(token_estimate, _targets(config, *row)))
            return both + draws * windows

        for portion in portions(rows, size_of, min(TOKENS_AT_ONCE, self._runner.plan_tokens)):
            yield self._score_batch(portion, config, progress)

    def _score_batch(self, rows: list[tuple[Any, Any]], config: ScoreConfig,
                     progress: Callable[[int], None] | None) -> ScoreTable:  # fmt: skip
        checked = [_text_status(config, source, candidate) for source, candidate in rows]
        status = [state for state, _ in checked]
        messages = [message for _, message in checked]
        texts = list(dict.fromkeys(text for row, state in zip(rows, status, strict=True) if state == OK
                                   for text in (row if config.needs_source else row[1:])))  # fmt: skip
        with stage("tokenise"):
            encoded = dict(zip(texts, self._tokenizer.encode(texts), strict=True))
        nothing = Encoded(np.zeros(0, np.int32), np.zeros((0, 2), np.int32))
        pairs = [
            (encoded[row[0]] if config.needs_source else nothing, encoded[row[1]])
            if state == OK
            else (nothing, nothing)
            for row, state in zip(rows, status, strict=True)
        ]
        sources, candidates = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        return self._score_rows(sources, candidates, status, messages, config, progress)

    def _score_rows(self, sources: list[Encoded], candidates: list[Encoded], status: list[str],
                    messages: list[str], config: ScoreConfig,
                    progress: Callable[[int], None] | None) -> ScoreTable:  # fmt: skip
        truncated = np.zeros(len(status), dtype=np.int64)
        for row, state in enumerate(status):
            if state != OK:
                continue
            lengths = len(sources[row].ids), len(candidates[row].ids)
            status[row], messages[row], truncated[row] = self._length_status(*lengths, config)
            if truncated[row]:
                kept = len(sources[row].ids) - truncated[row]
                sources[row] = Encoded(sources[row].ids[:kept], sources[row].spans[:kept])
        scored = [row for row, state in enumerate(status) if state in SCORED]
        design = config.reconstruction.design
        count, levels = len(status), len(design.level_ratios)
        replicates = np.zeros((len(scored), design.num_replicates))
        profile = np.zeros((len(scored), levels))
        num_tokens = np.zeros(len(scored), dtype=np.int64)
        tokens: TokenScores | None = None
        if scored:
            for index, (direction, coefficient) in enumerate(config.passes):
                contexts, targets = _sides(direction, sources, candidates, scored)
                result = self._reconstruct(contexts, [item.ids for item in targets], config, progress)
                replicates += coefficient * result.replicate_scores
                profile += coefficient * result.profile
                if index == 0 or config.direction == "bidirectional":
                    num_tokens += [len(item.ids) for item in targets]
                if config.token_scores:
                    tokens = _token_scores(config, tokens, result, targets, scored, count)
        return ScoreTable(
            scores=_spread(replicates.mean(axis=1) if scored else np.zeros(0), scored, count),
            stderr=_spread(_standard_error(replicates), scored, count),
            num_tokens=_spread(num_tokens, scored, count, fill=0),
            status=status,
            messages=messages,
            truncated_tokens=truncated,
            profile=_spread(profile, scored, count),
            profile_ratios=design.level_ratios,
            kind="difference" if config.direction == "pmi" else config.reconstruction.kind,
            signature=self.signature(config),
            tokens=tokens or (TokenScores.none(count) if config.token_scores else None),
        )

    def signature(self, config: ScoreConfig) -> Signature:
        """What scores under this configuration depend on beside the row."""
        design = config.reconstruction.design
        return Signature(
            **self._identity, direction=config.direction,
            alpha=config.alpha if config.direction == "bidirectional" else None,
            estimator=config.reconstruction.estimator, level_weights=config.reconstruction.level_weights,
            length_normalised=config.reconstruction.length_normalised, masking=design.masking, ratios=design.ratios,
            draws=design.num_draws, levels=design.levels, replicates=design.num_replicates, seed=config.seed,
            attention=config.attention, template="plain", overlength=config.overlength,
        )  # fmt: skip

    def _reconstruct(self, contexts: list[np.ndarray], targets: list[np.ndarray], config: ScoreConfig,
                     progress: Callable[[int], None] | None) -> ReconstructionResult:  # fmt: skip
        with stage("plan"):
            unique: dict[bytes, int] = {}
            context_of = np.array([unique.setdefault(item.tobytes(), len(unique)) for item in contexts], dtype=np.int64)
            distinct = [np.frombuffer(item, dtype=np.int32) for item in unique]
            sequences = Sequences.build(distinct, context_of, targets)
            keys = np.array([target_key(config.seed, item) for item in targets], dtype=np.uint64)
            estimator = MaskedReconstruction(config.reconstruction, sequences, keys)
        return self._runner.evaluate(estimator, sequences, Attention(config.attention), progress)

    def _length_status(self, source: int, candidate: int, config: ScoreConfig) -> tuple[str, str, int]:
        """Status and message of a row of that many tokens, and how many source tokens to cut."""
        if candidate == 0:
            return EMPTY_CANDIDATE, "the candidate has no tokens", 0
        if config.needs_source and source == 0:
            return EMPTY_SOURCE, "the source has no tokens", 0
        room_candidate = self._room(config.attention)
        # Where window positions restart, either text may use all of them; else both share them.
        restart = self.spec.pattern(config.attention).restart_positions
        room_source = room_candidate - (0 if restart else candidate)
        if candidate > room_candidate:
            return TOO_LONG, f"the candidate has {candidate} tokens, the model takes {room_candidate}", 0
        if not config.needs_source or source <= room_source:
            return OK, "", 0
        if config.overlength == "truncate-source" and room_source >= 1:
            cut = source - room_source
            return TRUNCATED_SOURCE, f"the last {cut} of the source's {source} tokens were cut", cut
        return TOO_LONG, f"the source has {source} tokens, there is room for {max(room_source, 0)}", 0


def _checked_columns(config: ScoreConfig, sources: Any, candidates: Any) -> Sequence[str | None]:
    """Validate the two columns; returns the sources, filled in where the direction reads none."""
    checked_column("candidates", candidates)
    if sources is not None:
        checked_column("sources", sources)
    if sources is None:
        if config.needs_source:
            raise InputError(f"direction {config.direction!r} reads sources; give one a candidate")
        return [None] * len(candidates)
    if len(sources) != len(candidates):
        raise InputError(f"{len(sources)} sources but {len(candidates)} candidates; they are paired one to one")
    return sources


def _text_status(config: ScoreConfig, source: Any, candidate: Any) -> tuple[str, str]:
    """Status and message of a row by its values alone."""
    status, message = check_text("candidate", candidate)
    return check_text("source", source) if status == OK and config.needs_source else (status, message)


def _targets(config: ScoreConfig, source: Any, candidate: Any) -> tuple[Any, ...]:
    if config.direction == "reverse":
        return (source,)
    return (source, candidate) if config.direction == "bidirectional" else (candidate,)


def _sides(direction: str, sources: list[Encoded], candidates: list[Encoded],
           rows: list[int]) -> tuple[list[np.ndarray], list[Encoded]]:  # fmt: skip
    """Contexts and targets of a simple direction."""
    if direction == "reverse":
        return [candidates[row].ids for row in rows], [sources[row] for row in rows]
    if direction == "marginal":
        return [np.zeros(0, np.int32)] * len(rows), [candidates[row] for row in rows]
    return [sources[row].ids for row in rows], [candidates[row] for row in rows]


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
