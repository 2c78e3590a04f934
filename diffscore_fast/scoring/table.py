"""Scores of rows: arrays, and one status per row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from diffscore_fast.engine.ragged import offsets_of, take_segments
from diffscore_fast.errors import InputError

if TYPE_CHECKING:
    import pandas

from diffscore_fast.signature import Signature
from diffscore_fast.status import NON_FINITE_SCORE, SCORED, non_finite_message


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

    def take(self, rows: np.ndarray) -> TokenScores:
        """Those of the chosen rows, in the order chosen."""
        flat = take_segments(self.offsets, rows)
        offsets = offsets_of(np.diff(self.offsets)[rows])
        return TokenScores(offsets, self.spans[flat], self.log_probs[flat], self.counts[flat])

    @staticmethod
    def join(parts: list[TokenScores]) -> TokenScores:
        """Those of consecutive rows as one."""
        offsets = offsets_of(np.concatenate([np.diff(part.offsets) for part in parts]))
        columns = (np.concatenate([getattr(part, name) for part in parts]) for name in ("spans", "log_probs", "counts"))
        return TokenScores(offsets, *columns)


_COLUMNS = ("scores", "stderr", "num_tokens", "num_draws", "full_draws", "truncated_tokens", "profile")


@dataclass(frozen=True)
class ScoreTable:
    """Scores of n rows, in input order.

    Parameters
    ----------
    scores : float64 [n]
        Nats a token (natural logarithm); NaN where the row has no score.
    stderr : float64 [n]
        Standard error over replicates; NaN where the row has no score or the design has one replicate, 0 where all
        masks were enumerated.
    num_tokens : int64 [n]
        Tokens scored; 0 where the row has no score. `bidirectional` counts both texts, the mean over references all of
        its references, a class of words its own tokens alone.
    num_draws, full_draws : int64 [n]
        Draws (or masks, where all were enumerated) that the score rests on, pilots not counted; and how many of them
        were corrected (attention "corrected"). `bidirectional` gives the larger of its two.
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
        "mean log-prob", "lower bound" (on log-likelihood; of the class's tokens given the others, where one class of
        words is masked), "maximum of lower bounds" (over references), or "difference" (pmi).
    signature : Signature
    tokens : TokenScores or None
        On request.
    reference : int64 [n] or None
        Where the best of several references counts: its index in the row, -1 where the row has no score.
    """

    scores: np.ndarray
    stderr: np.ndarray
    num_tokens: np.ndarray
    num_draws: np.ndarray
    full_draws: np.ndarray
    status: list[str]
    messages: list[str]
    truncated_tokens: np.ndarray
    profile: np.ndarray
    profile_ratios: np.ndarray
    kind: str
    signature: Signature
    tokens: TokenScores | None = None
    reference: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.status)

    @property
    def nats(self) -> np.ndarray:
        """Scores in nats a text, float64 [n]: the score times its tokens (for `elbo`, the bound on log p itself).

        NaN for a mean over references and for `bidirectional`, which are about no single text.
        """
        if self.signature.aggregate == "mean" or self.signature.direction == "bidirectional":
            return np.full(len(self), np.nan)
        return np.where(self.num_tokens > 0, self.scores * self.num_tokens, np.nan)

    def take(self, rows: Sequence[int] | np.ndarray) -> ScoreTable:
        """The chosen rows, in the order chosen: by number, or by a bool a row as numpy selects.

        Raises
        ------
        InputError
            If `rows` are neither.
        """
        chosen = np.asarray(rows) if len(rows) else np.zeros(0, np.int64)
        if chosen.dtype == bool and chosen.shape == (len(self),):
            chosen = np.flatnonzero(chosen)
        if chosen.ndim != 1 or chosen.dtype.kind not in "iu":
            raise InputError(f"rows must be numbers of rows, or {len(self)} bools, one a row")
        columns: dict[str, Any] = {name: getattr(self, name)[chosen] for name in _COLUMNS}
        for name in ("status", "messages"):
            columns[name] = [getattr(self, name)[row] for row in chosen]
        tokens = None if self.tokens is None else self.tokens.take(chosen)
        reference = None if self.reference is None else self.reference[chosen]
        return replace(self, **columns, tokens=tokens, reference=reference)

    @staticmethod
    def join(tables: list[ScoreTable]) -> ScoreTable:
        """Consecutive tables of one signature as one."""
        columns: dict[str, Any] = {}
        for name in _COLUMNS if tables[0].reference is None else (*_COLUMNS, "reference"):
            columns[name] = np.concatenate([getattr(table, name) for table in tables])
        for name in ("status", "messages"):
            columns[name] = [item for table in tables for item in getattr(table, name)]
        tokens = [table.tokens for table in tables if table.tokens is not None]
        return replace(tables[0], **columns, tokens=TokenScores.join(tokens) if tokens else None)

    def without_non_finite(self) -> ScoreTable:
        """The table with status "non_finite_score", and no score, in rows whose score is infinite or no number."""
        rows = [row for row, state in enumerate(self.status) if state in SCORED and not np.isfinite(self.scores[row])]
        if not rows:
            return self
        columns = {name: getattr(self, name).copy() for name in _COLUMNS}
        status, messages = list(self.status), list(self.messages)
        for row in rows:
            status[row], messages[row] = NON_FINITE_SCORE, non_finite_message("score", self.scores[row])
        for column in columns.values():
            column[rows] = np.nan if column.dtype == np.float64 else 0
        tokens = self.tokens
        if tokens is not None:
            kept = np.ones(len(self), dtype=bool)
            kept[rows] = False
            own = tokens.take(np.flatnonzero(kept))
            tokens = replace(own, offsets=offsets_of(np.diff(tokens.offsets) * kept))
        return replace(self, **columns, status=status, messages=messages, tokens=tokens)

    def to_pandas(self) -> pandas.DataFrame:
        """A DataFrame with the columns score, stderr, tokens, status (needs pandas)."""
        import pandas

        columns = {"score": self.scores, "stderr": self.stderr, "tokens": self.num_tokens, "status": self.status}
        return pandas.DataFrame(columns)
