"""Bounds on a log-likelihood from draws of log p(x | z): lower, upper, and the comparators of the TUBE paper.

All from log p(x | z_k), [blocks, draws], in the log domain; log psi is the surrogate's log-probability.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from scipy.special import logsumexp

from diffscore_fast import ops


@dataclass(frozen=True)
class Estimate:
    """An estimate per block and its standard error, float64 [B] each."""

    value: np.ndarray
    stderr: np.ndarray


def log_mean_exp(log_p: np.ndarray) -> Estimate:
    """ELBO_K = log (1/K sum_k p(x | z_k)), a lower bound in expectation; standard error by the delta method.

    se = sd(p) / (mean(p) sqrt(K)). Without a standard error, NaN: one draw, or all -inf.
    """
    found = ops.log_mean_exp(*_segments(log_p))
    return Estimate(found.log_mean.numpy(), found.standard_error.numpy())


def pair_means(log_p: np.ndarray) -> np.ndarray:
    """log of the mean of draws 2i and 2i + 1, [B, N / 2]: what is independent where orders come in antithetic pairs."""
    return np.logaddexp(log_p[:, ::2], log_p[:, 1::2]) - np.log(2.0)


def tangent_upper(log_p: np.ndarray, log_psi: np.ndarray, psi_draws: np.ndarray | None = None) -> Estimate:
    """TUBE = log psi + p_hat / psi - 1 with psi independent of p_hat: above log p(x) in expectation, for any K >= 1.

    Parameters
    ----------
    log_p : float64 [B, K]
        The draws of p_hat.
    log_psi : float64 [B]
        Surrogate.
    psi_draws : float64 [B, M], optional
        The draws that psi is the mean of; their part of the standard error is added. A single one shows no spread:
        the error is then that given psi, and so is the bound, which holds for every psi.

    Returns
    -------
    Estimate
        +inf where psi is 0, since no tangent exists there.
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
    """Every fold's mean against the mean of the others, averaged: unbiased above as well, with less gap and variance.

    U = 1/F sum_f [log psi_f + p_f / psi_f - 1],  p_f the mean of fold f, psi_f the mean of the draws outside it.
    Standard error by linearisation: with g_k = dU / dp_k, se^2 = N / (N - 1) sum_k g_k^2 (p_k - mean p)^2.

    Parameters
    ----------
    log_p : float64 [B, N]
        Draws, fold by fold; folds are independent.
    folds : int
        F >= 2, a divisor of N.

    Returns
    -------
    Estimate
        +inf where some psi_f is 0, since no tangent exists there.
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


def cubo(log_p: np.ndarray, beta: float = 2.0) -> np.ndarray:
    """CUBO_beta = (1/beta) log mean_k p_k^beta (Dieng et al., 2017). Biased: the log stands outside the sample mean,
    so that a finite sample can fall below log p(x)."""
    return (logsumexp(beta * log_p, axis=1) - np.log(log_p.shape[1])) / beta


def tvo_upper(log_p: np.ndarray, partition: np.ndarray) -> np.ndarray:
    """Right Riemann sum of the thermodynamic integral (Masrani et al., 2019); biased in finite samples.

    log p(x) = int_0^1 E_{pi_beta}[log p(x | z)] dbeta, the integrand increasing in beta; E_{pi_beta} is
    self-normalised, with the weights p_k^beta / sum p^beta. `partition`: increasing points in (0, 1], the last one 1.
    """
    edges = np.concatenate([[0.0], partition])
    total = np.zeros(len(log_p))
    for low, high in zip(edges[:-1], edges[1:], strict=True):
        weights = np.exp(high * log_p - logsumexp(high * log_p, axis=1, keepdims=True))
        total += (high - low) * (weights * np.where(weights > 0, log_p, 0.0)).sum(axis=1)
    return total


def is_vg_b(log_p: np.ndarray) -> np.ndarray:
    """IS-VG-B: mean log p_k + log mean_{j != k} (p_j / p_k) (after Struski et al., arXiv 2206.09453). Biased.

    Their bound on the variational gap is log E X - E log X <= log E[Y / X] for independent copies X, Y; the estimator
    takes all ordered pairs of draws, and the log stands outside their mean. The TUBE paper prints no formula for its
    IS-VG-B column: this is a reading of the source. With one draw there is no pair: NaN.
    """
    draws = log_p.shape[1]
    if draws < 2:
        return np.full(len(log_p), np.nan)
    # Sum over all pairs of p_j / p_k less the K pairs of a draw with itself, each 1.
    every = logsumexp(log_p, axis=1) + logsumexp(-log_p, axis=1)
    return log_p.mean(axis=1) + every + np.log1p(-draws * np.exp(-every)) - np.log(draws * (draws - 1))


def effective_sample_size(log_p: np.ndarray) -> np.ndarray:
    """(sum p)^2 / sum p^2, float64 [B]: how many draws carry the mean; 1 means that one holds all the weight."""
    return np.exp(2 * logsumexp(log_p, axis=1) - logsumexp(2 * log_p, axis=1))


def _segments(log_p: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws [B, K] as flat values and segment offsets."""
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
    """Standard error of sum_k slopes_k values_k for independent values of one distribution.

    NaN for a single one, and where one is infinite.
    """
    draws = values.shape[1]
    if draws < 2:
        return np.full(len(values), np.nan)
    with np.errstate(invalid="ignore"):
        centred = values - values.mean(axis=1, keepdims=True)
        return np.sqrt(draws / (draws - 1) * ((slopes * centred) ** 2).sum(axis=1))
