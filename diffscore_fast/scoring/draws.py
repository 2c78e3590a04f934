"""The masks of a design's draws: which tokens each draw masks, and what it weighs in the score.

The random numbers depend on the target alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from diffscore_fast.engine.ragged import offsets_of, places_in, segment_ids, take_segments
from diffscore_fast.engine.random import uniforms
from diffscore_fast.scoring.mask_design import MaskDesign
from diffscore_fast.scoring.sizes import SizeTable, log_binomial, size_table

# Shares of balanced draws: stratum k of K is the part ((k - 1)/K)^p .. (k/K)^p of the distribution of mask sizes, from
# the smallest up. Measured by bench.designs: with equal shares, the few tokens of the smallest masks decide the
# variance.
STRATA_POWER = 1.5

# Streams of random numbers; each use has its own. `scoring.corrected` picks draws by the last one.
RATIO_STREAM, TOKEN_STREAM, FALLBACK_STREAM, PICK_STREAM = 0, 1, 2, 3


@dataclass(frozen=True)
class MaskDraws:
    """D draws; those of a target stand together. The score of a replicate is the sum of weight * mean log-prob.

    Parameters
    ----------
    target, replicate : int64 [D]
        Target of the draw, and which of the target's replicates it belongs to.
    number : int64 [D]
        Number of the draw in the target's random numbers.
    share : float64 [D]
        Part of the replicate that the draw represents; the shares of a replicate sum to 1.
    weight : float64 [D]
        Weight in the replicate's score of the mean log-prob of the masked tokens.
    level_weights : float64 [D, levels]
        Weight of that mean in each level of the profile, relative to the target's other draws.
    mean_ratio : float64 [D]
        For balanced draws, the expectation over the design of a replicate's sum of share * |M| / L; else NaN.
    level_mass, level_ratio : float64 [D, levels]
        For balanced draws, the expectation over the design of a replicate's sum of `level_weights`, and of its sum of
        level_weights * |M| / L; else NaN.
    lengths : int64 [D]
        Tokens of the target.
    masked : bool [sum(lengths)]
        Draw by draw, token by token.
    counts : int64 [D]
        |M|, the number of masked tokens.
    """

    target: np.ndarray
    replicate: np.ndarray
    number: np.ndarray
    share: np.ndarray
    weight: np.ndarray
    level_weights: np.ndarray
    mean_ratio: np.ndarray
    level_mass: np.ndarray
    level_ratio: np.ndarray
    lengths: np.ndarray
    masked: np.ndarray
    counts: np.ndarray

    def take(self, chosen: np.ndarray) -> MaskDraws:
        """The draws at these indices, in that order."""
        masked = self.masked[take_segments(offsets_of(self.lengths), chosen)]
        return MaskDraws(
            self.target[chosen],
            self.replicate[chosen],
            self.number[chosen],
            self.share[chosen],
            self.weight[chosen],
            self.level_weights[chosen],
            self.mean_ratio[chosen],
            self.level_mass[chosen],
            self.level_ratio[chosen],
            self.lengths[chosen],
            masked,
            self.counts[chosen],
        )

    @staticmethod
    def join(parts: list[MaskDraws]) -> MaskDraws:
        """All draws, ordered by target. No two parts may share a target."""
        names = MaskDraws.__dataclass_fields__
        joined = MaskDraws(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))
        return joined.take(np.argsort(joined.target, kind="stable"))


def draw_masks(
    design: MaskDesign,
    keys: np.ndarray,
    lengths: np.ndarray,
    replicates: np.ndarray,
    *,
    first: int = 0,
    elbo: bool = False,
    level_weights: tuple[float, ...] | None = None,
) -> MaskDraws:
    """Replicates of the design for each target; they depend on the target's key alone.

    Parameters
    ----------
    keys : uint64 [n]
        From `engine.random.target_key`.
    lengths : int64 [n]
        Tokens of each target, at least 1.
    replicates : int64 [n]
        How many to make for each target; may be 0.
    first : int
        Number of replicates that were made before; the new ones are independent of them.
    elbo : bool
        Weight draws by 1/t. Otherwise an empty draw masks one uniformly chosen token.
    level_weights : tuple of float, optional
        Weight of each level; equal if not given.
    """
    per = design.draws_per_replicate
    target, replicate = segment_ids(replicates), places_in(replicates)
    number = (first + replicate)[:, None] * per + np.arange(per)  # [U, per]
    if not design.balanced:
        target, replicate = np.repeat(target, per), np.repeat(replicate, per)
        return _independent(design, keys, lengths, target, replicate, number.ravel(), elbo, level_weights)
    tables = {
        int(size): size_table(design, int(size), elbo=elbo, level_weights=level_weights)
        for size in np.unique(lengths[target])
    }
    return _balanced(design, keys, lengths, target, replicate, number, tables)


def all_masks(
    design: MaskDesign,
    lengths: np.ndarray,
    targets: np.ndarray,
    *,
    elbo: bool = False,
    level_weights: tuple[float, ...] | None = None,
) -> MaskDraws:
    """Every mask that the design can draw, with its exact weight, as one replicate of each of these targets."""
    parts = [_nothing(design)]
    for length in np.unique(lengths[targets]):
        table = size_table(design, int(length), elbo=elbo, level_weights=level_weights)
        members = targets[lengths[targets] == length]
        masks = (np.arange(1, 1 << length)[:, None] >> np.arange(length)) & 1
        counts = masks.sum(axis=1)
        possible = table.levels.sum(axis=0)[counts - 1] > 0  # a grid of count masks leaves sizes out
        masks, counts = masks[possible], counts[possible]
        share = np.exp(-log_binomial(int(length))[counts])
        repeat = len(members)
        weight = np.tile(table.score[counts - 1] * share, repeat)
        zeros, unknown = np.zeros(len(weight), np.int64), np.full((len(weight), len(table.levels)), np.nan)
        parts.append(
            MaskDraws(
                np.repeat(members, len(counts)),
                zeros,
                zeros,
                weight,
                weight,
                np.tile(table.levels[:, counts - 1].T * share[:, None], (repeat, 1)),
                np.full(len(weight), np.nan),
                unknown,
                unknown,
                np.full(repeat * len(counts), length),
                np.tile(masks.astype(bool).ravel(), repeat),
                np.tile(counts, repeat),
            )
        )
    return MaskDraws.join(parts)


def mask_ratios(design: MaskDesign, keys: np.ndarray, draw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mask ratio in (0, 1] and level of independent draws, [D]. Draws are numbered through all replicates."""
    if design.ratios == "grid":
        level = draw % (design.levels - 1)
        return design.level_ratios[level], level
    ratio = 1.0 - uniforms(keys, draw, np.zeros_like(draw), RATIO_STREAM)  # (0, 1]
    if design.ratios == "stratified":
        strata = design.draws_per_replicate
        ratio = (draw % strata + ratio) / strata
    elif design.ratios != "uniform":
        raise NotImplementedError(f"mask_ratios draws no {design.ratios!r} mask ratios")
    return ratio, np.minimum((ratio * design.levels).astype(np.int64), design.levels - 1)


