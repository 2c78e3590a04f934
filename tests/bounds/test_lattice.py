"""Exact likelihood against brute force over all orders and all assignments of steps."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from diffscore_fast.bounds.lattice import exact_log_likelihood
from diffscore_fast.bounds.orders import Generation, draw_steps, visible_before
from diffscore_fast.bounds.states import Lattice, SampledOrders, cut_blocks
from diffscore_fast.engine.plan import Observation
from diffscore_fast.errors import InputError


def table(length: int, blocks: int = 2) -> np.ndarray:
    """Random log p(x_j | x_S); entries that must not be read are NaN."""
    values = -np.random.default_rng(length).gamma(2.0, 1.5, (blocks, 2**length, length))
    for subset in range(2**length):
        values[:, subset, [j for j in range(length) if subset >> j & 1]] = np.nan
    return values


def trajectory(values: np.ndarray, steps: list[int]) -> float:
    """log p(x | z) of one block, directly from the definition."""
    total = 0.0
    for j, step in enumerate(steps):
        visible = sum(1 << i for i, other in enumerate(steps) if other < step)
        total += values[visible, j]
    return total


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 6])
def test_any_order_equals_brute_force_over_all_orders(length):
    values = table(length)
    for block in range(2):
        terms = [trajectory(values[block], order) for order in itertools.permutations(range(length))]
        expected = np.logaddexp.reduce(terms) - math.log(math.factorial(length))
        assert exact_log_likelihood(values, Generation())[block] == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize(("length", "steps"), [(1, 3), (2, 1), (3, 2), (4, 4), (5, 3), (3, 7)])
def test_parallel_equals_brute_force_over_all_assignments(length, steps):
    values = table(length)
    for block in range(2):
        terms = [trajectory(values[block], z) for z in itertools.product(range(steps), repeat=length)]
        expected = np.logaddexp.reduce(terms) - length * math.log(steps)
        assert exact_log_likelihood(values, Generation(steps))[block] == pytest.approx(expected, abs=1e-10)


def test_step_probabilities_equal_brute_force_and_the_uniform_case():
    values, chances = table(4), (0.5, 0.0, 0.3, 0.2)
    terms = [
        trajectory(values[0], z) + sum(math.log(chances[step]) for step in z)
        for z in itertools.product((0, 2, 3), repeat=4)
    ]
    found = exact_log_likelihood(values, Generation(4, chances))[0]
    assert found == pytest.approx(np.logaddexp.reduce(terms), abs=1e-10)
    uniform = exact_log_likelihood(values, Generation(4, (0.25,) * 4))
    np.testing.assert_allclose(uniform, exact_log_likelihood(values, Generation(4)), atol=1e-10)


def test_many_steps_tend_to_any_order_and_one_step_is_independent_prediction():
    values = table(5)
    any_order = exact_log_likelihood(values, Generation())
    np.testing.assert_allclose(exact_log_likelihood(values, Generation(10**7)), any_order, atol=1e-4)
    np.testing.assert_allclose(exact_log_likelihood(values, Generation(1)), values[:, 0].sum(1), atol=1e-12)


def test_the_number_of_steps_may_be_huge():
    """By the limit: with T = 10^15 no two tokens share a step, to 14 digits."""
    log_p = np.log(np.random.default_rng(1).uniform(0.01, 1.0, size=(3, 16, 4)))
    limit = exact_log_likelihood(log_p, Generation())
    np.testing.assert_allclose(exact_log_likelihood(log_p, Generation(10**15)), limit, rtol=1e-12)
    np.testing.assert_allclose(exact_log_likelihood(log_p, Generation(10**6)), limit, rtol=1e-4)


def test_blocks_hold_the_start_token_and_keep_short_tails():
    blocks = cut_blocks(np.array([10, 1, 3]), 4, has_start=True)
    assert list(zip(blocks.sequence, blocks.start, blocks.stop, strict=True)) == [
        (0, 0, 3),
        (0, 3, 7),
        (0, 7, 10),
        (1, 0, 1),
        (2, 0, 3),
    ]
    blocks = cut_blocks(np.array([5]), 4, has_start=False)
    assert list(zip(blocks.start, blocks.stop, strict=True)) == [(0, 4), (4, 5)]
    blocks = cut_blocks(np.array([3]), 1, has_start=True)
    assert list(zip(blocks.start, blocks.stop, strict=True)) == [(0, 1), (1, 2), (2, 3)]


def observe(plan, values: np.ndarray, lengths: np.ndarray, block_of_start: dict) -> Observation:
    """Answer a plan from a table of log-probs per block."""
    out, at = [], 0
    for sequence, start, stop in zip(plan.sequence, plan.start, plan.stop, strict=True):
        size = stop - start
        masked, wanted = plan.masked[at : at + size], plan.wanted[at : at + size]
        bits = int((~masked) @ (1 << np.arange(size)))
        out += [values[block_of_start[int(sequence), int(start)]][bits, j] for j in np.flatnonzero(wanted)]
        at += size
    return Observation(plan, np.array(out, dtype=np.float32))


@pytest.mark.parametrize("design", ["independent", "antithetic"])
@pytest.mark.parametrize("generation", [Generation(), Generation(3), Generation(2, (0.7, 0.3))])
def test_sampled_orders_give_log_p_of_their_orders(generation, design):
    lengths = np.array([7, 2])
    blocks = cut_blocks(lengths, 4, has_start=True)  # 3, 4, 2
    values = [table(int(size), 1)[0] for size in blocks.lengths]
    index = {(int(s), int(a)): i for i, (s, a) in enumerate(zip(blocks.sequence, blocks.start, strict=True))}
    keys = np.array([3, 4], dtype=np.uint64)
    estimator = SampledOrders(blocks, keys, generation, 6, design)
    observed = [observe(estimator.plan([]), values, lengths, index)]
    result = estimator.reduce(observed)
    width = 4
    place = np.arange(width)
    valid = place < blocks.lengths[:, None]
    steps = draw_steps(keys[blocks.sequence], blocks.start[:, None] + place, valid, 6, design, generation)
    visited = np.zeros(3, int)
    for block, size in enumerate(blocks.lengths):
        states = set()
        for draw in range(6):
            z = steps[block, draw, :size].tolist()
            assert result.log_p[block, draw] == pytest.approx(trajectory(values[block], z), abs=1e-5)
            seen = {sum(1 << i for i, other in enumerate(z) if other < step) for step in z}
            states |= seen
            visited[block] += len(seen)
        assert result.distinct_states[block] == len(states)
    assert result.visited_states.tolist() == visited.tolist()


def test_lattice_plans_every_state_once_and_reduces_ragged_blocks():
    lengths = np.array([6])
    blocks = cut_blocks(lengths, 4, has_start=True)  # 3, 3
    values = [table(3, 1)[0], table(3, 2)[1]]
    lattice = Lattice(blocks, Generation())
    plan = lattice.plan([])
    assert len(plan.sequence) == 14 and (plan.wanted == plan.masked).all()
    found = lattice.reduce([observe(plan, values, lengths, {(0, 0): 0, (0, 3): 1})])
    expected = [exact_log_likelihood(item[None], Generation())[0] for item in values]
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("design", ["independent", "antithetic"])
def test_every_single_order_is_uniform_in_every_design(design):
    keys = np.random.default_rng(0).integers(0, 2**62, 12_000).astype(np.uint64)
    tokens, valid = np.tile(np.arange(3), (12_000, 1)), np.ones((12_000, 3), bool)
    steps = draw_steps(keys, tokens, valid, 4, design, Generation())
    for draw in range(4):
        counts = np.unique(steps[:, draw] @ [1, 3, 9], return_counts=True)[1]
        assert len(counts) == 6 and np.abs(counts / 12_000 - 1 / 6).max() < 0.015
    parallel = draw_steps(keys, tokens, valid, 4, design, Generation(2, (0.25, 0.75)))
    np.testing.assert_allclose(parallel.mean(axis=(0, 2)), 0.75, atol=0.01)
    if design == "antithetic":
        assert (steps[:, 0] == 2 - steps[:, 1]).all()


def test_pairs_are_independent_and_a_block_s_orders_do_not_depend_on_others():
    keys = np.random.default_rng(0).integers(0, 2**62, 20_000).astype(np.uint64)
    tokens, valid = np.tile(np.arange(2), (20_000, 1)), np.ones((20_000, 2), bool)
    steps = draw_steps(keys, tokens, valid, 4, "antithetic", Generation())[:, :, 0]
    assert abs(np.corrcoef(steps[:, 0], steps[:, 2])[0, 1]) < 0.03
    assert np.corrcoef(steps[:, 0], steps[:, 1])[0, 1] < -0.99
    alone = draw_steps(keys[5:6], tokens[5:6], valid[5:6], 4, "antithetic", Generation())
    assert (alone[0, :, 0] == steps[5]).all()


def test_blocks_too_long_for_state_numbers_are_refused():
    blocks = cut_blocks(np.array([70]), 64, has_start=True)
    with pytest.raises(InputError, match="sampled orders take at most 32"):
        SampledOrders(blocks, np.array([1], np.uint64), Generation(), 4, "independent")


def test_visible_sets_are_the_tokens_of_earlier_steps():
    assert visible_before(np.array([1, 0, 1, 2])).tolist() == [0b0010, 0, 0b0010, 0b0111]


@pytest.mark.parametrize(
    "options", [(0,), (2, (0.5,)), (2, (0.7, 0.7)), (2, (-0.5, 1.5)), (None, (1.0,)), (2, (np.nan, 1.0))]
)
def test_impossible_generations_are_refused(options):
    with pytest.raises(InputError):
        Generation(*options)
