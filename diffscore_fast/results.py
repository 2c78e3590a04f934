"""What scoring returns: arrays, one status a row, and the signature that makes numbers comparable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.stats import norm as normal
from scipy.stats import t as student_t

from diffscore_fast.arguments import real_number
from diffscore_fast.engine.ragged import offsets_of, spread, take_segments
from diffscore_fast.errors import InputError

if TYPE_CHECKING:
    import pandas

OK = "ok"
TRUNCATED_SOURCE = "truncated_source"  # scored, the source cut as the policy says
SKIPPED_REFERENCE = "skipped_reference"  # scored against the row's other references
UNRELIABLE = "unreliable"  # bounded, by draws that are too few or too unequal for their own error
EMPTY_CANDIDATE = "empty_candidate"
EMPTY_SOURCE = "empty_source"
EMPTY_TEXT = "empty_text"
MISSING = "missing"
NO_ELIGIBLE_TOKENS = "no_eligible_tokens"
TOO_LONG = "too_long"
INVALID_TEXT = "invalid_text"
INVALID_RECORD = "invalid_record"
NON_FINITE_SCORE = "non_finite_score"  # the model gives a token probability 0, or no number

SCORED = frozenset({OK, TRUNCATED_SOURCE, SKIPPED_REFERENCE, UNRELIABLE})
# A block's estimate hangs on one draw when the effective sample size falls below this.
LEAST_EFFECTIVE_DRAWS = 2.0
MAX_Z = 30.0  # beyond, a tail of the normal distribution is hardly a number


@dataclass(frozen=True)
class InvalidRecord:
    """Stands in for the texts of a row that could not be read; the row gets status "invalid_record"."""

    message: str


class _Signature:
    """Everything a number depends on beside the row. Numbers are comparable when their signatures are equal."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)  # type: ignore[call-overload]

    def __str__(self) -> str:
        """One line, in the manner of sacrebleu: `name:value|name:value`; unset fields are left out."""
        parts = []
        for name, value in self.to_dict().items():
            if value is None or value is False:
                continue
            shown = ",".join(f"{item}" for item in value) if isinstance(value, tuple) else f"{value}"
            parts.append(f"{name}:{shown}")
        return "|".join(parts)


@dataclass(frozen=True)
class Signature(_Signature):
    """What a score depends on."""

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
    attention: str
    full_draws: int | str | None
    dtype: str
    implementation: str
    template: str
    aggregate: str | None
    overlength: str


@dataclass(frozen=True)
class BoundsSignature(_Signature):
    """What bounds depend on."""

    version: str
    model: str
    weights: str
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


@dataclass(frozen=True)
class BlockBounds:
    """Bounds of B blocks, in the order of the texts. Arrays [B]; log-likelihoods in nats a block.

    Parameters
    ----------
    start, num_tokens : int64
        First token of the block in its text, and how many it has.
    lower, upper, exact, stderr_lower, stderr_upper, autoregressive : float64
        NaN where not asked for.
    degrees_of_freedom : float64
        Of the standard errors: independent draws less 1; +inf where the draws cannot differ, or were not needed.
    few_draws : bool
        Too few independent draws, or draws all alike, for an error that could be trusted.
    effective_draws : float64
        Effective sample size of the draws.
    distinct_states, visited_states : int64
        (block, visible subset) states of the block, and evaluations that every step of every draw would take.
    comparators : dict of str to float64
        Biased estimates by name.
    """

    start: np.ndarray
    num_tokens: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    exact: np.ndarray
    stderr_lower: np.ndarray
    stderr_upper: np.ndarray
    degrees_of_freedom: np.ndarray
    few_draws: np.ndarray
    autoregressive: np.ndarray
    effective_draws: np.ndarray
    distinct_states: np.ndarray
    visited_states: np.ndarray
    comparators: dict[str, np.ndarray]

    def take(self, chosen: np.ndarray) -> BlockBounds:
        """The blocks at these indices, in that order."""
        columns = {item.name: getattr(self, item.name) for item in fields(BlockBounds)}
        comparators = {name: values[chosen] for name, values in columns.pop("comparators").items()}
        return BlockBounds(**{name: values[chosen] for name, values in columns.items()}, comparators=comparators)