def _independent(
    design: MaskDesign,
    keys: np.ndarray,
    lengths: np.ndarray,
    target: np.ndarray,
    replicate: np.ndarray,
    draw: np.ndarray,
    elbo: bool,
    level_weights: tuple[float, ...] | None,
) -> MaskDraws:
    own_keys, own_lengths = keys[target], lengths[target]
    ratio, level = mask_ratios(design, own_keys, draw)
    segment, token = segment_ids(own_lengths), places_in(own_lengths)
    numbers = uniforms(own_keys[segment], draw[segment], token, TOKEN_STREAM)
    if design.masking == "count":
        order = np.lexsort((numbers, segment))
        masked = np.empty(len(numbers), dtype=bool)
        # `order` sorts within segments, so `token` is the rank.
        masked[order] = token < design.count_sizes(ratio, own_lengths)[segment]
    elif design.masking == "bernoulli":
        masked = numbers < ratio[segment]
    else:
        raise NotImplementedError(f"independent draws have no {design.masking!r} masking")
    counts = np.bincount(segment[masked], minlength=len(target))
    empty = np.flatnonzero(counts == 0)
    if not elbo and len(empty):
        choice = uniforms(own_keys[empty], draw[empty], np.zeros_like(empty), FALLBACK_STREAM)
        masked[offsets_of(own_lengths)[empty] + (choice * own_lengths[empty]).astype(np.int64)] = True
        counts[empty] = 1
    share = np.full(len(target), 1.0 / design.draws_per_replicate)
    weight = share.copy()
    if level_weights is not None:
        shares = np.asarray(level_weights, dtype=np.float64)
        weight *= (shares / shares.mean())[level]
    if elbo and design.masking == "bernoulli":  # (1/t) sum / L; with count masking (L/l) sum / L is the mean itself
        weight *= counts / (ratio * own_lengths)
    of_level = (level[:, None] == np.arange(len(design.level_ratios))) & (counts > 0)[:, None]
    unknown = np.full(of_level.shape, np.nan)
    return MaskDraws(
        target,
        replicate,
        draw,
        share,
        weight,
        of_level.astype(np.float64),
        np.full(len(target), np.nan),
        unknown,
        unknown,
        own_lengths,
        masked,
        counts,
    )


