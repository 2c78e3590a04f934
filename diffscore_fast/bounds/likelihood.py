"""LikelihoodBounds: bounds on log p(x) of a block model (TUBE, arXiv 2605.24292), or its exact value."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from diffscore_fast.arguments import checked_column
from diffscore_fast.bounds.autoregressive import autoregressive_log_probs
from diffscore_fast.bounds.comparators import comparators
from diffscore_fast.bounds.config import BoundsConfig, Surrogate, check_lattice, make_generation
from diffscore_fast.bounds.evidence import sampled_bounds
from diffscore_fast.bounds.states import Blocks, Lattice, OrderResult, SampledOrders, cut_blocks
from diffscore_fast.bounds.surrogates import surrogate_log_probs, surrogate_name
from diffscore_fast.bounds.table import BlockBounds, BoundsTable
from diffscore_fast.engine.plan import AttentionPattern, Sequences
from diffscore_fast.engine.ragged import runs_within, segment_ids
from diffscore_fast.engine.random import target_key
from diffscore_fast.engine.session import ScoringModel
from diffscore_fast.engine.streams import chunks, token_estimate
from diffscore_fast.errors import UnsupportedPatternError
from diffscore_fast.options import (
    DEFAULT_BLOCK_SIZE,
    DEFAULT_GENERATION,
    DEFAULT_MODEL,
    DEFAULT_ORDER_DESIGN,
    DEFAULT_ORDERS,
    DEFAULT_SEED,
    DEFAULT_SURROGATE,
    DEFAULT_SURROGATE_ORDERS,
    GenerationName,
    OrderDesign,
)
from diffscore_fast.signature import BoundsSignature
from diffscore_fast.status import EMPTY_TEXT, NON_FINITE_SCORE, OK, TOO_LONG, non_finite_message
from diffscore_fast.text.checks import check_text
from diffscore_fast.text.tokenizer import count_of

# About how many window tokens are planned together: a limit on memory, and on the work that a killed run loses.
TOKENS_CHUNK = 1 << 17


class LikelihoodBounds(ScoringModel):
    """Bounds the log-likelihood of texts under a block model from below and above, or computes it exactly.

    Parameters
    ----------
    model : str or Path
        "mini", or the folder of a model that has the attention pattern `block`.
    block_size : int, optional
        L', tokens per block: one of the model's block sizes. If not given, 8, or the model's own if it lacks 8.
    options
        Further arguments of `ScoringModel`: device, dtype, memory and others.

    Raises
    ------
    CheckpointError
        If the model folder is incomplete, damaged, or fails its own check.
    UnsupportedPatternError
        If the model was not trained with this block size.

    Examples
    --------
    >>> bounds = LikelihoodBounds("mini", block_size=4)
    >>> table = bounds.exact(["The cat sat on the mat."])
    >>> bool(table.lower[0] == table.exact[0] == table.upper[0])
    True
    """

    def __init__(self, model: str | Path = DEFAULT_MODEL, *, block_size: int | None = None, **options: Any) -> None:
        if block_size == 0:  # which stands for the default further on
            raise UnsupportedPatternError("block_size must be at least 1, not 0")
        super().__init__(model, attention=AttentionPattern("block", block_size or 0), **options)
        self._attention = self.default_attention
        self.block_size = self._attention.block_size
        del self._arguments["attention"]
        self._arguments["block_size"] = self.block_size

    @classmethod
    def sharing(cls, model: ScoringModel, *, block_size: int | None = None) -> LikelihoodBounds:
        """Bounds by a model that is loaded already, such as a `DiffScorer`, which can be used at the same time.

        `block_size` as for the class.

        Raises
        ------
        InputError, CheckpointError, UnsupportedPatternError
            If the model is in int8, fails its own check with these blocks, or was not trained with their size.
        """
        if block_size is None:
            block_size = model.spec.block_size_near(DEFAULT_BLOCK_SIZE)
        made = cls.__new__(cls)
        made.block_size, made._attention = block_size, AttentionPattern("block", block_size)
        made._share(model, made._attention)
        made._arguments = {**model._arguments, "block_size": block_size}
        made._arguments.pop("attention", None)
        return made

    def estimate(
        self,
        texts: Sequence[str | None],
        *,
        generation: GenerationName = DEFAULT_GENERATION,
        steps: int | None = None,
        step_probabilities: Sequence[float] | None = None,
        orders: int = DEFAULT_ORDERS,
        surrogate_orders: int = DEFAULT_SURROGATE_ORDERS,
        surrogate: Surrogate = DEFAULT_SURROGATE,
        cross_fitted: bool = True,
        folds: int | None = None,
        design: OrderDesign = DEFAULT_ORDER_DESIGN,
        seed: int = DEFAULT_SEED,
        autoregressive: bool = False,
        comparators: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> BoundsTable:
        """Lower and upper bounds from sampled orders.

        Parameters
        ----------
        texts : sequence of str
            An entry that is None, empty, not text, or too long gets a status and no bounds.
        generation : {"any-order", "parallel"}
            `any-order`: one token per step, in uniformly drawn order. `parallel`: the step of each token is drawn
            independently, and all tokens of a step are predicted together.
        steps : int, optional
            T, for `parallel`.
        step_probabilities : sequence of float, optional
            For `parallel`: the probability of each step; uniform if not given.
        orders, surrogate_orders : int
            K and M, each at most 100,000.
        surrogate : {"self", "single", "autoregressive"} or callable
            What psi is: the mean of M other orders, one other order, the same network at block size 1, or a function
            from token arrays to the log-probability of every token (an autoregressive model with the same tokenizer).
            The signature names the function by its attribute `name`, or by its module and qualified name.
        cross_fitted : bool
            With surrogate "self": all K + M draws serve both bounds, and the surrogate of each fold is the mean of the
            others. If False, the mean of M draws is the surrogate for the other K, as in the paper.
        folds : int, optional
            Number of folds; see `BoundsConfig.num_folds`.
        design : {"independent", "antithetic"}
            `antithetic` pairs each order with its reverse; bounds and errors are computed from the pairs' means.
        seed : int
            Orders follow from the seed and the tokens of the text alone.
        autoregressive : bool
            Also compute the log-likelihood under the same network at block size 1.
        comparators : bool
            Also compute CUBO_2, TVO upper and IS-VG-B from the same draws. They are biased, and not bounds.
        progress : callable, optional
            Called with the number of window tokens just evaluated. It may call this object.

        Returns
        -------
        BoundsTable

        Raises
        ------
        InputError
            For unknown options, or a single string in place of a list.
        """
        config = BoundsConfig(
            generation=make_generation(generation, steps, step_probabilities),
            orders=orders,
            surrogate_orders=surrogate_orders,
            surrogate=surrogate,
            cross_fitted=cross_fitted,
            folds=folds,
            design=design,
            seed=seed,
            autoregressive=autoregressive,
            comparators=comparators,
        )
        return self._table(texts, config, progress)

    def exact(
        self,
        texts: Sequence[str | None],
        *,
        generation: GenerationName = DEFAULT_GENERATION,
        steps: int | None = None,
        step_probabilities: Sequence[float] | None = None,
        autoregressive: bool = False,
        forced: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> BoundsTable:
        """Exact log-likelihood by the lattice of visible subsets: 2^L' - 1 states per block.

        Parameters as for `estimate`.

        Raises
        ------
        InputError
            Also for block sizes above 12, unless `forced`; the message says what they would cost.
        """
        config = BoundsConfig(
            exact=True,
            generation=make_generation(generation, steps, step_probabilities),
            autoregressive=autoregressive,
            forced=forced,
        )
        return self._table(texts, config, progress)

    def bound_batches(
        self,
        texts: Iterable[Any],
        config: BoundsConfig,
        progress: Callable[[int], None] | None = None,
        *,
        by_time: bool = False,
    ) -> Iterator[BoundsTable]:
        """Bound a stream of texts in bounded memory; yields tables of consecutive texts, in order.

        With `by_time`, on a CPU, a table comes every few seconds: a caller who stores the tables loses little if the
        run is stopped.
        """
        if config.exact:
            check_lattice(self.block_size, config.forced)
        cut = chunks(
            texts,
            self.text_size(config),
            self._chunk_tokens(TOKENS_CHUNK),
            self._chunk_seconds(by_time),
        )
        for chunk in cut:
            yield self._bound_batch(chunk, config, progress)

    def text_size(self, config: BoundsConfig) -> Callable[[Any], int]:
        """A function from a text to about how many tokens it takes under a configuration."""
        # Windows per token: all states of the lattice, or at most those that the draws visit. Planning also holds a
        # number for each pair of tokens of a block, in each draw.
        windows = 2**self.block_size - 1
        if not config.exact:
            visited = config.draws * min(self.block_size, config.generation.steps or self.block_size)
            windows = max(min(windows, visited), config.draws * self.block_size // 8)
        return lambda text: windows * token_estimate(text)

    def _table(self, texts: Any, config: BoundsConfig, progress: Callable[[int], None] | None) -> BoundsTable:
        tables = list(self.bound_batches(checked_column("texts", texts), config, progress))
        return BoundsTable.join(tables) if tables else self._bound_batch([], config, progress)

    def _bound_batch(
        self, texts: list[Any], config: BoundsConfig, progress: Callable[[int], None] | None
    ) -> BoundsTable:
        checked = [check_text("text", text) for text in texts]
        status, messages = [item[0] for item in checked], [item[1] for item in checked]
        room = self._room("block", self.block_size)
        encoded = self._tokenizer.encode_up_to(
            [text for text, state in zip(texts, status, strict=True) if state == OK], room
        )
        ids: list[np.ndarray] = []
        kept: list[int] = []
        for row, item in zip([row for row, state in enumerate(status) if state == OK], encoded, strict=True):
            if len(item.ids) == 0:
                status[row], messages[row] = EMPTY_TEXT, "the text has no tokens"
            elif len(item.ids) > room:
                status[row] = TOO_LONG
                messages[row] = f"the text has {count_of(item)}, the model takes {room}"
            else:
                ids.append(item.ids)
                kept.append(row)
        sequences = Sequences.build([np.zeros(0, np.int32)], np.zeros(len(ids), np.int64), ids)
        blocks = cut_blocks(sequences.target_lengths, self.block_size, self.spec.start_in_block(self.block_size))
        keys = np.array([target_key(config.seed, item) for item in ids], dtype=np.uint64)
        with np.errstate(invalid="ignore"):  # texts of probability 0 get their status below
            values = self._evaluate(config, sequences, blocks, ids, keys, progress)
        # An upper bound of +inf (a surrogate of probability 0) is true, though of no use. A lower one of -inf is none.
        lower, upper = (
            np.bincount(blocks.sequence, weights=item, minlength=len(ids)).astype(np.float64)
            for item in (values.lower, values.upper)
        )
        good = np.isfinite(lower) & ~np.isnan(upper) & ~np.isneginf(upper)
        for index in np.flatnonzero(~good):
            status[kept[index]] = NON_FINITE_SCORE
            worst = upper[index] if np.isfinite(lower[index]) else lower[index]
            messages[kept[index]] = non_finite_message("log-likelihood", worst)
        own = good[blocks.sequence]
        return BoundsTable.from_blocks(
            values.take(np.flatnonzero(own)),
            (np.cumsum(good) - 1)[blocks.sequence[own]],
            [row for row, fine in zip(kept, good, strict=True) if fine],
            status,
            messages,
            sequences.target_lengths[good],
            keys[good],
            self.signature(config),
        )

    def _evaluate(
        self,
        config: BoundsConfig,
        sequences: Sequences,
        blocks: Blocks,
        ids: list[np.ndarray],
        keys: np.ndarray,
        progress: Callable[[int], None] | None,
    ) -> BlockBounds:
        """Bounds of all blocks: exact ones, or those of sampled orders."""
        autoregressive = np.full(len(blocks.lengths), np.nan)
        if (config.autoregressive or config.surrogate == "autoregressive") and len(ids):
            autoregressive = _per_block(autoregressive_log_probs(self._runner, sequences, progress), blocks)
        if config.exact:
            return self._exact_bounds(config, sequences, blocks, autoregressive, progress)
        log_psi = autoregressive
        if callable(config.surrogate):
            log_psi = _per_block(surrogate_log_probs(config.surrogate, ids), blocks)
        draws = self._sample(config, sequences, blocks, keys, progress)
        found = sampled_bounds(config, draws.log_p, blocks.lengths, log_psi)
        return BlockBounds(
            start=blocks.start,
            num_tokens=blocks.lengths,
            lower=found.lower.value,
            upper=found.upper.value,
            exact=np.full(len(blocks.lengths), np.nan),
            stderr_lower=found.lower.stderr,
            stderr_upper=found.upper.stderr,
            degrees_of_freedom=found.degrees_of_freedom,
            few_draws=found.few_draws,
            autoregressive=autoregressive,
            effective_draws=found.effective_draws,
            distinct_states=draws.distinct_states,
            visited_states=draws.visited_states,
            comparators=comparators(draws.log_p) if config.comparators else {},
        )

    def _exact_bounds(
        self,
        config: BoundsConfig,
        sequences: Sequences,
        blocks: Blocks,
        autoregressive: np.ndarray,
        progress: Callable[[int], None] | None,
    ) -> BlockBounds:
        """The exact log-likelihood of every block as its own lower and upper bound."""
        count = len(blocks.lengths)
        lattice, exact = Lattice(blocks, config.generation), np.full(count, np.nan)
        if count:
            exact = self._runner.evaluate(lattice, sequences, self._attention, progress)
        return BlockBounds(
            start=blocks.start,
            num_tokens=blocks.lengths,
            lower=exact,
            upper=exact,
            exact=exact,
            stderr_lower=np.zeros(count),
            stderr_upper=np.zeros(count),
            degrees_of_freedom=np.full(count, np.inf),
            few_draws=np.zeros(count, dtype=bool),
            autoregressive=autoregressive,
            effective_draws=np.full(count, np.nan),
            distinct_states=lattice.num_states,
            visited_states=lattice.num_states,
            comparators={},
        )

    def _sample(
        self,
        config: BoundsConfig,
        sequences: Sequences,
        blocks: Blocks,
        keys: np.ndarray,
        progress: Callable[[int], None] | None,
    ) -> OrderResult:
        """log p(x | z) of the sampled orders of every block.

        Planning holds some numbers per token and draw: where there are many draws, a few blocks go at a time.
        """
        results = []
        for first, last in runs_within(config.draws * blocks.lengths, self._runner.plan_tokens):
            chunk = Blocks(blocks.sequence[first:last], blocks.start[first:last], blocks.stop[first:last])
            estimator = SampledOrders(chunk, keys, config.generation, config.draws, config.design)
            results.append(self._runner.evaluate(estimator, sequences, self._attention, progress))
        return OrderResult.join(results, config.draws)

    def signature(self, config: BoundsConfig) -> BoundsSignature:
        """Everything that bounds under this configuration depend on besides the text."""
        generation = config.generation
        given = config.surrogate
        surrogate = surrogate_name(given) if callable(given) else given
        return BoundsSignature(
            **self._identity,
            block_size=self.block_size,
            generation="any-order" if generation.steps is None else "parallel",
            steps=generation.steps,
            step_probabilities=generation.step_probabilities,
            method="exact" if config.exact else "estimate",
            orders=None if config.exact else config.orders,
            surrogate=None if config.exact else surrogate,
            surrogate_orders=config.num_surrogate or None if not config.exact else None,
            folds=config.num_folds if config.uses_folds else None,
            design=None if config.exact else config.design,
            seed=None if config.exact else config.seed,
        )


def _per_block(per_token: np.ndarray, blocks: Blocks) -> np.ndarray:
    """Sums of values per token over each block, float64 [B]. The blocks cover all tokens of the texts in order."""
    return np.bincount(segment_ids(blocks.lengths), weights=per_token, minlength=len(blocks.lengths))
