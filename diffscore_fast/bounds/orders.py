"""The latent order of a block: the step in which each token is predicted.

Any-order: a uniformly drawn permutation, one token per step. Parallel: each token's step is drawn independently,
uniformly from 1 .. T or from given step probabilities; all tokens of one step are predicted together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from diffscore_fast.arguments import check_at_most, whole_number
from diffscore_fast.engine.random import uniforms
from diffscore_fast.errors import InputError
from diffscore_fast.options import MAX_STEPS, OrderDesign

_ORDER_STREAM = 16


@dataclass(frozen=True)
class Generation:
    """How a block is generated.

    Parameters
    ----------
    steps : int or None
        T, the number of parallel steps; None for any-order.
    step_probabilities : tuple of float, optional
        Probability of each step 1 .. T for a token; uniform if not given.
    """

    steps: int | None = None
    step_probabilities: tuple[float, ...] | None = None

    @property
    def num_possible_steps(self) -> int | None:
        """Number of steps of probability above 0; None for any-order."""
        probabilities = self.step_probabilities
        return self.steps if probabilities is None else sum(item > 0 for item in probabilities)

    def __post_init__(self) -> None:
        if self.steps is not None:
            object.__setattr__(self, "steps", whole_number("steps", self.steps))
        if self.steps is not None and self.steps < 1:
            raise InputError(f"steps must be at least 1, not {self.steps}")
        if self.steps is not None:
            check_at_most("steps", self.steps, MAX_STEPS)
        if self.step_probabilities is None:
            return
        probabilities = np.asarray(self.step_probabilities, dtype=np.float64)
        if self.steps is None or probabilities.shape != (self.steps,):
            raise InputError("step probabilities belong to parallel generation, one per step")
        if not np.isfinite(probabilities).all() or (probabilities < 0).any() or abs(probabilities.sum() - 1) > 1e-9:
            raise InputError("step probabilities must be non-negative and sum to 1")


def draw_steps(
    keys: np.ndarray, tokens: np.ndarray, valid: np.ndarray, draws: int, design: OrderDesign, generation: Generation
) -> np.ndarray:
    """The step of every token in every draw.

    Parameters
    ----------
    keys : uint64 [B]
        Random key of each block's text.
    tokens : int64 [B, L]
        Index of each token in its text. Key and index determine the random numbers, for every block size.
    valid : bool [B, L]
        False beyond the last token of a short block.
    draws : int
    design : {"independent", "antithetic"}
        `antithetic`: draws 2i and 2i + 1 are an order and its reverse; pairs are independent of each other. In both
        designs every single order has the same distribution.
    generation : Generation

    Returns
    -------
    int64 [B, draws, L]
        Steps count from 0; for any-order they are a permutation of 0 .. n - 1 over the valid tokens. The step of
        tokens that are not valid is larger than all others.
    """
    draw = np.arange(draws)
    reverse = (draw % 2 == 1) & (design == "antithetic")
    source = draw - reverse
    shape = (len(keys), draws, tokens.shape[1])
    spread = np.broadcast_to
    numbers = uniforms(
        spread(keys[:, None, None], shape).ravel(),
        spread(source[None, :, None], shape).ravel(),
        spread(tokens[:, None, :], shape).ravel(),
        _ORDER_STREAM,
    ).reshape(shape)
    numbers = np.where(reverse[None, :, None], 1.0 - 2.0**-53 - numbers, numbers)
    if generation.steps is None:
        numbers = np.where(valid[:, None, :], numbers, 2.0)
        return numbers.argsort(axis=2, kind="stable").argsort(axis=2, kind="stable")
    if generation.step_probabilities is None:
        steps = (numbers * generation.steps).astype(np.int64)
    else:
        edges = np.cumsum(generation.step_probabilities)[:-1]
        steps = np.searchsorted(edges, numbers, side="right")
    return np.where(valid[:, None, :], steps, generation.steps)


def visible_before(steps: np.ndarray) -> np.ndarray:
    """For each token of each draw, the set of tokens of earlier steps as bits. int64, in the shape of `steps`."""
    visible = np.zeros_like(steps)
    for place in range(steps.shape[-1]):  # token by token: all pairs at once would take L times the memory
        visible |= (steps[..., place, None] < steps).astype(np.int64) << place
    return visible