@dataclass(frozen=True)
class BoundsTable:
    """Bounds on the log-likelihood of n texts, in input order. Arrays [n]; NaN in texts without bounds.

    Parameters
    ----------
    lower, upper : float64
        Nats a text. In expectation lower <= log p(x) <= upper; single estimates carry their noise. Equal to `exact`
        where that was computed.
    exact : float64
        log p(x), where computed.
    stderr_lower, stderr_upper : float64
        Standard errors; the two estimates share their noise.
    degrees_lower, degrees_upper : float64
        Degrees of freedom of the standard errors, from those of the blocks (Welch, Satterthwaite); +inf for no error.
    few_draws : bool
        Texts with a block of too few independent draws for an error of its own.
    autoregressive : float64
        log p(x) of the same network at block size 1, where asked for.
    num_tokens : int64
        Tokens of the text; every number divides by these, never by padding.
    effective_draws : float64
        Smallest effective sample size among the text's blocks.
    distinct_states, visited_states : int64
        States of its blocks (equal texts count each), and evaluations without sharing.
    keys : uint64
        Random key of the text's orders: texts of equal keys have equal estimates, and equal errors. 0 without bounds.
    comparators : dict of str to float64
        Biased estimates by name, nats a text.
    status, messages : list of str
    signature : BoundsSignature
    block_offsets : int64 [n + 1]
        Text i owns blocks block_offsets[i] .. block_offsets[i + 1] of `blocks`.
    blocks : BlockBounds
    """

    lower: np.ndarray
    upper: np.ndarray
    exact: np.ndarray
    stderr_lower: np.ndarray
    stderr_upper: np.ndarray
    degrees_lower: np.ndarray
    degrees_upper: np.ndarray
    few_draws: np.ndarray
    autoregressive: np.ndarray
    num_tokens: np.ndarray
    effective_draws: np.ndarray
    distinct_states: np.ndarray
    visited_states: np.ndarray
    keys: np.ndarray
    comparators: dict[str, np.ndarray]
    status: list[str]
    messages: list[str]
    signature: BoundsSignature
    block_offsets: np.ndarray
    blocks: BlockBounds

    def __len__(self) -> int:
        return len(self.status)

    @property
    def unreliable(self) -> np.ndarray:
        """Texts whose error and interval cannot be trusted: their status is "unreliable". bool [n]

        They have a block where one draw holds most of the weight, or one with fewer than 8 independent draws (pairs,
        where orders are antithetic), or with draws all alike that need not be so.
        """
        # False for NaN: no draws were weighed.
        return (self.effective_draws < LEAST_EFFECTIVE_DRAWS) | self.few_draws.astype(bool)

    def interval(self, z: float = 3.0) -> tuple[np.ndarray, np.ndarray]:
        """[lower - w se, upper + w se] per text, in nats.

        w is z where the error rests on many draws. Where it rests on few, it is the quantile of Student's t, at the
        error's degrees of freedom, that is exceeded as rarely as z by a normal number (`student_widths`).

        Raises
        ------
        InputError
            For z below 0, above 30, or not finite.
        """
        z = checked_z(z)
        low, high = student_widths(z, self.degrees_lower), student_widths(z, self.degrees_upper)
        return _widened(self.lower, self.stderr_lower, -low), _widened(self.upper, self.stderr_upper, high)

    def perplexity_interval(self, z: float = 3.0) -> tuple[float, float]:
        """Token-weighted perplexity of all texts with bounds: [exp(-(upper + w se) / n), exp(-(lower - w se) / n)].

        w as for `interval`.
        """
        z, kept = checked_z(z), ~np.isnan(self.lower)
        tokens = self.num_tokens[kept].sum()
        if tokens == 0:
            return np.nan, np.nan
        low, high = (
            widened_perplexity(value[kept], stderr[kept], degrees[kept], self.keys[kept], tokens, side)
            for value, stderr, degrees, side in (
                (self.upper, self.stderr_upper, self.degrees_upper, z),
                (self.lower, self.stderr_lower, self.degrees_lower, -z),
            )
        )
        return low, high

    @staticmethod
    def from_blocks(blocks: BlockBounds, text_of: np.ndarray, kept: list[int], status: list[str], messages: list[str],
                    lengths: np.ndarray, keys: np.ndarray, signature: BoundsSignature) -> BoundsTable:  # fmt: skip
        """Sum blocks to texts. `text_of` [B] indexes `kept`, the rows with bounds; `lengths` and `keys` are theirs."""
        count, rows = len(status), np.array(kept, dtype=np.int64)
        placed = partial(spread, rows=rows, count=count)

        def total(values: np.ndarray) -> np.ndarray:
            return np.bincount(text_of, weights=values, minlength=len(rows)).astype(np.float64)

        smallest = np.full(len(rows), np.nan)
        np.fmin.at(smallest, text_of, blocks.effective_draws)
        sums = {name: placed(total(getattr(blocks, name))) for name in ("lower", "upper", "exact", "autoregressive")}
        errors = {name: placed(np.sqrt(total(getattr(blocks, name) ** 2)))
                  for name in ("stderr_lower", "stderr_upper")}  # fmt: skip
        degrees = {
            f"degrees_{side}": placed(combined_degrees(getattr(blocks, f"stderr_{side}"), blocks.degrees_of_freedom,
                                                       text_of, len(rows)))
            for side in ("lower", "upper")
        }  # fmt: skip
        states = {name: placed(total(getattr(blocks, name)).astype(np.int64), fill=0)
                  for name in ("distinct_states", "visited_states")}  # fmt: skip
        few = placed(np.bincount(text_of, weights=blocks.few_draws, minlength=len(rows)) > 0, fill=0)
        table = BoundsTable(
            **sums, **errors, **degrees, **states, few_draws=few, num_tokens=placed(lengths, fill=0),
            keys=placed(keys, fill=0), effective_draws=placed(smallest),
            comparators={name: placed(total(values)) for name, values in blocks.comparators.items()},
            status=status, messages=messages, signature=signature, blocks=blocks,
            block_offsets=offsets_of(placed(np.bincount(text_of, minlength=len(rows)), fill=0)),
        )  # fmt: skip
        for row in np.flatnonzero(table.unreliable):
            status[row] = UNRELIABLE
            messages[row] = (
                "a block has too few independent draws for an error of its own" if few[row]
                else "one draw holds most of a block's weight"
            ) + "; more orders, or the exact likelihood, are needed"  # fmt: skip
        return table

    @staticmethod
    def join(tables: list[BoundsTable]) -> BoundsTable:
        """Consecutive tables of one signature as one."""
        columns: dict[str, Any] = {}
        for item in fields(BoundsTable):
            values = [getattr(table, item.name) for table in tables]
            if isinstance(values[0], np.ndarray):
                columns[item.name] = np.concatenate(values)
            elif isinstance(values[0], list):
                columns[item.name] = [entry for value in values for entry in value]
            elif isinstance(values[0], dict):
                columns[item.name] = {name: np.concatenate([value[name] for value in values]) for name in values[0]}
        columns["block_offsets"] = offsets_of(np.concatenate([np.diff(table.block_offsets) for table in tables]))
        parts = [table.blocks for table in tables]
        blocks = {
            item.name: np.concatenate([getattr(part, item.name) for part in parts])
            for item in fields(BlockBounds) if item.name != "comparators"
        }  # fmt: skip
        blocks["comparators"] = {  # type: ignore[assignment]
            name: np.concatenate([part.comparators[name] for part in parts]) for name in parts[0].comparators
        }
        return replace(tables[0], **columns, blocks=BlockBounds(**blocks))  # type: ignore[arg-type]


