"""How rows are scored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from diffscore_fast.arguments import checked_seed, real_number
from diffscore_fast.errors import InputError
from diffscore_fast.scoring.mask_design import MaskDesign
from diffscore_fast.scoring.reconstruction import ReconstructionConfig
from diffscore_fast.scoring.references import AGGREGATES, Aggregate
from diffscore_fast.text.tagger import DEFAULT_TAGGER, MASK_WORDS, MaskWords
from diffscore_fast.text.templates import PLAIN, Template

Direction = Literal["marginal", "conditional", "reverse", "bidirectional", "pmi"]
Overlength = Literal["error", "skip", "truncate-source"]

DIRECTIONS = ("marginal", "conditional", "reverse", "bidirectional", "pmi")
OVERLENGTH = ("error", "skip", "truncate-source")
# The attention patterns that each score reads; the first is that of the draws, the second corrects some of them.
ATTENTIONS = {"full": ("full",), "prefix": ("prefix",), "corrected": ("prefix", "full")}


@dataclass(frozen=True, kw_only=True)
class ScoreConfig:
    """How rows are scored. Field by field as the keyword arguments of `DiffScorer.score`."""

    direction: Direction = "conditional"
    reconstruction: ReconstructionConfig = ReconstructionConfig()
    alpha: float = 0.5
    seed: int = 0
    attention: str = "prefix"
    overlength: Overlength = "error"
    token_scores: bool = False
    template: Template = PLAIN
    aggregate: Aggregate | None = None  # of references, which stand in the source's place; None where there are none
    mask_words: MaskWords = "all"
    tagger: str = DEFAULT_TAGGER

    def __post_init__(self) -> None:
        for value, known, what in (
            (self.direction, DIRECTIONS, "direction"),
            (self.attention, tuple(ATTENTIONS), "attention"),
            (self.overlength, OVERLENGTH, "overlength policy"),
            (self.mask_words, MASK_WORDS, "class of words"),
            (self.aggregate, (None, *AGGREGATES), "aggregate"),
        ):
            if value not in known:
                raise InputError(f"{what} {value!r} is unknown; use {', '.join(filter(None, known))}")
        if self.aggregate is not None and not self.needs_source:
            raise InputError("marginal reads no references; use another direction")
        if self.aggregate == "mean" and self.direction == "reverse" and self.token_scores:
            raise InputError("the mean over references scores no single text in reverse; for token scores use max")
        object.__setattr__(self, "alpha", real_number("alpha", self.alpha))
        if not 0.0 <= self.alpha <= 1.0:
            raise InputError(f"alpha must lie in [0, 1], not {self.alpha}")
        if (self.attention == "corrected") != (self.reconstruction.full_draws is not None):
            raise InputError("full draws belong to attention 'corrected', which needs them")
        object.__setattr__(self, "seed", checked_seed(self.seed))

    @property
    def patterns(self) -> tuple[str, ...]:
        """Attention patterns that the model must have."""
        return ATTENTIONS[self.attention]

    @property
    def needs_source(self) -> bool:
        return self.direction != "marginal"

    @property
    def context_name(self) -> str:
        """What messages call the text beside the candidate."""
        return "source" if self.aggregate is None else "reference"

    @property
    def kind(self) -> str:
        """What the numbers are; see `ScoreTable`."""
        if self.direction == "pmi":
            return "difference"
        # The best of several noisy lower bounds is none: its expectation may lie above every likelihood.
        bound = self.aggregate == "max" and self.reconstruction.kind == "lower bound"
        return "maximum of lower bounds" if bound else self.reconstruction.kind

    @property
    def passes(self) -> tuple[tuple[str, float], ...]:
        """(simple direction, coefficient) pairs whose sum is the score."""
        if self.direction == "bidirectional":
            return ("conditional", self.alpha), ("reverse", 1.0 - self.alpha)
        if self.direction == "pmi":
            return ("conditional", 1.0), ("marginal", -1.0)
        return ((self.direction, 1.0),)


def default_full_draws(
    attention: str,
    design: MaskDesign,
    full_draws: int | Literal["auto"] | None,
) -> int | Literal["auto"] | None:
    """J as given; for attention "corrected" the least there is, if not given."""
    if attention == "corrected" and full_draws is None:
        return max(2, design.num_replicates)
    return full_draws
