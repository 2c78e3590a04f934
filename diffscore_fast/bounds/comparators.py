"""The comparators of the TUBE paper. In finite samples all are biased: they are estimates, not bounds.

All are computed from log p(x | z_k), [blocks, draws], in the log domain.
"""

from __future__ import annotations

import numpy as np
from scipy.special import logsumexp

TVO_PARTITION = (1 / 64, 1 / 16, 1 / 4, 1 / 2, 1.0)


def comparators(log_p: np.ndarray) -> dict[str, np.ndarray]:
    """All of them by name, float64 [B] each."""
    return {
        "cubo_2": cubo(log_p, 2.0),
        "tvo_upper": tvo_upper(log_p, np.array(TVO_PARTITION)),
        "is_vg_b": is_vg_b(log_p),
    }


def cubo(log_p: np.ndarray, beta: float = 2.0) -> np.ndarray:
    """CUBO_beta = (1/beta) log mean_k p_k^beta (Dieng et al., 2017).

    Biased: the log is taken of a sample mean, so that the value of a finite sample may lie below log p(x).
    """
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

    Their bound on the variational gap is log E X - E log X <= log E[Y / X] for independent copies X, Y. The estimator
    takes the log of the mean over all ordered pairs of draws. The TUBE paper gives no formula for its column IS-VG-B:
    this one follows the cited source. NaN for a single draw, which makes no pair.
    """
    draws = log_p.shape[1]
    if draws < 2:
        return np.full(len(log_p), np.nan)
    # Sum over all pairs of p_j / p_k less the K pairs of a draw with itself, each 1.
    every = logsumexp(log_p, axis=1) + logsumexp(-log_p, axis=1)
    return log_p.mean(axis=1) + every + np.log1p(-draws * np.exp(-every)) - np.log(draws * (draws - 1))
