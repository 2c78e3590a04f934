"""LikelihoodBounds: log p(x) of a block model from both sides (TUBE, arXiv 2605.24292), or exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from diffscore_fast.arguments import checked_column
from diffscore_fast.bounds import evidence
from diffscore_fast.bounds.autoregressive import autoregressive_log_probs
from diffscore_fast.bounds.config import BoundsConfig, Surrogate, check_lattice, make_generation
from diffscore_fast.bounds.estimate import sampled_bounds
from diffscore_fast.bounds.orders import OrderDesign
from diffscore_fast.bounds.states import Blocks, Lattice, OrderResult, SampledOrders, cut_blocks
from diffscore_fast.bounds.table import BlockBounds, BoundsTable
from diffscore_fast.engine.plan import AttentionPattern, Sequences
from diffscore_fast.engine.ragged import runs_within, segment_ids
from diffscore_fast.engine.random import target_key
from diffscore_fast.engine.session import ScoringModel
from diffscore_fast.engine.streams import chunks, token_estimate
from diffscore_fast.errors import InputError
from diffscore_fast.signature import BoundsSignature
from diffscore_fast.status import EMPTY_TEXT, NON_FINITE_SCORE, OK, TOO_LONG, non_finite_message
from diffscore_fast.text.checks import check_text
from diffscore_fast.text.tokenizer import count_of

# States are planned in portions of about this many window tokens: a bound on memory, and on what a killed run loses.
TOKENS_CHUNK = 1 << 17
TVO_PARTITION = (1 / 64, 1 / 16, 1 / 4, 1 / 2, 1.0)


class LikelihoodBounds(ScoringModel):
    """Brackets the log-likelihood of texts under a block model.

    Parameters
    ----------
    model : str or Path
        "mini", or a model folder whose model has the pattern `block`.
    block_size : int
        L', one of the model's block sizes.
    device, dtype, token_budget, cache_bytes, implementation
        As for `ScoringModel`.

    Raises
    ------
    CheckpointError, UnsupportedPatternError

    Examples
    --------
    >>> bounds = LikelihoodBounds("mini", block_size=4)
    >>> table = bounds.exact(["The cat sat on the mat."])
    >>> bool(table.lower[0] == table.exact[0] == table.upper[0])
    True
    """

    def __init__(self, model: str | Path = "mini", *, block_size: int = 8, **options: Any) -> None:
        self.block_size = block_size
        super().__init__(model, attention=AttentionPattern("block", block_size), **options)
        del self._arguments["attention"]
        self._arguments["block_size"] = block_size

    def estimate(
        self,
        texts: Sequence[str | None],
        *,
        generation: Literal["any-order", "parallel"] = "any-order",
        steps: int | None = None,
        step_probabilities: Sequence[float] | None = None,
        orders: int = 32,
        surrogate_orders: int = 32,
        surrogate: Surrogate = "self",
        cross_fitted: bool = True,
        folds: int | None = None,
        design: OrderDesign = "independent",
        seed: int = 0,
        autoregressive: bool = False,
        comparators: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> BoundsTable:
        """Lower and upper bound from sampled orders.

        Parameters
        ----------
        texts : sequence of str
            An entry that is None, empty, no text, or too long gets a status and no bounds.
        generation, steps, step_probabilities
            `any-order`: one token a step in uniform order. `parallel`: `steps` steps, each token's step drawn from
            `step_probabilities` (uniform if not given), independent.
        orders, surrogate_orders : int
            K and M, each at most 100,000.
        surrogate : {"self", "single", "autoregressive"} or callable
            psi: the mean of M other orders, one order, the same network at block size 1, or a function from token
            arrays to the log-probability of every token (an autoregressive model with the same tokenizer). Signatures
            call the function by its attribute `name`, or by where a module defines it; it must have one of the two.
        cross_fitted : bool
            With surrogate "self": use all K + M draws for both bounds, each fold against the mean of the others.
            False plays M draws against K, as in the paper.
        folds : int, optional
            Folds of the cross-fitting; see `BoundsConfig.num_folds`.
        design : {"independent", "antithetic"}
            `antithetic` pairs each order with its reverse; bounds and errors are then made of the pairs' means.
        seed : int
        autoregressive : bool
            Also the log-likelihood of the same network at block size 1.
        comparators : bool
            Also CUBO_2, TVO upper and IS-VG-B from the same draws: biased in finite samples, not bounds.
        progress : callable, optional
            Called with the number of window tokens just evaluated; it may use this object itself.

        Returns
        -------
        BoundsTable

        Raises
        ------
        InputError
            For unknown options or a bare string in place of a list.
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
        generation: Literal["any-order", "parallel"] = "any-order",
        steps: int | None = None,
        step_probabilities: Sequence[float] | None = None,
        autoregressive: bool = False,
        forced: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> BoundsTable:
        """Exact log-likelihood by the lattice of visible subsets: 2^L' - 1 states a block.

        Parameters as for `estimate`. Block sizes above 12 are refused with their cost, unless `forced`.
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
        """Bound a stream of texts in bounded memory: tables of consecutive texts, in order.

        `by_time` as for `DiffScorer.score_batches`.
        """
        if config.exact:
            check_lattice(self.block_size, config.forced)
        # Windows a token: the lattice's states, or those that the draws visit at most; planning holds a number for
        # each pair of tokens of a block in each draw.
        each = 2**self.block_size - 1
        if not config.exact:
            most = config.draws * min(self.block_size, config.generation.steps or self.block_size)
            each = max(min(each, most), config.draws * self.block_size // 8)
        cut = chunks(
            texts,
            lambda text: each * token_estimate(text),
            self._chunk_tokens(TOKENS_CHUNK),
            self._chunk_seconds(by_time),
        )
        for portion in cut:
            yield self._bound_batch(portion, config, progress)

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
        blocks = cut_blocks(sequences.target_lengths, self.block_size, self.spec.start_id is not None)
        keys = np.array([target_key(config.seed, item) for item in ids], dtype=np.uint64)
        with np.errstate(invalid="ignore"):  # probabilities of 0 are named below
            values = self._evaluate(config, sequences, blocks, ids, keys, progress)
        # +inf above is a bound, of no use but true (a surrogate of probability 0); -inf below: the text has none.
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
        attention = AttentionPattern("block", self.block_size)
        count = len(blocks.lengths)
        unknown = np.full(count, np.nan)
        known = dict(start=blocks.start, num_tokens=blocks.lengths)
        autoregressive = unknown
        if (config.autoregressive or config.surrogate == "autoregressive") and count:
            autoregressive = _per_block(autoregressive_log_probs(self._runner, sequences, progress), blocks)
        if config.exact:
            lattice = Lattice(blocks, config.generation)
            exact = self._runner.evaluate(lattice, sequences, attention, progress) if count else unknown
            nothing = np.zeros(count)
            return BlockBounds(
                **known,
                lower=exact,
                upper=exact,
                exact=exact,
                stderr_lower=nothing,
                stderr_upper=nothing,
                degrees_of_freedom=np.full(count, np.inf),
                few_draws=np.zeros(count, dtype=bool),
                autoregressive=autoregressive,
                effective_draws=unknown,
                distinct_states=lattice.num_states,
                visited_states=lattice.num_states,
                comparators={},
            )
        # Planning holds some numbers for each token of each draw: with many draws, a text goes part by part.
        parts = []
        for first, last in runs_within(config.draws * blocks.lengths, self._runner.plan_tokens):
            part = Blocks(blocks.sequence[first:last], blocks.start[first:last], blocks.stop[first:last])
            estimator = SampledOrders(part, keys, config.generation, config.draws, config.design)
            parts.append(self._runner.evaluate(estimator, sequences, attention, progress))
        result = OrderResult.join(parts, config.draws)
        psi = _per_block(_called(config.surrogate, ids), blocks) if callable(config.surrogate) else autoregressive
        found = sampled_bounds(config, result.log_p, blocks.lengths, psi)
        comparators = {}
        if config.comparators:
            comparators = {
                "cubo_2": evidence.cubo(result.log_p, 2.0),
                "tvo_upper": evidence.tvo_upper(result.log_p, np.array(TVO_PARTITION)),
                "is_vg_b": evidence.is_vg_b(result.log_p),
            }
        return BlockBounds(
            **known,
            lower=found.lower.value,
            upper=found.upper.value,
            exact=unknown,
            stderr_lower=found.lower.stderr,
            stderr_upper=found.upper.stderr,
            degrees_of_freedom=found.degrees_of_freedom,
            few_draws=found.few_draws,
            autoregressive=autoregressive,
            effective_draws=found.effective_draws,
            distinct_states=result.distinct_states,
            visited_states=result.visited_states,
            comparators=comparators,
        )

    def signature(self, config: BoundsConfig) -> BoundsSignature:
        """What bounds under this configuration depend on beside the text."""
        generation = config.generation
        named = config.surrogate
        surrogate = _surrogate_name(named) if callable(named) else named
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


def _surrogate_name(surrogate: Callable[..., Any]) -> str:
    """What a signature calls a user's function: its attribute `name`, or where a module defines it.

    Raises
    ------
    InputError
        For what has neither: two lambdas, or two objects of one class, would pass for one surrogate.
    """
    if isinstance(name := getattr(surrogate, "name", None), str):
        return name
    qualified = getattr(surrogate, "__qualname__", "<object>")
    if "<" in qualified:
        raise InputError(
            "the surrogate is a lambda, a local function or an object, which a signature cannot tell from another; "
            "give it an attribute `name` that says what it computes, or define it at the top of a module"
        )
    return f"{surrogate.__module__}.{qualified}"


def _called(surrogate: Callable[[list[np.ndarray]], list[np.ndarray]], ids: list[np.ndarray]) -> np.ndarray:
    """Log-probabilities of all tokens from a user's function, checked: a wrong length would shift every block."""
    if not ids:
        return np.zeros(0)
    answers = [np.asarray(item, dtype=np.float64) for item in surrogate(ids)]
    if [item.shape for item in answers] != [item.shape for item in ids]:
        raise InputError("the surrogate must return one array a text, with the log-probability of each of its tokens")
    flat = np.concatenate(answers)
    if np.isnan(flat).any() or (flat > 0).any():
        raise InputError("the surrogate returned a number that is no log-probability (NaN, or above 0)")
    return flat


def _per_block(per_token: np.ndarray, blocks: Blocks) -> np.ndarray:
    """Sums over the tokens of each block, each by itself; the blocks of all texts tile their tokens."""
    return np.bincount(segment_ids(blocks.lengths), weights=per_token, minlength=len(blocks.lengths))
