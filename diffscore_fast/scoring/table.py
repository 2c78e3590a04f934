"""The result of `DiffScorer`: scores of rows as arrays, one status per row, and scores of tokens on request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from diffscore_fast.engine.ragged import offsets_of, take_segments
from diffscore_fast.errors import InputError
from diffscore_fast.signature import Signature
from diffscore_fast.status import NON_FINITE_SCORE, SCORED, non_finite_message

if TYPE_CHECKING:
    import pandas

# Columns of a `ScoreTable` that are arrays with one entry per row.
_ROW_ARRAYS = ("scores", "stderr", "num_tokens", "num_draws", "full_draws", "truncated_tokens", "profile")


@dataclass(frozen=True)
class TokenScores:
    """Scores of the tokens of all rows, laid end to end; row i has tokens offsets[i] .. offsets[i + 1].

    The score of a token is its mean log-prob over the draws that masked it. The mean of these is not the row's score,
    which weights draws, not tokens.

    Parameters
    ----------
    offsets : int64 [n + 1]
    spans : int32 [tokens, 2]
        Half-open range of characters in the scored text (the source for `reverse`, else the candidate).
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
        """The scores of rows without tokens."""
        nothing = np.zeros(0, np.int64)
        return TokenScores(np.zeros(rows + 1, np.int64), np.zeros((0, 2), np.int32), np.zeros(0), nothing)

    def take(self, rows: np.ndarray) -> TokenScores:
        """The token scores of these rows, in this order."""
        flat = take_segments(self.offsets, rows)
        offsets = offsets_of(np.diff(self.offsets)[rows])
        return TokenScores(offsets, self.spans[flat], self.log_probs[flat], self.counts[flat])

    @staticmethod
    def join(parts: list[TokenScores]) -> TokenScores:
        """The token scores of consecutive parts as one."""
        offsets = offsets_of(np.concatenate([np.diff(part.offsets) for part in parts]))
        columns = (np.concatenate([getattr(part, name) for part in parts]) for name in ("spans", "log_probs", "counts"))
        return TokenScores(offsets, *columns)


@dataclass(frozen=True)
class ScoreTable:
    """Scores of n rows, in input order.

    Parameters
    ----------
    scores : float64 [n]
        In nats per token (natural logarithm); NaN in rows without a score.
    stderr : float64 [n]
        Standard error over replicates. NaN in rows without a score, and if the design has one replicate; 0 if all masks
        were enumerated.
    num_tokens : int64 [n]
        Number of scored tokens; 0 in rows without a score. `bidirectional` counts the tokens of both texts, the mean
        over references those of all references, and a class of words only its own tokens.
    num_draws, full_draws : int64 [n]
        Draws of the score (or enumerated masks), without those of a pilot; and how many of them were read under `full`
        as well, by the corrected estimator. For `bidirectional`, the larger number of its two directions.
    status : list of str
        "ok", or another of the words in `diffscore_fast.status`.
    messages : list of str
        One sentence if the status is not "ok".
    truncated_tokens : int64 [n]
        Number of source tokens that were cut, by the over-length policy.
    profile : float64 [n, levels], profile_ratios : float64 [levels]
        Mean log-prob by mask ratio; NaN in rows without a score and in levels without a draw. For `bidirectional` and
        `pmi`, combined like the score.
    kind : str
        "mean log-prob"; "lower bound" (on the log-likelihood: of a class of words, that of its tokens given the
        others); "maximum of lower bounds" (over references); or "difference" (pmi).
    signature : Signature
    tokens : TokenScores or None
        On request.
    reference : int64 [n] or None
        For the maximum over references: the index of the chosen reference in its row, -1 in rows without a score.
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
        """Scores in nats per text, float64 [n]: score times number of tokens (for `elbo`, the bound on log p itself).

        NaN for a mean over references and for `bidirectional`, which do not score a single text.
        """
        if self.signature.aggregate == "mean" or self.signature.direction == "bidirectional":
            return np.full(len(self), np.nan)
        return np.where(self.num_tokens > 0, self.scores * self.num_tokens, np.nan)

    def take(self, rows: Sequence[int] | np.ndarray) -> ScoreTable:
        """These rows, in this order, chosen by row numbers or by one bool per row, as numpy selects.

        Raises
        ------
        InputError
            If `rows` is neither.
        """
        chosen = np.asarray(rows) if len(rows) else np.zeros(0, np.int64)
        if chosen.dtype == bool and chosen.shape == (len(self),):
            chosen = np.flatnonzero(chosen)
        if chosen.ndim != 1 or chosen.dtype.kind not in "iu":
            raise InputError(f"rows must be row numbers, or {len(self)} bools, one per row")
        columns: dict[str, Any] = {name: getattr(self, name)[chosen] for name in _ROW_ARRAYS}
        for name in ("status", "messages"):
            columns[name] = [getattr(self, name)[row] for row in chosen]
        tokens = None if self.tokens is None else self.tokens.take(chosen)
        reference = None if self.reference is None else self.reference[chosen]
        return replace(self, **columns, tokens=tokens, reference=reference)

    @staticmethod
    def join(tables: list[ScoreTable]) -> ScoreTable:
        """Consecutive tables of one signature as one."""
        columns: dict[str, Any] = {}
        for name in _ROW_ARRAYS if tables[0].reference is None else (*_ROW_ARRAYS, "reference"):
            columns[name] = np.concatenate([getattr(table, name) for table in tables])
        for name in ("status", "messages"):
            columns[name] = [item for table in tables for item in getattr(table, name)]
        tokens = [table.tokens for table in tables if table.tokens is not None]
        return replace(tables[0], **columns, tokens=TokenScores.join(tokens) if tokens else None)

    def without_non_finite(self) -> ScoreTable:
        """The table in which rows whose score is infinite or NaN have no score, and status "non_finite_score"."""
        rows = [row for row, state in enumerate(self.status) if state in SCORED and not np.isfinite(self.scores[row])]
        if not rows:
            return self
        columns = {name: getattr(self, name).copy() for name in _ROW_ARRAYS}
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
        """A DataFrame with the columns score, stderr, tokens and status. Needs pandas."""
        import pandas

        columns = {"score": self.scores, "stderr": self.stderr, "tokens": self.num_tokens, "status": self.status}
        return pandas.DataFrame(columns)
