"""Samples follow the distribution that the exact likelihood states."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from diffscore_fast import ops
from diffscore_fast.bounds.orders import Generation
from diffscore_fast.bounds.sampling import sample_token_arrays
from diffscore_fast.bounds.states import Lattice, cut_blocks
from diffscore_fast.engine.plan import AttentionPattern, Sequences
from diffscore_fast.engine.runner import Runner
from diffscore_fast.errors import InputError
from tests.support.networks import BagOfTokens


def test_sample_token_inverts_the_cumulative_distribution():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(5, 4, generator=generator), torch.randn(9, 4, generator=generator)
    bias = torch.randn(9, generator=generator)
    logits = (hidden @ weight.T + bias).double()
    logits[:, 3] = -torch.inf
    edges = logits[:, :8].softmax(1).cumsum(1)
    for token in (0, 2, 4, 7):
        before = edges[:, token - 1] if token else torch.zeros(5, dtype=torch.float64)
        numbers = (before + edges[:, token]) / 2
        found = ops.sample_token(hidden, weight, bias, numbers, excluded_ids=(3,), vocab_size=8)
        assert found.tolist() == [token] * 5
    last = torch.full((5,), 1 - 2.0**-53, dtype=torch.float64)
    assert ops.sample_token(hidden, weight, bias, last, excluded_ids=(3,), vocab_size=8).max() < 8
    assert len(ops.sample_token(hidden[:0], weight, bias, last[:0])) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(soft_cap=0.0), "soft_cap must be above 0"),
        (dict(vocab_size=10), "vocab_size 10 is not in 1 .. 9"),
        (dict(excluded_ids=(-1,)), "must not be negative"),
        (dict(numbers=torch.zeros(4, dtype=torch.float64)), r"numbers must be \[5\]; got \[4\]"),
        (dict(numbers=torch.full((5,), 1.0, dtype=torch.float64)), "must lie in .* got 1.0"),
        (dict(numbers=torch.full((5,), float("nan"), dtype=torch.float64)), "must lie in .* got nan"),
    ],
)
def test_sample_token_refuses_what_it_cannot_draw_from(change, message):
    arguments = dict(
        hidden=torch.zeros(5, 4), weight=torch.zeros(9, 4), bias=None, numbers=torch.zeros(5, dtype=torch.float64)
    )
    with pytest.raises(ValueError, match=message):
        ops.sample_token(**{**arguments, **change})


@pytest.mark.parametrize("logit_shift", [0, 1])
def test_frequencies_of_samples_match_exact_likelihoods(logit_shift):
    """Texts of three tokens over a tiny vocabulary, in blocks of two: a chi-square test over all of them."""
    backbone = BagOfTokens(restart_positions=False, vocab_size=5, logit_shift=logit_shift)
    runner = Runner(backbone)
    samples = sample_token_arrays(runner, 2, count=6000, tokens=3, seed=1)
    every = np.stack(np.meshgrid(*[np.arange(5)] * 3, indexing="ij"), -1).reshape(-1, 3).astype(np.int32)
    sequences = Sequences.build([np.zeros(0, np.int32)], np.zeros(125, np.int64), list(every))
    blocks = cut_blocks(sequences.target_lengths, 2, True)
    log_p = runner.evaluate(Lattice(blocks, Generation()), sequences, AttentionPattern("block", 2))
    expected = np.exp(np.bincount(blocks.sequence, weights=log_p)) * 6000
    assert expected.sum() == pytest.approx(6000, rel=1e-4)
    counts = np.bincount(samples @ [25, 5, 1], minlength=125)
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    chi_square = ((observed - wanted) ** 2 / wanted).sum()
    assert chi_square < common.sum() + 4 * np.sqrt(2 * common.sum())


def test_samples_do_not_depend_on_how_many_are_drawn():
    runner = Runner(BagOfTokens(restart_positions=False), token_budget=8)
    few, many = (sample_token_arrays(runner, 4, count=count, tokens=6, seed=3) for count in (2, 5))
    assert (few == many[:2]).all()
    assert (few != sample_token_arrays(runner, 4, count=2, tokens=6, seed=4)).any()


def test_impossible_sizes_are_refused():
    runner = Runner(BagOfTokens(restart_positions=False))
    for count, tokens in ((0, 4), (1, 0), (1, 64)):
        with pytest.raises(InputError, match="at least one text of 1 to 63 tokens"):
            sample_token_arrays(runner, 4, count=count, tokens=tokens)
