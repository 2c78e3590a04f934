"""The float64 reductions over draws on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from diffscore_fast import ops
from tests.support.gpu import DEVICE, SIZES, largest, needs_gpu

pytestmark = needs_gpu
DRAWS = 8


@pytest.fixture
def values() -> tuple[Tensor, Tensor]:
    """Log-probs float64 [S * DRAWS], those of the first segment all -inf, and the segments' offsets [S + 1]."""
    count = SIZES.segments
    log_p = torch.randn(count * DRAWS, dtype=torch.float64, device=DEVICE) * 3 - 100
    log_p[:DRAWS] = -torch.inf
    return log_p, torch.arange(count + 1, device=DEVICE) * DRAWS


def assert_equal_to_rounding(got: Tensor, exact: Tensor) -> None:
    """The reference computes in float64 as well: only the order of sums differs."""
    finite = exact.isfinite()
    assert torch.equal(exact[~finite].nan_to_num(7.0), got[~finite].nan_to_num(7.0))
    assert largest((got - exact)[finite] / exact[finite].abs().clamp(min=1.0)) <= 1e-10


def test_log_mean_exp(values):
    exact, got = (ops.log_mean_exp(*values, implementation=name) for name in ("reference", "triton"))
    assert_equal_to_rounding(got.log_mean, exact.log_mean)
    assert_equal_to_rounding(got.standard_error, exact.standard_error)


def test_evidence_bounds(values):
    log_p, segments = values
    exact, got = (ops.evidence_bounds(log_p, DRAWS, segments, implementation=name) for name in ("reference", "triton"))
    for name in ("lower", "upper_plain", "upper"):
        assert_equal_to_rounding(getattr(got, name), getattr(exact, name))
