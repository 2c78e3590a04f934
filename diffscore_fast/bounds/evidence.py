"""Lower and upper bound of blocks from sampled orders, and their standard errors.

Everything is computed from log p(x | z_k), [blocks, draws], in the log domain. log psi is the log-probability that the
surrogate gives a block. `sampled_bounds` chooses the estimators that a configuration asks for; the estimators follow.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from scipy.special import logsumexp

from diffscore_fast import ops
from diffscore_fast.bounds.config import BoundsConfig

# With fewer independent draws (pairs, where orders are antithetic) the standard error is too uncertain to be trusted.
# Measured by bench.few_orders.
MIN_INDEPENDENT_DRAWS = 8


@dataclass(frozen=True)
class Estimate:
    """An estimate per block and its standard error, float64 [B] each."""

    value: np.ndarray
    stderr: np.ndarray


@dataclass(frozen=True)
class SampledBounds:
    """Both bounds of B blocks, and how far their draws can be trusted. The arrays are described at `BlockBounds`."""

    lower: Estimate
    upper: Estimate
    effective_draws: np.ndarray
    degrees_of_freedom: np.ndarray
    few_draws: np.ndarray


def sampled_bounds(config: BoundsConfig, log_p: np.ndarray, lengths: np.ndarray, log_psi: np.ndarray) -> SampledBounds:
    """Both bounds of B blocks, by the estimators of the configuration.

    Parameters
    ----------
    config : BoundsConfig
    log_p : float64 [B, K + M]
        log p(x | z) of all draws; the first M make the surrogate, where it is made of draws.
    lengths : int64 [B]
        Tokens of each block.
    log_psi : float64 [B]
        Read only if the surrogate is another model.
    """
    paired = config.design == "antithetic"
    log_p = pair_means(log_p) if paired else log_p
    split = config.num_surrogate // 2 if paired else config.num_surrogate
    independent = log_p.shape[1]  # draws (or pairs) behind each standard error; of two parts, the smaller number
    if config.uses_folds:
        lower, upper = log_mean_exp(log_p), cross_fitted_upper(log_p, config.num_folds)
    elif split:
        lower = log_mean_exp(log_p[:, split:])
        psi = log_mean_exp(log_p[:, :split]).value
        upper = tangent_upper(log_p[:, split:], psi, log_p[:, :split])
        independent = min(independent - split, split if split > 1 else independent)
    else:
        lower, upper = log_mean_exp(log_p), tangent_upper(log_p, log_psi)
    # Draws that cannot differ have no error: of one token, of one step, or pairs that hold both orders of two tokens.
    varied = lengths > (2 if paired and config.generation.steps is None else 1)
    if config.generation.num_possible_steps == 1:
        varied = np.zeros_like(varied)
    alike = (log_p == log_p[:, :1]).all(axis=1) & (independent < 2 * MIN_INDEPENDENT_DRAWS)
    few = varied & ((independent < MIN_INDEPENDENT_DRAWS) | alike)
    # Few draws that happen to be equal do not show that the error is 0: it is unknown.
    lower, upper = (Estimate(item.value, np.where(varied & alike, np.nan, item.stderr)) for item in (lower, upper))
    degrees = np.where(varied, independent - 1.0, np.inf)
    return SampledBounds(lower, upper, effective_sample_size(log_p), degrees, few)


def log_mean_exp(log_p: np.ndarray) -> Estimate:
    """ELBO_K = log (1/K sum_k p(x | z_k)), a lower bound in expectation; standard error by the delta method.

    se = sd(p) / (mean(p) sqrt(K)); NaN for a single draw, and if all draws are -inf.
    """
    found = ops.log_mean_exp(*_segments(log_p))
    return Estimate(found.log_mean.numpy(), found.standard_error.numpy())


def pair_means(log_p: np.ndarray) -> np.ndarray:
    """log of the mean of draws 2i and 2i + 1, [B, N / 2]: the independent units of antithetic orders."""
    return np.logaddexp(log_p[:, ::2], log_p[:, 1::2]) - np.log(2.0)


def tangent_upper(log_p: np.ndarray, log_psi: np.ndarray, psi_draws: np.ndarray | None = None) -> Estimate:
    """TUBE = log psi + p_hat / psi - 1, with psi independent of p_hat. Above log p(x) in expectation for any K >= 1.

    Parameters
    ----------
    log_p : float64 [B, K]
        The draws whose mean is p_hat.
    log_psi : float64 [B]
        The surrogate's log-probability of each block.
    psi_draws : float64 [B, M], optional
        The draws whose mean is psi; their part of the standard error is added. A single draw shows no spread: the
        standard error is then that of the bound given psi, which is a bound for every psi.

    Returns
    -------
    Estimate
        +inf where psi is 0: there is no tangent there.
    """
    draws = log_p.shape[1]
    log_ratio = logsumexp(log_p, axis=1) - np.log(draws) - log_psi
    ratio = _exp(log_ratio)
    with np.errstate(invalid="ignore"):
        value = np.where(np.isneginf(log_psi), np.inf, log_psi + ratio - 1.0)
    weights = _relative(log_p, log_psi)  # p_k / psi: the value moves by 1 for each unit of their mean
    variance = _linear_error(weights, np.full(draws, 1 / draws)) ** 2
    if psi_draws is not None and psi_draws.shape[1] > 1:
        slope = np.abs(1.0 - ratio)[:, None] / psi_draws.shape[1]  # d value / d psi = (1 - p_hat / psi) / psi
        variance = variance + _linear_error(_relative(psi_draws, log_psi), slope) ** 2
    return Estimate(value, np.sqrt(variance))


def cross_fitted_upper(log_p: np.ndarray, folds: int) -> Estimate:
    """The mean over folds of TUBE, each fold with the mean of all other folds as its surrogate.

    Like `tangent_upper` it lies above log p(x) in expectation, with a smaller gap and a smaller variance.

    U = 1/F sum_f [log psi_f + p_f / psi_f - 1],  p_f the mean of fold f, psi_f the mean of the draws outside it.
    Standard error by linearisation: with g_k = dU / dp_k, se^2 = N / (N - 1) sum_k g_k^2 (p_k - mean p)^2.

    Parameters
    ----------
    log_p : float64 [B, N]
        Draws, fold by fold. Folds are independent of each other.
    folds : int
        F >= 2, a divisor of N.

    Returns
    -------
    Estimate
        +inf where some psi_f is 0: there is no tangent there.
    """
    blocks, draws = log_p.shape
    size = draws // folds
    values, segments = _segments(log_p)
    value = ops.evidence_bounds(values, folds, segments).upper.numpy()
    # Weights relative to the largest draw: probabilities themselves may be below the smallest float.
    top = log_p.max(axis=1, keepdims=True)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        weights = np.exp(log_p - top)
        fold_sums = weights.reshape(blocks, folds, size).sum(axis=2)
        psi = (fold_sums.sum(axis=1, keepdims=True) - fold_sums) / (draws - size)
        ratio = fold_sums / size / psi
        # Draw k of fold g moves p_g, and psi_f of every other fold.
        through_others = (1.0 - ratio) / psi / (draws - size)
        slope = (1.0 / psi / size + through_others.sum(axis=1, keepdims=True) - through_others) / folds
        stderr = _linear_error(weights, np.repeat(slope, size, axis=1))
    return Estimate(value, stderr)


def effective_sample_size(log_p: np.ndarray) -> np.ndarray:
    """(sum p)^2 / sum p^2, float64 [B]: how many draws carry the mean. 1: a single draw has all the weight."""
    return np.exp(2 * logsumexp(log_p, axis=1) - logsumexp(2 * log_p, axis=1))


def _segments(log_p: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws [B, K] as flat values [B K] and segment offsets [B + 1]."""
    blocks, draws = log_p.shape
    return torch.from_numpy(np.ascontiguousarray(log_p).ravel()), torch.arange(blocks + 1, device="cpu") * draws


def _relative(log_p: np.ndarray, log_scale: np.ndarray) -> np.ndarray:
    """p / scale [B, K]; 0 where both are 0."""
    with np.errstate(invalid="ignore"):
        return np.where(np.isneginf(log_p), 0.0, _exp(log_p - log_scale[:, None]))


def _exp(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.exp(values)


def _linear_error(values: np.ndarray, slopes: np.ndarray) -> np.ndarray:
    """Standard error [B] of sum_k slopes_k values_k, for independent values [B, K] of one distribution.

    NaN for K = 1, and if a value is infinite.
    """
    draws = values.shape[1]
    if draws < 2:
        return np.full(len(values), np.nan)
    with np.errstate(invalid="ignore"):
        centred = values - values.mean(axis=1, keepdims=True)
        return np.sqrt(draws / (draws - 1) * ((slopes * centred) ** 2).sum(axis=1))
