"""The result of `LikelihoodBounds`: bounds of texts, and of their blocks."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np

from diffscore_fast.bounds.intervals import checked_z, combined_degrees, student_widths, widened, widened_perplexity
from diffscore_fast.engine.ragged import offsets_of, spread
from diffscore_fast.options import DEFAULT_Z
from diffscore_fast.signature import BoundsSignature
from diffscore_fast.status import UNRELIABLE

# With an effective sample size below this, one draw decides the estimate of a block.
MIN_EFFECTIVE_DRAWS = 2.0


@dataclass(frozen=True)
class BlockBounds:
    """Bounds of B blocks, in the order of the texts. Arrays [B]; log-likelihoods in nats per block.

    Parameters
    ----------
    start, num_tokens : int64
        Index of the block's first token in its text, and number of its tokens.
    lower, upper, exact, stderr_lower, stderr_upper, autoregressive : float64
        NaN where not asked for, or unknown.
    degrees_of_freedom : float64
        Of the standard errors: number of independent draws - 1; +inf if the draws cannot differ, and for exact values.
    few_draws : bool
        The draws are too few, or all equal: their standard error cannot be trusted.
    effective_draws : float64
        Effective sample size of the draws.
    distinct_states, visited_states : int64
        Number of (block, visible subset) states that were evaluated, and of evaluations if no state were shared.
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
        In nats per text. In expectation lower <= log p(x) <= upper; a single estimate has the standard error given
        below. Equal to `exact` where that was computed.
    exact : float64
        log p(x), where computed.
    stderr_lower, stderr_upper : float64
        Standard errors. Both estimates use the same draws, so their errors are correlated.
    degrees_lower, degrees_upper : float64
        Degrees of freedom of the standard errors, from those of the blocks (Welch, Satterthwaite); +inf if they are 0.
    few_draws : bool
        Whether a block of the text has too few independent draws for a standard error.
    autoregressive : float64
        log p(x) of the same network at block size 1, where asked for.
    num_tokens : int64
        Tokens of the text; padding is never counted.
    effective_draws : float64
        Smallest effective sample size among the text's blocks.
    distinct_states, visited_states : int64
        Sums over its blocks. Equal texts count each.
    keys : uint64
        Random key of the text's orders; texts with equal keys have equal estimates and equal errors. 0 without bounds.
    comparators : dict of str to float64
        Biased estimates by name, in nats per text.
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
        """Texts with status "unreliable": their standard error and interval cannot be trusted. bool [n]

        In one of their blocks a single draw has most of the weight, there are fewer than 8 independent draws (pairs,
        where orders are antithetic), or all draws happen to be equal.
        """
        # False for NaN: there are no draws.
        return (self.effective_draws < MIN_EFFECTIVE_DRAWS) | self.few_draws.astype(bool)

    def interval(self, z: float = DEFAULT_Z) -> tuple[np.ndarray, np.ndarray]:
        """[lower - w se, upper + w se] of every text, in nats.

        w is close to z if the standard error rests on many draws. For few draws it is larger: the quantile of Student's
        t, at the error's degrees of freedom, with the tail probability of z (`student_widths`).

        Raises
        ------
        InputError
            For z below 0, above 30, or not finite.
        """
        z = checked_z(z)
        low, high = student_widths(z, self.degrees_lower), student_widths(z, self.degrees_upper)
        return widened(self.lower, self.stderr_lower, -low), widened(self.upper, self.stderr_upper, high)

    def perplexity_interval(self, z: float = DEFAULT_Z) -> tuple[float, float]:
        """Interval of the perplexity per token of all texts with bounds; w as for `interval`.

        [exp(-(upper + w se) / n), exp(-(lower - w se) / n)], of the sums over texts and their n tokens.
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
    def from_blocks(
        blocks: BlockBounds,
        text_of: np.ndarray,
        kept: list[int],
        status: list[str],
        messages: list[str],
        lengths: np.ndarray,
        keys: np.ndarray,
        signature: BoundsSignature,
    ) -> BoundsTable:
        """Sum blocks to texts. `text_of` [B] indexes `kept`, the rows with bounds; so do `lengths` and `keys`."""
        count, rows = len(status), np.array(kept, dtype=np.int64)
        placed = partial(spread, rows=rows, count=count)

        def total(values: np.ndarray) -> np.ndarray:
            return np.bincount(text_of, weights=values, minlength=len(rows)).astype(np.float64)

        smallest = np.full(len(rows), np.nan)
        np.fmin.at(smallest, text_of, blocks.effective_draws)
        sums = {name: placed(total(getattr(blocks, name))) for name in ("lower", "upper", "exact", "autoregressive")}
        errors = {name: placed(np.sqrt(total(getattr(blocks, name) ** 2))) for name in ("stderr_lower", "stderr_upper")}
        degrees = {
            f"degrees_{side}": placed(
                combined_degrees(getattr(blocks, f"stderr_{side}"), blocks.degrees_of_freedom, text_of, len(rows))
            )
            for side in ("lower", "upper")
        }
        states = {
            name: placed(total(getattr(blocks, name)).astype(np.int64), fill=0)
            for name in ("distinct_states", "visited_states")
        }
        few = placed(np.bincount(text_of, weights=blocks.few_draws, minlength=len(rows)) > 0, fill=0)
        table = BoundsTable(
            **sums,
            **errors,
            **degrees,
            **states,
            few_draws=few,
            num_tokens=placed(lengths, fill=0),
            keys=placed(keys, fill=0),
            effective_draws=placed(smallest),
            comparators={name: placed(total(values)) for name, values in blocks.comparators.items()},
            status=status,
            messages=messages,
            signature=signature,
            blocks=blocks,
            block_offsets=offsets_of(placed(np.bincount(text_of, minlength=len(rows)), fill=0)),
        )
        for row in np.flatnonzero(table.unreliable):
            status[row] = UNRELIABLE
            messages[row] = (
                "a block has too few independent draws for a standard error"
                if few[row]
                else "one draw has most of a block's weight"
            ) + "; use more orders, or the exact likelihood"
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
            for item in fields(BlockBounds)
            if item.name != "comparators"
        }
        blocks["comparators"] = {  # type: ignore[assignment]
            name: np.concatenate([part.comparators[name] for part in parts]) for name in parts[0].comparators
        }
        return replace(tables[0], **columns, blocks=BlockBounds(**blocks))  # type: ignore[arg-type]
