"""What scoring returns: arrays, one status a row, and the signature that makes numbers comparable."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from diffscore_fast.engine.ragged import offsets_of

if TYPE_CHECKING:
    import pandas

OK = "ok"
TRUNCATED_SOURCE = "truncated_source"  # scored, the source cut as the policy says
EMPTY_CANDIDATE = "empty_candidate"
EMPTY_SOURCE = "empty_source"
MISSING = "missing"
TOO_LONG = "too_long"
INVALID_TEXT = "invalid_text"
INVALID_RECORD = "invalid_record"

SCORED = frozenset({OK, TRUNCATED_SOURCE})


@dataclass(frozen=True)
class InvalidRecord:
    """Stands in for the texts of a row that could not be read; the row gets status "invalid_record"."""

    message: str


@dataclass(frozen=True)
class Signature:
    """Everything a score depends on beside the row. Two scores are comparable when their signatures are equal."""

    version: str
    model: str
    weights: str
    tokenizer: str
    direction: str
    alpha: float | None
    estimator: str
    level_weights: tuple[float, ...] | None
    length_normalised: bool
    masking: str
    ratios: str
    draws: int
    levels: int
    replicates: int
    seed: int
    attention: str
    dtype: str
    implementation: str
    template: str
    overlength: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        """One line, in the manner of sacrebleu: `name:value|name:value`; unset fields are left out."""
        parts = []
        for name, value in asdict(self).items():
            if value is None or value is False:
                continue
            shown = ",".join(f"{item:g}" for item in value) if isinstance(value, tuple) else f"{value}"
            parts.append(f"{name}:{shown}")
        return "|".join(parts)


@dataclass(frozen=True)
class TokenScores:
    """Scores of the tokens of all rows, laid end to end; row i owns offsets[i] .. offsets[i + 1].

    A token's score is its mean log-prob over the draws in which it was masked. These do not average to the row's
    score, which gives every draw the same weight.

    Parameters
    ----------
    offsets : int64 [n + 1]
    spans : int32 [tokens, 2]
        Half-open range of characters in the row's text (the source for `reverse`, else the candidate).
    log_probs : float64 [tokens]
        NaN where a token was never masked.
    counts : int64 [tokens]
        Number of draws that masked it.
    """

    offsets: np.ndarray
    spans: np.ndarray
    log_probs: np.ndarray
    counts: np.ndarray

    @staticmethod
    def none(rows: int) -> TokenScores:
        """For rows without a token."""
        nothing = np.zeros(0, np.int64)
        return TokenScores(np.zeros(rows + 1, np.int64), np.zeros((0, 2), np.int32), np.zeros(0), nothing)

    @staticmethod
    def join(parts: list[TokenScores]) -> TokenScores:
        """Those of consecutive rows as one."""
        offsets = offsets_of(np.concatenate([np.diff(part.offsets) for part in parts]))
        columns = (np.concatenate([getattr(part, name) for part in parts]) for name in ("spans", "log_probs", "counts"))
        return TokenScores(offsets, *columns)


@dataclass(frozen=True)
class ScoreTable:
    """Scores of n rows, in input order.

    Parameters
    ----------
    scores : float64 [n]
        Nats a token (natural logarithm); NaN where the row has no score.
    stderr : float64 [n]
        Standard error over replicates; NaN where the row has no score or the design has one replicate.
    num_tokens : int64 [n]
        Tokens scored; 0 where the row has no score. `bidirectional` counts both texts.
    status : list of str
        "ok", or why not; see the README.
    messages : list of str
        One sentence where the status is not "ok".
    truncated_tokens : int64 [n]
        Source tokens cut by the over-length policy.
    profile : float64 [n, levels], profile_ratios : float64 [levels]
        Mean log-prob by mask ratio; NaN in rows without a score and levels without a draw. For `bidirectional` and
        `pmi`, combined like the score.
    kind : str
        "mean log-prob", "lower bound" (on log-likelihood), or "difference" (pmi).
    signature : Signature
    tokens : TokenScores or None
        On request.
    """

    scores: np.ndarray
    stderr: np.ndarray
    num_tokens: np.ndarray
    status: list[str]
    messages: list[str]
    truncated_tokens: np.ndarray
    profile: np.ndarray
    profile_ratios: np.ndarray
    kind: str
    signature: Signature
    tokens: TokenScores | None = None

    def __len__(self) -> int:
        return len(self.status)

    @staticmethod
    def join(tables: list[ScoreTable]) -> ScoreTable:
        """Consecutive tables of one signature as one."""
        columns: dict[str, Any] = {}
        for name in ("scores", "stderr", "num_tokens", "truncated_tokens", "profile"):
            columns[name] = np.concatenate([getattr(table, name) for table in tables])
        for name in ("status", "messages"):
            columns[name] = [item for table in tables for item in getattr(table, name)]
        tokens = [table.tokens for table in tables if table.tokens is not None]
        return replace(tables[0], **columns, tokens=TokenScores.join(tokens) if tokens else None)

    def to_pandas(self) -> pandas.DataFrame:
        """A DataFrame with the columns score, stderr, tokens, status (needs pandas)."""
        import pandas

        columns = {"score": self.scores, "stderr": self.stderr, "tokens": self.num_tokens, "status": self.status}
        return pandas.DataFrame(columns)
