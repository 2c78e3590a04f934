"""LikelihoodBounds: log p(x) of a block model from both sides (TUBE, arXiv 2605.24292), or exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from diffscore_fast.arguments import (
    MAX_ORDERS,
    check_at_most,
    checked_column,
    checked_seed,
    real_number,
    whole_number,
)
from diffscore_fast.engine.ragged import runs_within, segment_ids
from diffscore_fast.engine.random import target_key
from diffscore_fast.engine.windows import Attention, Sequences
from diffscore_fast.errors import InputError
from diffscore_fast.estimators import evidence
from diffscore_fast.estimators.orders import Generation, OrderDesign
from diffscore_fast.estimators.trajectories import (
    Blocks,
    Lattice,
    OrderResult,
    SampledOrders,
    autoregressive_log_probs,
    cut_blocks,
)
from diffscore_fast.model import ScoringModel, portions, token_estimate
from diffscore_fast.results import (
    EMPTY_TEXT,
    NON_FINITE_SCORE,
    OK,
    TOO_LONG,
    BlockBounds,
    BoundsSignature,
    BoundsTable,
    non_finite_message,
)
from diffscore_fast.text.checks import check_text
from diffscore_fast.text.tokenizer import count_of

Surrogate = Literal["self", "single", "autoregressive"] | Callable[[list[np.ndarray]], list[np.ndarray]]

EXACT_LIMIT = 12  # block size; 4,095 states a block
# States are planned in portions of about this many window tokens: a bound on memory, and on what a killed run loses.
TOKENS_AT_ONCE = 1 << 17
# An error from fewer independent draws (pairs, where orders are antithetic) is too uncertain to be trusted. Measured by
# bench.few_orders.
MIN_INDEPENDENT_DRAWS = 8
TVO_PARTITION = (1 / 64, 1 / 16, 1 / 4, 1 / 2, 1.0)


@dataclass(frozen=True, kw_only=True)
class BoundsConfig:
    """How texts are bounded. Field by field as the keyword arguments of `LikelihoodBounds.estimate`."""

    exact: bool = False
    generation: Generation = Generation()
    orders: int = 32
    surrogate_orders: int = 32
    surrogate: Surrogate = "self"
    cross_fitted: bool = True
    folds: int | None = None
    design: OrderDesign = "independent"
    seed: int = 0
    autoregressive: bool = False
    comparators: bool = False
    forced: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        if self.design not in ("independent", "antithetic"):
            raise InputError(f"order design {self.design!r} is unknown; use independent or antithetic")
        object.__setattr__(self, "seed", checked_seed(self.seed))
        for name in ("orders", "surrogate_orders"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name)))
            check_at_most(name.replace("_", " "), getattr(self, name), MAX_ORDERS)
        if self.folds is not None:
            object.__setattr__(self, "folds", whole_number("folds", self.folds))
        if self.folds is not None and not (self.surrogate == "self" and self.cross_fitted):
            raise InputError("folds belong to the cross-fitted self surrogate")
        if self.orders < 1 or self.surrogate_orders < 1:
            raise InputError("orders and surrogate orders must be at least 1")
        if not callable(self.surrogate) and self.surrogate not in ("self", "single", "autoregressive"):
            raise InputError(
                f"surrogate {self.surrogate!r} is unknown; use self, single, autoregressive, or a function"
            )
        if self.design == "antithetic" and (self.orders % 2 or self.num_surrogate % 2):
            raise InputError("antithetic orders come in pairs: give even numbers of orders and surrogate orders")
        if self.uses_folds and (self.num_folds < 2 or self.independent_draws % self.num_folds):
            raise InputError(
                f"folds must be at least 2 and divide the {self.independent_draws} independent draws, "
                f"{self.num_folds} does not"
            )

    @property
    def num_surrogate(self) -> int:
        """M: draws that make the surrogate."""
        if self.surrogate == "self":
            return self.surrogate_orders
        return 1 if self.surrogate == "single" else 0

    @property
    def draws(self) -> int:
        """K + M."""
        return self.orders + self.num_surrogate

    @property
    def uses_folds(self) -> bool:
        return not self.exact and self.surrogate == "self" and self.cross_fitted

    @property
    def independent_draws(self) -> int:
        """Draws, or pairs of draws where they are coupled."""
        return self.draws // 2 if self.design == "antithetic" else self.draws

    @property
    def num_folds(self) -> int:
        """Folds of the cross-fitting; every independent draw by itself if not given."""
        return self.independent_draws if self.folds is None else self.folds


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
        super().__init__(model, attention=Attention("block", block_size), **options)
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
            generation=make_generation(generation, steps, step_probabilities), orders=orders,
            surrogate_orders=surrogate_orders, surrogate=surrogate, cross_fitted=cross_fitted, folds=folds,
            design=design, seed=seed, autoregressive=autoregressive, comparators=comparators,
        )  # fmt: skip
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
        config = BoundsConfig(exact=True, generation=make_generation(generation, steps, step_probabilities),
                              autoregressive=autoregressive, forced=forced)  # fmt: skip
        return self._table(texts, config, progress)

    def bound_batches(self, texts: Iterable[Any], config: BoundsConfig,
                      progress: Callable[[int], None] | None = None, *,
                      by_time: bool = False) -> Iterator[BoundsTable]:  # fmt: skip
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
        cut = portions(texts, lambda text: each * token_estimate(text), self._portion_tokens(TOKENS_AT_ONCE),
                       self._portion_seconds(by_time))  # fmt: skip
        for portion in cut:
            yield self._bound_batch(portion, config, progress)

    def _table(self, texts: Any, config: BoundsConfig, progress: Callable[[int], None] | None) -> BoundsTable:
        tables = list(self.bound_batches(checked_column("texts", texts), config, progress))
        return BoundsTable.join(tables) if tables else self._bound_batch([], config, progress)

    def _bound_batch(self, texts: list[Any], config: BoundsConfig,
                     progress: Callable[[int], None] | None) -> BoundsTable:  # fmt: skip
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
        lower, upper = (np.bincount(blocks.sequence, weights=item, minlength=len(ids)).astype(np.float64)
                        for item in (values.lower, values.upper))  # fmt: skip
        good = np.isfinite(lower) & ~np.isnan(upper) & ~np.isneginf(upper)
        for index in np.flatnonzero(~good):
            status[kept[index]] = NON_FINITE_SCORE
            worst = upper[index] if np.isfinite(lower[index]) else lower[index]
            messages[kept[index]] = non_finite_message("log-likelihood", worst)
        own = good[blocks.sequence]
        return BoundsTable.from_blocks(
            values.take(np.flatnonzero(own)), (np.cumsum(good) - 1)[blocks.sequence[own]],
            [row for row, fine in zip(kept, good, strict=True) if fine], status, messages,
            sequences.target_lengths[good], keys[good], self.signature(config),
        )  # fmt: skip

    def _evaluate(self, config: BoundsConfig, sequences: Sequences, blocks: Blocks, ids: list[np.ndarray],
                  keys: np.ndarray, progress: Callable[[int], None] | None) -> BlockBounds:  # fmt: skip
        attention = Attention("block", self.block_size)
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
                **known, lower=exact, upper=exact, exact=exact, stderr_lower=nothing, stderr_upper=nothing,
                degrees_of_freedom=np.full(count, np.inf), few_draws=np.zeros(count, dtype=bool),
                autoregressive=autoregressive, effective_draws=unknown, distinct_states=lattice.num_states,
                visited_states=lattice.num_states, comparators={},
            )  # fmt: skip
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
            **known, lower=found.lower.value, upper=found.upper.value, exact=unknown, stderr_lower=found.lower.stderr,
            stderr_upper=found.upper.stderr, degrees_of_freedom=found.degrees_of_freedom, few_draws=found.few_draws,
            autoregressive=autoregressive, effective_draws=found.effective_draws,
            distinct_states=result.distinct_states, visited_states=result.visited_states, comparators=comparators,
        )  # fmt: skip

    def signature(self, config: BoundsConfig) -> BoundsSignature:
        """What bounds under this configuration depend on beside the text."""
        generation = config.generation
        named = config.surrogate
        surrogate = _surrogate_name(named) if callable(named) else named
        return BoundsSignature(
            **self._identity, block_size=self.block_size,
            generation="any-order" if generation.steps is None else "parallel", steps=generation.steps,
            step_probabilities=generation.step_probabilities, method="exact" if config.exact else "estimate",
            orders=None if config.exact else config.orders,
            surrogate=None if config.exact else surrogate,
            surrogate_orders=config.num_surrogate or None if not config.exact else None,
            folds=config.num_folds if config.uses_folds else None, design=None if config.exact else config.design,
            seed=None if config.exact else config.seed,
        )  # fmt: skip


@dataclass(frozen=True)
class SampledBounds:
    """What the draws of B blocks give. See `BlockBounds` for the arrays."""

    lower: evidence.Estimate
    upper: evidence.Estimate
    effective_draws: np.ndarray
    degrees_of_freedom: np.ndarray
    few_draws: np.ndarray


def sampled_bounds(config: BoundsConfig, log_p: np.ndarray, lengths: np.ndarray, log_psi: np.ndarray) -> SampledBounds:
    """Both bounds from log p(x | z) of all draws [B, K + M], of blocks of these lengths [B].

    `log_psi` [B] is read where the surrogate is another model.
    """
    paired = config.design == "antithetic"
    log_p = evidence.pair_means(log_p) if paired else log_p
    split = config.num_surrogate // 2 if paired else config.num_surrogate
    independent = log_p.shape[1]  # draws, or pairs, that each error is made of; the fewer of its two parts
    if config.uses_folds:
        lower, upper = evidence.log_mean_exp(log_p), evidence.cross_fitted_upper(log_p, config.num_folds)
    elif split:
        lower = evidence.log_mean_exp(log_p[:, split:])
        psi = evidence.log_mean_exp(log_p[:, :split]).value
        upper = evidence.tangent_upper(log_p[:, split:], psi, log_p[:, :split])
        independent = min(independent - split, split if split > 1 else independent)
    else:
        lower, upper = evidence.log_mean_exp(log_p), evidence.tangent_upper(log_p, log_psi)
    # Draws that cannot differ have no error: one token, one step, a pair that holds both orders of two tokens.
    varied = lengths > (2 if paired and config.generation.steps is None else 1)
    if config.generation.num_possible_steps == 1:
        varied = np.zeros_like(varied)
    alike = (log_p == log_p[:, :1]).all(axis=1) & (independent < 2 * MIN_INDEPENDENT_DRAWS)
    few = varied & ((independent < MIN_INDEPENDENT_DRAWS) | alike)
    # Few draws that happen to be one and the same do not show an error of 0: they show none.
    lower, upper = (evidence.Estimate(item.value, np.where(varied & alike, np.nan, item.stderr))
                    for item in (lower, upper))  # fmt: skip
    degrees = np.where(varied, independent - 1.0, np.inf)
    return SampledBounds(lower, upper, evidence.effective_sample_size(log_p), degrees, few)


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


def make_generation(name: str, steps: int | None, step_probabilities: Sequence[float] | None) -> Generation:
    """A `Generation` from the words of the public calls."""
    if name not in ("any-order", "parallel"):
        raise InputError(f"generation {name!r} is unknown; use any-order or parallel")
    if (steps is None) != (name == "any-order"):
        raise InputError("steps belong to parallel generation, which needs them")
    chances = step_probabilities
    if chances is not None:
        chances = tuple(real_number("a step probability", item) for item in chances)
    return Generation(steps, chances)


def check_lattice(block_size: int, forced: bool) -> None:
    """Refuse exact likelihood of large blocks, with its cost, unless forced."""
    if block_size > EXACT_LIMIT and not forced:
        states = 2**block_size - 1
        raise InputError(
            f"exact likelihood at block size {block_size} takes {states:,} states a block, "
            f"{states / (2**8 - 1):,.0f} times the cost of block size 8; use estimate, or forced=True (--force)"
        )


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
