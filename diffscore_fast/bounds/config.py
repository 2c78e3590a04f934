"""How texts are bounded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from diffscore_fast.arguments import check_at_most, checked_seed, real_number, whole_number
from diffscore_fast.bounds.orders import Generation, OrderDesign
from diffscore_fast.errors import InputError
from diffscore_fast.options import MAX_ORDERS

Surrogate = Literal["self", "single", "autoregressive"] | Callable[[list[np.ndarray]], list[np.ndarray]]

EXACT_LIMIT = 12  # block size; 4,095 states a block


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
