"""Intervals from few orders hold the exact value of random lattices, or are called unreliable."""

from __future__ import annotations

import pytest

from bench.few_orders import ORDERS, coverage


@pytest.mark.parametrize("design", ["independent", "antithetic"])
@pytest.mark.parametrize("orders", ORDERS)
def test_few_orders_have_an_honest_interval_or_are_unreliable(design, orders):
    found = coverage(4, orders, design, blocks=10, seeds=200)
    assert found.outside_student < 0.03 and found.worst_student < 0.07
    assert found.outside_reliable < 0.02
    assert (found.unreliable == 1.0) == (orders * (1 if design == "antithetic" else 2) < 8)
    assert found.outside_normal > found.outside_student
    if (design, orders) == ("antithetic", 4):  # what 3 standard errors made of it
        assert found.outside_normal > 0.05
