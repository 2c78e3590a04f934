"""What an estimator asks of the model: sequences, masks over them, and rounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np

from diffscore_fast.engine.ragged import concatenate

Result = TypeVar("Result", covariant=True)


@dataclass(frozen=True)
class AttentionPattern:
    """An attention pattern by name, with its block size where it has one."""

    name: str
    block_size: int = 0


@dataclass(frozen=True)
class Sequences:
    """What is scored: S targets, each after one of C contexts. Flat tokens with offsets.

    Parameters
    ----------
    context_tokens : int32 [sum of lengths], context_offsets : int64 [C + 1]
        Visible tokens before a target, without the start token.
    context_of : int64 [S]
        Index of each sequence's context.
    target_tokens : int32 [sum of lengths], target_offsets : int64 [S + 1]
        The tokens that plans mask.
    """

    context_tokens: np.ndarray
    context_offsets: np.ndarray
    context_of: np.ndarray
    target_tokens: np.ndarray
    target_offsets: np.ndarray

    @staticmethod
    def build(contexts: list[np.ndarray], context_of: np.ndarray, targets: list[np.ndarray]) -> Sequences:
        """From one token array per context and one per target."""
        return Sequences(*concatenate(contexts), np.asarray(context_of, dtype=np.int64), *concatenate(targets))

    @property
    def target_lengths(self) -> np.ndarray:
        return np.diff(self.target_offsets)


@dataclass(frozen=True)
class MaskPlan:
    """Which tokens are read masked: n spans of targets, each under one mask.

    Parameters
    ----------
    sequence, start, stop : int64 [n]
        Span [start, stop) of the target of that sequence.
    masked : bool [sum of stop - start]
        The spans' tokens laid end to end; True is masked.
    wanted : bool [sum of stop - start], optional
        The masked tokens whose log-probability is asked for; all of them if not given.
    attention : AttentionPattern, optional
        The attention pattern of this plan, if it is not the run's.
    """

    sequence: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    masked: np.ndarray
    wanted: np.ndarray | None = None
    attention: AttentionPattern | None = None


@dataclass(frozen=True)
class Observation:
    """One round of an estimator: its plan, and the log-probability of every wanted token in the plan's order."""

    plan: MaskPlan
    log_probs: np.ndarray  # float32 [number of wanted tokens]


class Estimator(Protocol, Generic[Result]):
    """A plan in front of the model and a reduction behind it. It knows no model and no tokenizer."""

    def plan(self, observed: list[Observation]) -> MaskPlan | None:
        """The next round's plan, given the rounds so far; None when nothing more is to be evaluated."""
        ...

    def reduce(self, observed: list[Observation]) -> Result:
        """The result of all rounds."""
        ...
