"""The exact likelihood of a block, by dynamic programming over the lattice of its visible subsets.

A subset is a number whose bits are its tokens. log_p[b, S, j] = log p(x_j | x_S) of block b. The same table of 2^L - 1
states serves any-order generation and every number of parallel steps.
"""

from __future__ import annotations

import numpy as np
from scipy.special import gammaln

from diffscore_fast.bounds.orders import Generation


def exact_log_likelihood(log_p: np.ndarray, generation: Generation) -> np.ndarray:
    """log p(x) of each block.

    any-order:   F(empty) = 1,  F(S + j) += F(S) p(x_j | x_S) / (L - |S|)
    T steps:     H_0(empty) = 1,  H_m(U) = sum over proper subsets S of U of H_{m-1}(S) prod_{j in U - S} p(x_j | x_S),
                 p_T = T^-L sum_{m <= L} C(T, m) H_m(full)
    step probabilities q:
                 G_0(empty) = 1,  G_t(U) = sum over subsets S of U of G_{t-1}(S) prod_{j in U - S} q_t p(x_j | x_S)

    Parameters
    ----------
    log_p : float64 [B, 2^L, L]
        Entries with j in S are not read.
    generation : Generation

    Returns
    -------
    float64 [B]
    """
    if generation.steps is None:
        return _any_order(log_p)
    if generation.step_probabilities is None:
        return _parallel(log_p, generation.steps)
    return _scheduled(log_p, np.asarray(generation.step_probabilities))


def _any_order(log_p: np.ndarray) -> np.ndarray:
    blocks, states, length = log_p.shape
    table = np.full((states, blocks), -np.inf)
    table[0] = 0.0
    for subset in range(states - 1):
        left = [j for j in range(length) if not subset >> j & 1]
        for j in left:
            term = table[subset] + log_p[:, subset, j] - np.log(len(left))
            table[subset | 1 << j] = np.logaddexp(table[subset | 1 << j], term)
    return table[-1]


def _parallel(log_p: np.ndarray, steps: int) -> np.ndarray:
    blocks, states, length = log_p.shape
    # H[m, U]. The values of a subset are final when the loop reaches it: its own subsets are smaller numbers.
    table = np.full((length + 1, states, blocks), -np.inf)
    table[0, 0] = 0.0
    for subset in range(states - 1):
        supersets, products = _additions(log_p, subset)
        for_all = table[:-1, subset, None, :] + products[None, 1:, :]
        table[1:, supersets[1:]] = np.logaddexp(table[1:, supersets[1:]], for_all)
    order = np.arange(length + 1)
    # log C(T, m) - m log T = sum over i < m of log(1 - i / T) - log m!: no cancellation, however large T is.
    with np.errstate(divide="ignore"):
        falling = np.log(np.maximum(1.0 - np.arange(length) / steps, 0.0))
    choose = np.concatenate([[0.0], np.cumsum(falling)]) - gammaln(order + 1.0)
    powers = (order - length) * np.log(steps)
    return np.logaddexp.reduce(table[:, -1] + (choose + powers)[:, None], axis=0)


def _scheduled(log_p: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
    blocks, states, length = log_p.shape
    table = np.full((states, blocks), -np.inf)
    table[0] = 0.0
    for probability in probabilities:
        if probability == 0:
            continue
        following = np.full_like(table, -np.inf)
        for subset in range(states):
            supersets, products = _additions(log_p + np.log(probability), subset)
            following[supersets] = np.logaddexp(following[supersets], table[subset] + products)
        table = following
    return table[-1]


def _additions(log_p: np.ndarray, subset: int) -> tuple[np.ndarray, np.ndarray]:
    """All supersets U of a subset S (S itself first), and log prod_{j in U - S} p(x_j | x_S), [2^(L - |S|), B]."""
    supersets, products = np.array([subset]), np.zeros((1, log_p.shape[0]))
    for j in range(log_p.shape[2]):
        if not subset >> j & 1:
            supersets = np.concatenate([supersets, supersets | 1 << j])
            products = np.concatenate([products, products + log_p[:, subset, j]])
    return supersets, products
