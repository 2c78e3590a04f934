from __future__ import annotations

from itertools import combinations
from math import comb

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from diffscore_fast.training.evaluation import measure
from diffscore_fast.training.examples import Example
from diffscore_fast.training.objective import (
    Losses,
    lay_out,
    mask_blocks,
    mask_by_ratio,
    masked_losses,
    sample_rows,
    stratified_ratios,
)
from diffscore_fast.training.patterns import pack_layouts


@given(count=st.integers(1, 40), seed=st.integers(0, 1000))
def test_one_ratio_lies_in_each_stratum(count, seed):
    ratios = stratified_ratios(count, np.random.default_rng(seed))
    assert sorted((ratios * count).astype(int)) == list(range(count))


@given(length=st.integers(1, 60), ratio=st.floats(0, 1), seed=st.integers(0, 1000))
def test_something_is_always_masked(length, ratio, seed):
    assert mask_by_ratio(length, ratio, np.random.default_rng(seed)).any()


@given(length=st.integers(1, 60), block_size=st.sampled_from([1, 4, 8, 16]), seed=st.integers(0, 1000))
def test_every_block_with_tokens_has_a_masked_one(length, block_size, seed):
    masked = mask_blocks(length, block_size, np.random.default_rng(seed))
    blocks = (np.arange(length) + 1) // block_size
    assert set(blocks[masked]) == set(blocks)


def test_masks_of_a_block_are_uniform_in_count_and_then_in_place():
    rng = np.random.default_rng(0)
    draws = np.array([mask_blocks(7, 4, rng) for _ in range(6000)])
    first, second = draws[:, :3], draws[:, 3:]  # the start token takes a place of the first block
    assert chisquare(np.bincount(first.sum(axis=1), minlength=4)[1:]).pvalue > 1e-3
    assert chisquare(np.bincount(second.sum(axis=1), minlength=5)[1:]).pvalue > 1e-3
    pairs = second[second.sum(axis=1) == 2]
    assert chisquare(np.bincount(pairs @ [1, 2, 4, 8])[[3, 5, 6, 9, 10, 12]]).pvalue > 1e-3


def test_row_sample_keeps_every_sequence_and_is_spread_evenly(network):
    rng = np.random.default_rng(0)
    examples = [Example("run", "full", 0, np.zeros(0, int), rng.integers(5, 64, length)) for length in (1, 40, 3, 60)]
    pack = pack_layouts([lay_out(item, np.ones((1, len(item.window)), bool), network.spec) for item in examples])
    hits = np.zeros(len(pack.targets))
    for _ in range(2000):
        chosen = sample_rows(pack, 30, rng)
        assert (np.diff(chosen) > 0).all()
        assert set(pack.sequence[chosen].tolist()) == {0, 1, 2, 3}
        hits[chosen] += 1
    for sequence in range(4):
        of_sequence = hits[pack.sequence.numpy() == sequence]
        assert chisquare(of_sequence).pvalue > 1e-3 or (of_sequence == 2000).all()


def test_loss_is_a_mean_over_sequences_of_means_over_tokens():
    losses = Losses(torch.tensor([1.0, 2.0, 6.0, 5.0]), torch.tensor([0, 0, 0, 1]), 2)
    assert losses.per_sequence().tolist() == [3.0, 5.0]


@pytest.mark.parametrize("block_size", [1, 4])
def test_weighted_block_losses_average_to_the_any_order_bound(network, block_size):
    """The expectation over masks, enumerated, equals the mean over orders of minus the log-probability chain.

    -ELBO of a block is the sum over states S of P(an order visits S) * mean over the next token j of -log p(x_j | x_S);
    each S of size s is visited with probability 1 / C(n, s), and each next token has probability 1 / (n - s).
    """
    window = np.array([7, 50, 21, 9, 33])
    blocks = (np.arange(5) + 1) // block_size

    def losses(masked: np.ndarray) -> dict[int, float]:
        example = Example("run", "block", block_size, window[:0], window)
        with torch.no_grad():
            values = masked_losses(network, pack_layouts([lay_out(example, masked[None], network.spec)])).tokens
        return dict(zip(np.flatnonzero(masked), values.tolist(), strict=True))

    bound = expected = 0.0
    for block in np.unique(blocks):
        places = np.flatnonzero(blocks == block)
        n = len(places)
        for count in range(1, n + 1):
            for hidden in combinations(places, count):
                masked = np.isin(np.arange(5), hidden)
                of_state = losses(masked)
                bound += sum(of_state.values()) / count / comb(n, count)
                example = Example("run", "block", block_size, window[:0], window)
                (_, measured) = measure("", network, [example], [masked])
                expected += measured.sums[0] / n / comb(n, count)
    assert expected == pytest.approx(bound, rel=1e-5)
