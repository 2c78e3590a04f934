"""The configuration of bounds: which likelihood, from how many orders, and with which surrogate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from diffscore_fast.arguments import check_at_most, checked_seed, real_number, whole_number
from diffscore_fast.bounds.orders import Generation
from diffscore_fast.errors import InputError
from diffscore_fast.options import (
    DEFAULT_ORDER_DESIGN,
    DEFAULT_ORDERS,
    DEFAULT_SEED,
    DEFAULT_SURROGATE,
    DEFAULT_SURROGATE_ORDERS,
    GENERATIONS,
    MAX_AUTO_EXACT_BLOCK_SIZE,
    MAX_EXACT_BLOCK_SIZE,
    MAX_ORDERS,
    ORDER_DESIGNS,
    SURROGATES,
    GenerationName,
    OrderDesign,
    SurrogateName,
)

# A name, or a function from the token ids of texts to the log-probability of every token.
Surrogate = SurrogateName | Callable[[list[np.ndarray]], list[np.ndarray]]


@dataclass(frozen=True, kw_only=True)
class BoundsConfig:
    """How texts are bounded. The fields are the keyword arguments of `LikelihoodBounds.estimate` and `exact`."""

    exact: bool = False
    generation: Generation = Generation()
    orders: int = DEFAULT_ORDERS
    surrogate_orders: int = DEFAULT_SURROGATE_ORDERS
    surrogate: Surrogate = DEFAULT_SURROGATE
    cross_fitted: bool = True
    folds: int | None = None
    design: OrderDesign = DEFAULT_ORDER_DESIGN
    seed: int = DEFAULT_SEED
    autoregressive: bool = False
    comparators: bool = False
    forced: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        if self.design not in ORDER_DESIGNS:
            raise InputError(f"order design {self.design!r} is unknown; use {' or '.join(ORDER_DESIGNS)}")
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
        if not callable(self.surrogate) and self.surrogate not in SURROGATES:
            raise InputError(f"surrogate {self.surrogate!r} is unknown; use {', '.join(SURROGATES)}, or a function")
        if self.design == "antithetic" and (self.orders % 2 or self.num_surrogate % 2):
            raise InputError("antithetic orders come in pairs: give even numbers of orders and surrogate orders")
        if self.uses_folds and (self.num_folds < 2 or self.independent_draws % self.num_folds):
            raise InputError(
                f"folds must be at least 2 and divide the {self.independent_draws} independent draws, "
                f"{self.num_folds} does not"
            )

    @property
    def num_surrogate(self) -> int:
        """M: draws whose mean is the surrogate; 0 if the surrogate is another model."""
        if self.surrogate == "self":
            return self.surrogate_orders
        return 1 if self.surrogate == "single" else 0

    @property
    def draws(self) -> int:
        """K + M: all draws of a block."""
        return self.orders + self.num_surrogate

    @property
    def uses_folds(self) -> bool:
        """Whether the upper bound is cross-fitted."""
        return not self.exact and self.surrogate == "self" and self.cross_fitted

    @property
    def independent_draws(self) -> int:
        """Number of draws; of pairs of draws, where orders are antithetic."""
        return self.draws // 2 if self.design == "antithetic" else self.draws

    @property
    def num_folds(self) -> int:
        """F, the folds of the cross-fitting. If not given, every independent draw is a fold of its own."""
        return self.independent_draws if self.folds is None else self.folds


def make_generation(name: GenerationName, steps: int | None, step_probabilities: Sequence[float] | None) -> Generation:
    """The `Generation` that these arguments of a public call describe."""
    if name not in GENERATIONS:
        raise InputError(f"generation {name!r} is unknown; use {' or '.join(GENERATIONS)}")
    if (steps is None) != (name == "any-order"):
        raise InputError("steps belong to parallel generation, which needs them")
    if step_probabilities is None:
        return Generation(steps)
    return Generation(steps, tuple(real_number("a step probability", item) for item in step_probabilities))


def check_lattice(block_size: int, forced: bool) -> None:
    """Refuse the exact likelihood of large blocks, and say what it would cost, unless `forced`."""
    if block_size > MAX_EXACT_BLOCK_SIZE and not forced:
        states, usual = 2**block_size - 1, 2**MAX_AUTO_EXACT_BLOCK_SIZE - 1
        raise InputError(
            f"the exact likelihood at block size {block_size} takes {states:,} states per block, "
            f"{states / usual:,.0f} times as many as at block size {MAX_AUTO_EXACT_BLOCK_SIZE}; "
            "use estimate, or forced=True (--force)"
        )