def non_finite_message(what: str, value: float) -> str:
    """Why a row has no number although it was evaluated."""
    if np.isnan(value):
        return f"the {what} is not a number: the model returned NaN, or infinities that cancel"
    return f"the {what} is {value}: the model gives a token of the text probability 0"


def checked_z(z: Any) -> float:
    """The number of standard errors by which an interval is widened."""
    value = real_number("z", z)
    if not 0 <= value < np.inf:
        raise InputError(f"z must be a finite number of at least 0, not {z}")
    if value > MAX_Z:
        raise InputError(f"z must be at most {MAX_Z:g}, not {z}")
    return value


def student_widths(z: float, degrees: np.ndarray) -> np.ndarray:
    """Standard errors to widen by: the quantile of Student's t that is exceeded as rarely as z by a normal number.

    z itself at infinitely many degrees of freedom. 4.5 for z = 3 and 7 degrees, 9.2 for 3, 235 for 1.
    """
    widths = student_t.isf(normal.sf(z), np.where(np.isfinite(degrees), degrees, 1.0))
    return np.where(np.isposinf(degrees), z, np.where(np.isnan(degrees), np.nan, widths))


def combined_degrees(stderr: np.ndarray, degrees: np.ndarray, group: np.ndarray, count: int) -> np.ndarray:
    """Degrees of freedom of each group's sum of independent errors (Welch and Satterthwaite), float64 [count].

    (sum se^2)^2 / sum(se^4 / degrees); +inf for no error, NaN for an unknown one.
    """
    total = np.bincount(group, weights=stderr**2, minlength=count)
    parts = np.bincount(
        group, weights=np.where(stderr == 0, 0.0, stderr**4 / np.maximum(degrees, 1e-9)), minlength=count
    )
    ratio = np.divide(total**2, parts, out=np.full(count, np.inf), where=parts != 0)
    return np.where(np.isnan(total), np.nan, ratio)


def widened_perplexity(values: np.ndarray, stderr: np.ndarray, degrees: np.ndarray, keys: np.ndarray, tokens: float,
                       z: float) -> float:  # fmt: skip
    """exp(-(sum of values + w se) / tokens), se that of the sum over texts, w as `student_widths` has it for z.

    A negative z widens downwards. Errors of texts with equal keys are one error several times; others are independent.
    """
    _, first, group = np.unique(keys, return_index=True, return_inverse=True)
    errors = np.bincount(group.ravel(), weights=stderr)
    freedom = combined_degrees(errors, degrees[first], np.zeros(len(errors), np.int64), 1)
    width = np.copysign(student_widths(abs(z), freedom)[0], z)
    return float(np.exp(-_widened(values.sum(), np.sqrt((errors**2).sum()), width) / tokens))


def _widened(value: Any, stderr: Any, widths: Any) -> Any:
    """value + widths stderr; an infinite value has no error to add."""
    return np.where(np.isinf(value), value, value + widths * stderr)
