"""Both bounds of blocks from their draws."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from diffscore_fast.bounds import evidence
from diffscore_fast.bounds.config import BoundsConfig

# An error from fewer independent draws (pairs, where orders are antithetic) is too uncertain to be trusted. Measured by
# bench.few_orders.
MIN_INDEPENDENT_DRAWS = 8


@dataclass(frozen=True)
class SampledBounds:
    """What the draws of B blocks give. See `BlockBounds` for the arrays."""

    lower: evidence.Estimate
    upper: evidence.Estimate
    effective_draws: np.ndarray
    degrees_of_freedom: np.ndarray
    few_draws: np.ndarray


def sampled_bounds(config: BoundsConfig, log_p: np.ndarray, lengths: np.ndarray, log_psi: np.ndarray) -> SampledBounds:
    """Both bounds from log p(x | z) of all draws [B, K + M], of blocks of these lengths [B].

    `log_psi` [B] is read where the surrogate is another model.
    """
    paired = config.design == "antithetic"
    log_p = evidence.pair_means(log_p) if paired else log_p
    split = config.num_surrogate // 2 if paired else config.num_surrogate
    independent = log_p.shape[1]  # draws, or pairs, that each error is made of; the fewer of its two parts
    if config.uses_folds:
        lower, upper = evidence.log_mean_exp(log_p), evidence.cross_fitted_upper(log_p, config.num_folds)
    elif split:
        lower = evidence.log_mean_exp(log_p[:, split:])
        psi = evidence.log_mean_exp(log_p[:, :split]).value
        upper = evidence.tangent_upper(log_p[:, split:], psi, log_p[:, :split])
        independent = min(independent - split, split if split > 1 else independent)
    else:
        lower, upper = evidence.log_mean_exp(log_p), evidence.tangent_upper(log_p, log_psi)
    # Draws that cannot differ have no error: one token, one step, a pair that holds both orders of two tokens.
    varied = lengths > (2 if paired and config.generation.steps is None else 1)
    if config.generation.num_possible_steps == 1:
        varied = np.zeros_like(varied)
    alike = (log_p == log_p[:, :1]).all(axis=1) & (independent < 2 * MIN_INDEPENDENT_DRAWS)
    few = varied & ((independent < MIN_INDEPENDENT_DRAWS) | alike)
    # Few draws that happen to be one and the same do not show an error of 0: they show none.
    lower, upper = (
        evidence.Estimate(item.value, np.where(varied & alike, np.nan, item.stderr)) for item in (lower, upper)
    )
    degrees = np.where(varied, independent - 1.0, np.inf)
    return SampledBounds(lower, upper, evidence.effective_sample_size(log_p), degrees, few)
