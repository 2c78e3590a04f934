"""The comparison of two systems, against enumeration and closed forms."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from diffscore_fast.errors import InputError
from diffscore_fast.scoring.compare import compare
from diffscore_fast.scoring.table import ScoreTable


@pytest.fixture(scope="module")
def table(mini):
    """A table with these scores; NaN: a row without a score."""
    empty = mini.score([], [])

    def make(scores) -> ScoreTable:
        scores = np.asarray(scores, dtype=np.float64)
        status = ["too_long" if np.isnan(item) else "ok" for item in scores]
        return replace(empty, scores=scores, status=status, messages=[""] * len(scores))

    return make


def test_the_p_value_of_few_rows_is_exact(table):
    a, b = np.array([-1.0, -2.0, -1.5, -3.0, -2.5, -0.5]), np.array([-1.3, -1.9, -2.0, -3.4, -2.6, -1.5])
    differences = a - b
    flips = [np.dot(signs, differences) for signs in itertools.product([1, -1], repeat=6)]
    extreme = np.mean(np.abs(flips) >= abs(differences.sum()) - 1e-12)
    result = compare(table(a), table(b))
    assert result.p_value == pytest.approx(extreme)
    assert result.difference == pytest.approx(result.mean_a - result.mean_b) == pytest.approx(differences.mean())
    assert (result.wins_a, result.wins_b, result.ties) == (5, 1, 0)
    assert result.most_different(2).tolist() == [5, 2]


def test_the_interval_is_close_to_the_normal_one_for_many_rows_and_stable_over_seeds(table):
    rng = np.random.default_rng(0)
    shared = rng.normal(-5, 2, 400)  # rows differ much more than systems: unpaired, nothing would be seen
    a, b = table(shared + rng.normal(0.05, 0.2, 400)), table(shared + rng.normal(0, 0.2, 400))
    differences = a.scores - b.scores
    half = 1.96 * differences.std() / np.sqrt(400)
    edges, p_values = [], []
    for seed in range(8):
        result = compare(a, b, seed=seed)
        edges.append((result.low, result.high))
        p_values.append(result.p_value)
    np.testing.assert_allclose(edges, [[differences.mean() - half, differences.mean() + half]] * 8, atol=0.1 * half)
    assert np.ptp(edges, axis=0).max() < 0.1 * half and max(p_values) < 0.01
    wide = compare(a, b, confidence=0.99)
    assert wide.high - wide.low == pytest.approx(2 * 2.576 / 1.96 * half, rel=0.06)


def test_under_no_difference_the_p_value_is_uniform(table):
    rng = np.random.default_rng(1)
    p_values = [
        compare(table(rng.normal(size=12)), table(rng.normal(size=12)), resamples=200).p_value for _ in range(150)
    ]
    assert 0.01 <= np.mean(np.array(p_values) <= 0.1) <= 0.2  # 0.1 +- 4 standard errors


def test_equal_systems_have_difference_zero(table):
    scores = [-1.0, -2.0, -3.0]
    result = compare(table(scores), table(scores))
    assert (result.difference, result.low, result.high, result.p_value, result.ties) == (0, 0, 0, 1, 3)


def test_rows_that_fail_on_either_side_are_left_out_of_both(table):
    nan = np.nan
    result = compare(table([-1, nan, -2, nan, -4]), table([-2, -1, nan, nan, -8]))
    assert result.rows.tolist() == [0, 4] and result.differences.tolist() == [1, 4]
    assert result.excluded == {"A: too_long": 2, "B: too_long": 1}
    assert (result.mean_a, result.mean_b) == (-2.5, -5)
    single = compare(table([-1, nan]), table([-2, -1])).to_dict()
    assert single["rows"] == 1 and single["difference"] == 1 and single["low"] is single["p_value"] is None
    assert compare(table([nan]), table([-1])).to_dict()["difference"] is None


def test_tables_that_cannot_be_compared_are_refused(mini, table):
    with pytest.raises(InputError, match="2 rows against 1"):
        compare(table([-1, -2]), table([-1]))
    other = mini.score([], [], seed=1)
    with pytest.raises(InputError, match=r"not comparable: .*seed:0.* against .*seed:1"):
        compare(table([]), other)
    for options in ({"confidence": 1.0}, {"resamples": 0}, {"resamples": 1.5}):
        with pytest.raises(InputError):
            compare(table([-1]), table([-2]), **options)


def test_systems_share_masks_in_reverse(mini):
    """The differences vary less over mask seeds than with independent masks for each system."""
    source = "The cat sat on the mat while it rained all day in the garden."
    candidates = "A cat sat.", "It rained."
    scores = np.array(
        [
            mini.score([source] * 2, candidates, direction="reverse", draws=1, levels=3, seed=seed).scores
            for seed in range(25)
        ]
    )
    paired = (scores[:, 0] - scores[:, 1]).std()
    apart = np.sqrt(scores[:, 0].var() + scores[:, 1].var())
    assert paired < 0.5 * apart
