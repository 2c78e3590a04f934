"""Signatures: everything that a number depends on besides its row. Numbers with equal signatures are comparable."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


class BaseSignature:
    """How a signature is stored and printed."""

    def to_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)  # type: ignore[call-overload]

    def __str__(self) -> str:
        """One line, as sacrebleu prints it: `name:value|name:value`. Fields without a value are left out."""
        parts = []
        for name, value in self.to_dict().items():
            if value is None or value is False:
                continue
            shown = ",".join(f"{item}" for item in value) if isinstance(value, tuple) else f"{value}"
            parts.append(f"{name}:{shown}")
        return "|".join(parts)


@dataclass(frozen=True)
class Signature(BaseSignature):
    """What a score depends on."""

    version: str
    model: str
    weights: str
    adapter: str | None
    tokenizer: str
    direction: str
    alpha: float | None
    estimator: str
    level_weights: tuple[float, ...] | None
    length_normalised: bool
    masking: str
    mask_words: str | None
    tagger: str | None
    mask_ratios: str
    coupling: str | None
    draws: int
    levels: int
    replicates: int
    target_stderr: float | None
    max_draws: int | None
    seed: int
    masks_by: str | None
    attention: str
    block_size: int | None
    full_draws: int | str | None
    dtype: str
    implementation: str
    template: str
    aggregate: str | None
    overlength: str


@dataclass(frozen=True)
class BoundsSignature(BaseSignature):
    """What bounds depend on."""

    version: str
    model: str
    weights: str
    adapter: str | None
    tokenizer: str
    block_size: int
    generation: str
    steps: int | None
    step_probabilities: tuple[float, ...] | None
    method: str
    orders: int | None
    surrogate: str | None
    surrogate_orders: int | None
    folds: int | None
    design: str | None
    seed: int | None
    dtype: str
    implementation: str
