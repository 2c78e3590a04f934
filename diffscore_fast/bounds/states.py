"""States of blocks, (block, set of visible tokens), and the two estimators that evaluate them.

`SampledOrders` evaluates the states that sampled orders visit, `Lattice` all states of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np

from diffscore_fast.bounds.lattice import exact_log_likelihood
from diffscore_fast.bounds.orders import Generation, OrderDesign, draw_steps, visible_before
from diffscore_fast.engine.plan import MaskPlan, Observation
from diffscore_fast.engine.ragged import offsets_of, places_in, segment_ids
from diffscore_fast.errors import InputError

MAX_STATE_TOKENS = 32  # a state's number holds the index of its block and one bit per token


@dataclass(frozen=True)
class Blocks:
    """Texts cut into blocks: B spans [start, stop) of the targets of `sequence`, in order. int64 [B] each."""

    sequence: np.ndarray
    start: np.ndarray
    stop: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each block, int64 [B]."""
        return self.stop - self.start


def cut_blocks(lengths: np.ndarray, block_size: int, has_start: bool) -> Blocks:
    """Cut targets of these lengths into blocks. A start token takes the first place of a text's first block.

    The last block of a text may be shorter than `block_size`.
    """
    places = int(has_start)
    counts = -(-(lengths + places) // block_size)
    sequence, index = segment_ids(counts), places_in(counts)
    start = np.maximum(index * block_size - places, 0)
    stop = np.minimum((index + 1) * block_size - places, lengths[sequence])
    kept = stop > start  # at block size 1 the start token is a block of its own
    return Blocks(sequence[kept], start[kept], stop[kept])


@dataclass(frozen=True)
class OrderResult:
    """log p(x_block | z_k) of every draw, and how many states were evaluated for them.

    Parameters
    ----------
    log_p : float64 [B, N]
    distinct_states : int64 [B]
        (block, visible subset) states evaluated.
    visited_states : int64 [B]
        Evaluations if no state were shared: the number of non-empty steps of all draws.
    """

    log_p: np.ndarray
    distinct_states: np.ndarray
    visited_states: np.ndarray

    @staticmethod
    def join(parts: list[OrderResult], draws: int) -> OrderResult:
        """Results of consecutive blocks as one. No results: no blocks, and `draws` columns."""
        none = OrderResult(np.zeros((0, draws)), np.zeros(0, np.int64), np.zeros(0, np.int64))
        names = [item.name for item in fields(OrderResult)]
        return OrderResult(*(np.concatenate([getattr(part, name) for part in (none, *parts)]) for name in names))


class SampledOrders:
    """log p(x | z) of sampled orders or trajectories. Each distinct state is evaluated once.

    Parameters
    ----------
    blocks : Blocks
    keys : uint64 [S]
        Random key of each sequence.
    generation : Generation
    draws, design
        See `draw_steps`.
    """

    def __init__(
        self, blocks: Blocks, keys: np.ndarray, generation: Generation, draws: int, design: OrderDesign
    ) -> None:
        self._blocks = blocks
        width = int(blocks.lengths.max(initial=1))
        if width > MAX_STATE_TOKENS:
            raise InputError(f"blocks have {width} tokens; sampled orders take at most {MAX_STATE_TOKENS}")
        place = np.arange(width)
        valid = place < blocks.lengths[:, None]  # [B, L]
        tokens = blocks.start[:, None] + place
        steps = draw_steps(keys[blocks.sequence], tokens, valid, draws, design, generation)
        visible = visible_before(steps)  # [B, N, L]
        asked = np.broadcast_to(valid[:, None, :], steps.shape)
        code = (np.arange(len(valid))[:, None, None] << width) | visible
        states, self._state_of = np.unique(code[asked], return_inverse=True)
        self._asked = asked
        self._state_block, self._state_bits = states >> width, states & ((1 << width) - 1)
        token_of = np.broadcast_to(place, steps.shape)[asked]
        # The vocabulary projection runs only for tokens that some order predicts from the state.
        self._wanted = np.zeros((len(states), width), dtype=bool)
        self._wanted[self._state_of, token_of] = True
        self._token_of = token_of
        # All tokens of a step see the same set: the non-empty steps of a draw are its distinct sets.
        ordered = np.sort(np.where(asked, visible, -1), axis=2)
        first = np.concatenate([np.ones((*ordered.shape[:2], 1), bool), np.diff(ordered, axis=2) != 0], axis=2)
        self._visited = (first & (ordered >= 0)).sum(axis=(1, 2))

    def plan(self, observed: list[Observation]) -> MaskPlan | None:
        """One round: all distinct states."""
        return None if observed else plan_states(self._blocks, self._state_block, self._state_bits, self._wanted)

    def reduce(self, observed: list[Observation]) -> OrderResult:
        """log p(x | z) of every draw."""
        table = np.full(self._wanted.shape, np.nan)
        table[self._wanted] = observed[0].log_probs
        terms = np.zeros(self._asked.shape)
        terms[self._asked] = table[self._state_of, self._token_of]
        distinct = np.bincount(self._state_block, minlength=len(self._blocks.lengths))
        return OrderResult(terms.sum(axis=2), distinct, self._visited)


class Lattice:
    """Exact log p(x_block): all 2^n - 1 states of every block of n tokens."""

    def __init__(self, blocks: Blocks, generation: Generation) -> None:
        self._blocks, self._generation = blocks, generation
        self.num_states = (np.int64(1) << blocks.lengths) - 1
        self._block_of, self._bits = segment_ids(self.num_states), places_in(self.num_states)
        width = int(blocks.lengths.max(initial=1))
        place = np.arange(width)
        in_block = place < blocks.lengths[self._block_of, None]
        self._masked = in_block & ((self._bits[:, None] >> place) & 1 == 0)

    def plan(self, observed: list[Observation]) -> MaskPlan | None:
        """One round: all states with a masked token."""
        return None if observed else plan_states(self._blocks, self._block_of, self._bits, self._masked)

    def reduce(self, observed: list[Observation]) -> np.ndarray:
        """log p(x_block), float64 [B]."""
        out = np.zeros(len(self._blocks.lengths))
        for chosen, table in self.tables(observed):
            out[chosen] = exact_log_likelihood(table, self._generation)
        return out

    def tables(self, observed: list[Observation]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """For each block length n: the indices [b] of its blocks, and log p(x_j | x_S) of their states, [b, 2^n, n]."""
        flat = np.full(self._masked.shape, np.nan)
        flat[self._masked] = observed[0].log_probs
        first_state = offsets_of(self.num_states)
        for length in np.unique(self._blocks.lengths):
            chosen = np.flatnonzero(self._blocks.lengths == length)
            table = np.full((len(chosen), 1 << length, length), np.nan)
            rows = first_state[chosen][:, None] + np.arange((1 << length) - 1)
            table[:, :-1] = flat[rows][:, :, :length]
            yield chosen, table


def plan_states(blocks: Blocks, state_block: np.ndarray, state_bits: np.ndarray, wanted: np.ndarray) -> MaskPlan:
    """A plan of states: in each, all tokens of the block but its visible ones are masked. `wanted`: bool [states, L]"""
    lengths = blocks.lengths[state_block]
    flat_state, flat_place = segment_ids(lengths), places_in(lengths)
    return MaskPlan(
        sequence=blocks.sequence[state_block],
        start=blocks.start[state_block],
        stop=blocks.stop[state_block],
        masked=(state_bits[flat_state] >> flat_place) & 1 == 0,
        wanted=wanted[flat_state, flat_place],
    )