def _balanced(
    design: MaskDesign,
    keys: np.ndarray,
    lengths: np.ndarray,
    target: np.ndarray,
    replicate: np.ndarray,
    number: np.ndarray,
    tables: dict[int, SizeTable],
) -> MaskDraws:
    """Mask sizes from strata of their distribution, and masks that give all tokens nearly the same total weight.

    In a draw a masked token weighs (the stratum's share) / |M|. The draws choose in descending order of that weight,
    and each takes the tokens with the smallest total weight so far; ties are broken at random. All tokens are treated
    alike, so a mask of a given size is a uniform choice of tokens, and the score keeps its expectation. The [U] units
    below are (target, replicate) pairs of `per` draws each.
    """
    per, units = design.draws_per_replicate, len(target)
    own_keys, own_lengths = keys[target], lengths[target]
    edges = (np.arange(per + 1) / per) ** STRATA_POWER
    sizes = _stratified_sizes(edges, own_keys, own_lengths, number, tables)  # [U, per]
    share = np.broadcast_to(np.diff(edges), (units, per))
    token_weight = share / sizes
    draw_lengths = np.repeat(own_lengths, per)
    starts = offsets_of(draw_lengths)[:-1].reshape(units, per)
    masked = np.zeros(int(draw_lengths.sum()), dtype=bool)
    unit, token = segment_ids(own_lengths), places_in(own_lengths)
    loads = np.zeros(len(unit))
    rows = np.arange(units)
    for draw in np.argsort(-token_weight, axis=1, kind="stable").T:
        numbers = uniforms(own_keys[unit], number[rows, draw][unit], token, TOKEN_STREAM)
        # Sorted within units, so `token` is the rank within the unit.
        chosen = np.lexsort((numbers, loads, unit))[token < sizes[rows, draw][unit]]
        masked[starts[rows, draw][unit[chosen]] + token[chosen]] = True
        loads[chosen] += token_weight[rows, draw][unit[chosen]]
    levels, mean_size = np.zeros((units, per, len(design.level_ratios))), np.zeros(units)
    mass, ratio = np.zeros((units, levels.shape[2])), np.zeros((units, levels.shape[2]))
    for length, table in tables.items():
        members = np.flatnonzero(own_lengths == length)
        mean_size[members] = table.mean_size
        drawn = np.where(table.score > 0, table.levels, 0.0)  # sizes that the design never draws have no weight
        mass[members] = drawn.sum(axis=1)
        ratio[members] = drawn @ np.arange(1, length + 1) / length
        index = sizes[members] - 1
        levels[members] = np.moveaxis(share[members] * table.levels[:, index] / table.score[index], 0, 2)
    return MaskDraws(
        np.repeat(target, per),
        np.repeat(replicate, per),
        number.ravel(),
        share.ravel(),
        share.ravel(),
        levels.reshape(units * per, levels.shape[2]),
        np.repeat(mean_size / own_lengths, per),
        np.repeat(mass, per, axis=0),
        np.repeat(ratio, per, axis=0),
        draw_lengths,
        masked,
        sizes.ravel(),
    )


def _stratified_sizes(
    edges: np.ndarray, keys: np.ndarray, lengths: np.ndarray, number: np.ndarray, tables: dict[int, SizeTable]
) -> np.ndarray:
    """Tokens to mask in each draw of each unit, [U, per]: a random quantile between two edges."""
    per, units = len(edges) - 1, len(keys)
    zeros = np.zeros(units * per, np.int64)
    place = uniforms(np.repeat(keys, per), number.ravel(), zeros, RATIO_STREAM).reshape(units, per)
    # Neighbouring strata take mirrored places. The score changes steadily with size, so their errors cancel in part.
    pairs = per // 2 * 2
    place[:, 1:pairs:2] = 1.0 - place[:, 0:pairs:2]
    quantile = np.minimum(edges[:-1] + place * np.diff(edges), np.nextafter(1.0, 0.0))
    sizes = np.empty((units, per), dtype=np.int64)
    for length, table in tables.items():
        members = np.flatnonzero(lengths == length)
        reached = np.cumsum(table.score)
        sizes[members] = np.searchsorted(reached / reached[-1], quantile[members], side="right") + 1
    return sizes


def _nothing(design: MaskDesign) -> MaskDraws:
    """No draws."""
    whole, real = np.zeros(0, np.int64), np.zeros(0)
    levels = np.zeros((0, len(design.level_ratios)))
    return MaskDraws(whole, whole, whole, real, real, levels, real, levels, levels, whole, np.zeros(0, bool), whole)
