"""DiffScorer: text evaluation by masked reconstruction (DiffScore, arXiv 2605.11601)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from diffscore_fast.arguments import checked_column
from diffscore_fast.engine.plan import Estimator, Sequences
from diffscore_fast.engine.profile import stage
from diffscore_fast.engine.ragged import offsets_of, segment_ids, spread
from diffscore_fast.engine.random import item_key, target_key
from diffscore_fast.engine.session import ScoringModel
from diffscore_fast.engine.streams import chunks, one_ahead, token_estimate
from diffscore_fast.errors import InputError, UnsupportedPatternError
from diffscore_fast.options import (
    DEFAULT_AGGREGATE,
    DEFAULT_ALPHA,
    DEFAULT_DIRECTION,
    DEFAULT_DRAWS,
    DEFAULT_ESTIMATOR,
    DEFAULT_LEVELS,
    DEFAULT_MASK_RATIOS,
    DEFAULT_MASK_WORDS,
    DEFAULT_MASKING,
    DEFAULT_MAX_DRAWS,
    DEFAULT_OVERLENGTH,
    DEFAULT_SEED,
    DEFAULT_TAGGER,
    DEFAULT_TEMPLATE,
    Aggregate,
    AttentionOption,
    Coupling,
    Direction,
    EstimatorName,
    FullDraws,
    Masking,
    MaskRatios,
    MaskWords,
    Overlength,
)
from diffscore_fast.scoring.config import ScoreConfig, make_config
from diffscore_fast.scoring.reconstruction import MaskedReconstruction, ReconstructionResult
from diffscore_fast.scoring.references import aggregate, expand
from diffscore_fast.scoring.rows import RowTokenizer, TokenRows, checked_columns, scored_texts, split_items
from diffscore_fast.scoring.table import ScoreTable, TokenScores
from diffscore_fast.scoring.word_classes import WithinEligible
from diffscore_fast.signature import Signature
from diffscore_fast.status import SCORED
from diffscore_fast.text.templates import Template
from diffscore_fast.text.tokenizer import Encoded

# About how many window tokens are planned together: a limit on memory, and on the work that a killed run loses.
TOKENS_CHUNK = 1 << 16


@dataclass(frozen=True)
class _Batch:
    """Consecutive rows as tokens.

    Parameters
    ----------
    rows : TokenRows
        One per row; with references, one per reference.
    items : list of str, optional
        The item of each of them.
    offsets : int64 [n + 1], optional
        With references: each candidate's part of `rows`.
    """

    rows: TokenRows
    items: list[str] | None
    offsets: np.ndarray | None = None


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

    _takes_int8 = True

    def score(
        self,
        sources: Sequence[str | None] | None,
        candidates: Sequence[str | None],
        *,
        direction: Direction = DEFAULT_DIRECTION,
        draws: int = DEFAULT_DRAWS,
        seed: int = DEFAULT_SEED,
        items: Sequence[str | int | None] | None = None,
        estimator: EstimatorName = DEFAULT_ESTIMATOR,
        mask_ratios: MaskRatios = DEFAULT_MASK_RATIOS,
        masking: Masking = DEFAULT_MASKING,
        levels: int = DEFAULT_LEVELS,
        replicates: int | None = None,
        coupling: Coupling | None = None,
        target_stderr: float | None = None,
        max_draws: int = DEFAULT_MAX_DRAWS,
        level_weights: Sequence[float] | None = None,
        length_normalised: bool = False,
        alpha: float = DEFAULT_ALPHA,
        attention: AttentionOption | None = None,
        block_size: int | None = None,
        full_draws: FullDraws | None = None,
        overlength: Overlength = DEFAULT_OVERLENGTH,
        token_scores: bool = False,
        template: str | Path | Template = DEFAULT_TEMPLATE,
        references: Sequence[Sequence[str | None] | str | None] | None = None,
        aggregate: Aggregate = DEFAULT_AGGREGATE,
        mask_words: MaskWords = DEFAULT_MASK_WORDS,
        tagger: str = DEFAULT_TAGGER,
        progress: Callable[[int], None] | None = None,
    ) -> ScoreTable:
        """Score candidates, each with its source.

        Parameters
        ----------
        sources : sequence of str, or None
            One per candidate. May be None for `marginal`, which reads no source.
        candidates : sequence of str
            Texts to score. An entry that is None, empty, not text, or too long gets a status and no score.
        direction : {"conditional", "marginal", "reverse", "bidirectional", "pmi"}
            S(c | s); S(c | nothing); S(s | c); alpha * conditional + (1 - alpha) * reverse; or
            conditional - marginal, on the same masks.
        draws : int
            K, the number of mask draws. An independent grid makes another number of draws, which the signature
            reports. A text with at most K masks (2^L - 1 for L tokens) is scored exactly, by all of them.
        seed : int
            Masks follow from the seed and the tokens of the target alone.
        items : sequence of str or int, optional
            The name of the item that each row belongs to: its document, say, or its question. Masks then follow from
            the seed, the item and the places of tokens, so that outputs for one item meet the same masks place by
            place, and their difference is less noisy. Each score keeps its distribution.
        estimator : {"mean_logprob", "elbo", "weighted"}
            Mean log-prob of the masked tokens; a lower bound on the log-likelihood; or the means of the levels,
            weighted by `level_weights`. See `ReconstructionConfig`, also for `length_normalised`.
        mask_ratios : {"grid", "stratified", "uniform"}
            How the draws choose their mask ratios; see `MaskDesign`, also for the next four.
        masking : {"bernoulli", "count"}
            Mask each token independently, or a fixed number of tokens.
        levels : int
            Mask-ratio levels of the grid and of the profile.
        replicates : int, optional
            Independent repetitions of the design among the draws, for the standard error.
        coupling : {"balanced", "independent"}, optional
            How the draws of a replicate depend on each other. The published procedure is "independent" with draws=20
            (18 forward passes).
        target_stderr : float, optional
            Standard error to aim at, in nats per token; see `ReconstructionConfig`.
        max_draws : int
            For `target_stderr`: the largest number of draws of a row.
        alpha : float
            Weight of `conditional` in `bidirectional`.
        attention : {"full", "prefix", "block", "corrected"}, optional
            `full`: every token attends to every token. `prefix`: the source does not attend to the candidate, so it is
            computed once for all its candidates and draws. `block`: the candidate is read in blocks; a masked token
            attends to the source, to the earlier blocks unmasked, and to its own block. `corrected` is not a pattern
            but an estimator of the score under `full`: the score under `prefix`, plus the mean of full - prefix over J
            of the draws. If not given, `block` where a block size is given, otherwise the model's default pattern.
        block_size : int, optional
            Tokens per block, for `block`: one of the model's block sizes; its own default if not given. With 1 every
            token is predicted from those before it (for a model that predicts the next token: its left-to-right
            score); a block as long as the candidate is read like `prefix`.
        full_draws : int or "auto", optional
            J, for `corrected`; if not given, the smallest possible number. See `ReconstructionConfig`.
        overlength : {"error", "skip", "truncate-source"}
            What happens to a text with more tokens than the model has positions for. "error" and "skip": status
            `too_long`, which the command line counts as failed or as skipped. "truncate-source": the end of the source
            is cut, and the cut tokens are counted. Candidates are never cut.
        token_scores : bool
            Also return the score of every token, with the characters that it covers.
        template : str, Path or Template
            Words around the two texts: a name (see `diffscore_fast.text.templates`), or a TOML or JSON file.
        references : sequence of lists of str, optional
            Several texts per candidate, which take the place of the source: `conditional` is S(c | r), `reverse`
            S(r | c). `sources` must then be None. A reference that is None, empty, not text, or too long is left out.
        aggregate : {"max", "mean"}
            The largest score over the references, or the mean.
        mask_words : {"all", "content", "function", "entities"}
            Mask and score only one class of words, found by a spaCy model; the other words stay visible.
        tagger : str
            Name of the spaCy model.
        progress : callable, optional
            Called with the number of window tokens just evaluated. An exception that it raises ends the call; the
            scorer can be used afterwards.

        Returns
        -------
        ScoreTable

        Raises
        ------
        InputError
            For unknown options, unequal lengths, or a single string in place of a list.
        DependencyError
            If a class of words is asked for and spaCy or its model is not installed.
        UnsupportedPatternError
            If the model was not trained with the attention pattern.
        """
        config = make_config(
            self.spec.default_pattern,
            direction=direction,
            draws=draws,
            seed=seed,
            masks_by_item=items is not None,
            estimator=estimator,
            mask_ratios=mask_ratios,
            masking=masking,
            levels=levels,
            replicates=replicates,
            coupling=coupling,
            target_stderr=target_stderr,
            max_draws=max_draws,
            level_weights=level_weights,
            length_normalised=length_normalised,
            alpha=alpha,
            attention=attention,
            block_size=block_size,
            full_draws=full_draws,
            overlength=overlength,
            token_scores=token_scores,
            template=template,
            aggregate=None if references is None else aggregate,
            mask_words=mask_words,
            tagger=tagger,
        )
        config = self.complete(config)
        sources = checked_columns(config, sources, references, candidates)
        columns: list[Sequence[Any]] = [sources, candidates]
        if items is not None:
            columns.append(checked_column("items", items))
            if len(columns[-1]) != len(candidates):
                raise InputError(f"{len(columns[-1])} items but {len(candidates)} candidates; give one per candidate")
        tables = list(self.score_batches(zip(*columns, strict=True), config, progress))
        return ScoreTable.join(tables) if tables else self._score_batch(self._tokenised([], config), config, None)

    def complete(self, config: ScoreConfig) -> ScoreConfig:
        """The configuration with the model's own block size where it states none, as `score_batches` needs it.

        Raises
        ------
        UnsupportedPatternError
            If the model was not trained with an attention pattern or block size that the configuration reads, or has no
            block size of its own.
        InputError
            For the estimator `elbo` in int8, which would be no bound.
        """
        if config.attention == "block" and config.block_size is None and "block" in self.spec.patterns:
            pattern = self.spec.patterns["block"]
            if not pattern.default_block_size:
                known = ", ".join(map(str, pattern.block_sizes))
                raise UnsupportedPatternError(
                    f"model {self.spec.name!r} needs a block size for attention 'block': {known}"
                )
            config = replace(config, block_size=pattern.default_block_size)
        if self._identity["dtype"] == "int8" and config.reconstruction.estimator == "elbo":
            raise InputError(
                "elbo is a bound on a likelihood and needs probabilities that add to 1, which a model in int8 does not "
                "give; use another dtype"
            )
        for read in config.patterns:
            self.spec.pattern(read.name, read.block_size)
        return config

    def score_batches(
        self,
        rows: Iterator[tuple[Any, ...]] | Sequence[tuple[Any, ...]],
        config: ScoreConfig,
        progress: Callable[[int], None] | None = None,
        *,
        by_time: bool = False,
    ) -> Iterator[ScoreTable]:
        """Score a stream of (source, candidate) rows in bounded memory; yields tables of consecutive rows, in order.

        Values may be anything: a row with a value that is not text gets a status. If the configuration aggregates
        references, the first value of a row is their list; if it has masks by item, the third value is the item. Where
        the tables are cut changes no score.

        With `by_time`, on a CPU, a table comes every few seconds: a caller who stores the tables loses little if the
        run is stopped.
        """
        cut = chunks(rows, row_size(config), self.chunk_tokens, self._chunk_seconds(by_time))
        # Not on a CPU: all its cores compute already, and a slow stream would wait for one more chunk. Not with spaCy:
        # its locks must not be held by another thread when a process forks.
        ahead = self._runner.backbone.device.type != "cpu" and config.mask_words == "all"

        def work(chunk: list[tuple[Any, ...]]) -> _Batch:
            return self._tokenised(chunk, config)

        tokenised = one_ahead(cut, work) if ahead else map(work, cut)
        for batch in tokenised:
            yield self._score_batch(batch, config, progress)

    @property
    def chunk_tokens(self) -> int:
        """About how many window tokens are planned together at most."""
        return self._chunk_tokens(TOKENS_CHUNK)

    def _tokenised(self, rows: list[tuple[Any, ...]], config: ScoreConfig) -> _Batch:
        items: list[str] | None = None
        if config.masks_by_item:
            rows, items = split_items(rows)  # type: ignore[assignment]
        patterns = [
            (self.spec.pattern(read.name, read.block_size), self._room(read.name, read.block_size))
            for read in config.patterns
        ]
        with stage("tokenise"):
            if config.aggregate is None:
                return _Batch(self._rows.tokenise(rows, config, patterns), items)
            pairs, offsets = expand(rows)
            if items is not None:
                items = [items[row] for row in segment_ids(np.diff(offsets))]
            return _Batch(self._rows.tokenise(pairs, config, patterns), items, offsets)

    def _score_batch(self, batch: _Batch, config: ScoreConfig, progress: Callable[[int], None] | None) -> ScoreTable:
        table = self._score_rows(batch.rows, batch.items, config, progress)
        if batch.offsets is None or config.aggregate is None:
            return table
        return aggregate(table, batch.offsets, config.aggregate)

    @cached_property
    def _rows(self) -> RowTokenizer:
        return RowTokenizer(self._tokenizer)

    def _score_rows(
        self,
        rows: TokenRows,
        items: list[str] | None,
        config: ScoreConfig,
        progress: Callable[[int], None] | None,
    ) -> ScoreTable:
        status = rows.status
        scored = [row for row, state in enumerate(status) if state in SCORED]
        design = config.reconstruction.design
        count, levels = len(status), len(design.level_ratios)
        num_tokens = np.zeros(len(scored), dtype=np.int64)
        result = ReconstructionResult.none(levels)
        tokens: TokenScores | None = None
        if scored:
            contexts, targets, keys = [], [], []
            for index, (direction, _) in enumerate(config.passes):
                own_contexts, own_targets = rows.sides(direction, scored)
                contexts += own_contexts
                targets += own_targets
                if items is None:
                    keys += [target_key(config.seed, item.ids) for item in own_targets]
                else:  # a source and a candidate of an item have masks of their own
                    side = int(direction == "reverse")
                    keys += [item_key(config.seed, items[row], side) for row in scored]
                if index == 0 or config.direction == "bidirectional":
                    num_tokens += [item.num_eligible for item in own_targets]
            result = self._reconstruct(contexts, targets, keys, config, progress)
            if config.token_scores:
                tokens = _token_scores(config, result, targets[: len(scored)], scored, count)
        table = ScoreTable(
            scores=spread(result.scores, scored, count),
            stderr=spread(result.stderr, scored, count),
            num_tokens=spread(num_tokens, scored, count, fill=0),
            num_draws=spread(result.num_draws, scored, count, fill=0),
            full_draws=spread(result.full_draws, scored, count, fill=0),
            status=status,
            messages=rows.messages,
            truncated_tokens=rows.truncated,
            profile=spread(result.profile, scored, count),
            profile_ratios=design.level_ratios,
            kind=config.kind,
            signature=self.signature(config),
            tokens=tokens or (TokenScores.none(count) if config.token_scores else None),
        )
        return table.without_non_finite()

    def signature(self, config: ScoreConfig) -> Signature:
        """Everything that scores under this configuration depend on besides the row."""
        reconstruction, design = config.reconstruction, config.reconstruction.design
        target, by_class = reconstruction.target_stderr, config.mask_words != "all"
        return Signature(
            **self._identity,
            direction=config.direction,
            alpha=config.alpha if config.direction == "bidirectional" else None,
            estimator=reconstruction.estimator,
            level_weights=reconstruction.level_weights,
            length_normalised=reconstruction.length_normalised,
            masking=design.masking,
            mask_words=config.mask_words if by_class else None,
            tagger=self._rows.tagger(config.tagger).identity if by_class else None,
            mask_ratios=design.ratios,
            coupling=design.coupling,
            draws=design.num_draws,
            levels=design.levels,
            replicates=design.num_replicates,
            target_stderr=target,
            max_draws=None if target is None else reconstruction.max_draws,
            seed=config.seed,
            masks_by="item" if config.masks_by_item else None,
            attention=config.attention,
            block_size=config.block_size,
            full_draws=reconstruction.full_draws,
            template=config.template.identity,
            aggregate=config.aggregate,
            overlength=config.overlength,
        )

    def _reconstruct(
        self,
        contexts: list[np.ndarray],
        targets: list[Encoded],
        target_keys: list[int],
        config: ScoreConfig,
        progress: Callable[[int], None] | None,
    ) -> ReconstructionResult:
        with stage("plan"):
            unique: dict[bytes, int] = {}
            context_of = np.array([unique.setdefault(item.tobytes(), len(unique)) for item in contexts], dtype=np.int64)
            distinct = [np.frombuffer(item, dtype=np.int32) for item in unique]
            sequences = Sequences.build(distinct, context_of, [item.ids for item in targets])
            keys = np.array(target_keys, dtype=np.uint64)
        rows = len(targets) // len(config.passes)
        row_of = np.tile(np.arange(rows), len(config.passes))
        coefficients = np.repeat([coefficient for _, coefficient in config.passes], rows)

        def build(sequences: Sequences) -> MaskedReconstruction:
            return MaskedReconstruction(config.reconstruction, sequences, keys, row_of, coefficients)

        with stage("plan"):
            estimator: Estimator[ReconstructionResult] = build(sequences)
            if config.mask_words != "all":
                eligible = np.concatenate([item.eligible for item in targets])  # type: ignore[misc]
                estimator = WithinEligible(eligible, sequences, build)
        return self._runner.evaluate(estimator, sequences, config.patterns[0], progress)


def row_size(config: ScoreConfig) -> Callable[[tuple[Any, ...]], int]:
    """A function from a row to about how many tokens it takes under a configuration."""
    draws = config.reconstruction.max_draws_held * len(config.passes)
    if config.aggregate is None and config.attention != "full" and config.direction in ("conditional", "pmi"):
        return lambda row: token_estimate(row[0]) + (1 + draws) * token_estimate(row[1])

    def size_of(row: tuple[Any, ...]) -> int:
        pairs = [row[:2]] if config.aggregate is None else expand([row[:2]])[0]
        both = sum(token_estimate(text) for pair in pairs for text in pair)
        targets = sum(token_estimate(text) for pair in pairs for text in scored_texts(config, *pair))
        return both + draws * (both if config.attention == "full" else targets)

    return size_of


def _token_scores(
    config: ScoreConfig, result: ReconstructionResult, targets: list[Encoded], rows: list[int], count: int
) -> TokenScores:
    """Token scores of the first pass; for pmi, their differences from the second pass, on the same masks."""
    lengths = np.zeros(count, dtype=np.int64)
    lengths[rows] = [len(item.ids) for item in targets]
    total = int(lengths.sum())
    log_probs, spans = result.token_log_probs[:total], np.concatenate([item.spans for item in targets])
    if config.direction == "pmi":
        log_probs = log_probs - result.token_log_probs[total:]
    return TokenScores(offsets_of(lengths), spans, log_probs, result.token_counts[:total])
