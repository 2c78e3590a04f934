"""masked_logprob on a GPU against float64: plain calls, every option, statistics, gradients, and large indices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from diffscore_fast import ops
from tests.support.gpu import DEVICE, DTYPES, SIZES, budget_of, integers, largest, needs_gpu, normal

pytestmark = needs_gpu
OPTIONS = ("bias, rows", "excluded ids, padding", "scale, soft-cap", "int8 weight")


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def problem(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states [N, D], weight [V, D], bias [V] and targets [N] for the tests of options."""
    rows, width, size = SIZES.options
    weight = (normal(size, width) / width**0.5).to(dtype)
    return normal(rows, width, dtype=dtype), weight, normal(size, dtype=dtype), integers(size - 20, rows)


@pytest.mark.parametrize("shape", SIZES.logprob, ids=str)
def test_plain_calls_match_float64_and_rows_do_not_depend_on_the_batch(shape, dtype):
    rows, width, size = shape
    hidden, weight = normal(rows, width, dtype=dtype), (normal(size, width) / width**0.5).to(dtype)
    targets, some = integers(size, rows), min(64, rows)
    logits = hidden[:some].double() @ weight.double().T
    exact = logits.log_softmax(1).gather(1, targets[:some, None]).squeeze(1)
    reference, got = (
        ops.masked_logprob(hidden, weight, None, targets, implementation=name) for name in ("reference", "triton")
    )
    assert largest(got[:some] - exact) <= budget_of(largest(reference[:some] - exact), dtype, width)
    alone = ops.masked_logprob(hidden[:1], weight, None, targets[:1], implementation="triton")
    assert torch.equal(got[:1], alone)


@pytest.mark.parametrize("name", OPTIONS)
def test_options_match_float64(name, dtype):
    rows, width, size = SIZES.options
    hidden, weight, bias, targets = problem(dtype)
    stored = torch.randint(-127, 128, (size, width), device=DEVICE, dtype=torch.int8)
    cases: dict[str, tuple[Tensor, Tensor | None, dict[str, Any]]] = {
        "bias, rows": (weight, bias, {"rows": integers(rows, rows)}),
        "excluded ids, padding": (weight, None, {"excluded_ids": (3, 4, size - 30), "vocab_size": size - 10}),
        "scale, soft-cap": (weight, bias, {"logit_scale": 0.5, "soft_cap": 30.0}),
        "int8 weight": (stored, None, {"weight_scale": normal(size).abs() / 127 / width**0.5}),
    }
    assert tuple(cases) == OPTIONS
    matrix, shift, options = cases[name]
    reference, got = (
        ops.masked_logprob(hidden, matrix, shift, targets, implementation=which, **options)
        for which in ("reference", "triton")
    )
    wide = {key: item.double() if key == "weight_scale" else item for key, item in options.items()}
    exact = ops.masked_logprob(
        hidden.double(),
        matrix if "weight_scale" in wide else matrix.double(),
        None if shift is None else shift.double(),
        targets,
        implementation="reference",
        **wide,
    )
    finite = exact.isfinite()
    assert torch.equal(got.isfinite(), finite)
    assert largest((got - exact)[finite]) <= budget_of(largest((reference - exact)[finite]), dtype, width)


def test_statistics_match_float64(dtype):
    hidden, weight, _, targets = problem(dtype)
    exact = ops.masked_logprob_statistics(hidden.double(), weight.double(), None, targets, implementation="reference")
    reference, got = (
        ops.masked_logprob_statistics(hidden, weight, None, targets, implementation=name)
        for name in ("reference", "triton")
    )
    for name in ("log_prob", "log_sum_exp", "entropy"):
        errors = [largest(getattr(item, name) - getattr(exact, name)) for item in (reference, got)]
        budget = budget_of(errors[0], dtype, weight.shape[1]) * (10 if name == "entropy" else 1)  # a sum of p z
        assert errors[1] <= budget, name
    # Neighbours in rank may change places where their logits differ by less than rounding.
    assert largest((got.rank - exact.rank).double()) <= 2


def test_gradients_match_float64(dtype):
    hidden, weight, bias, targets = problem(dtype)
    found: dict[str, list[Tensor]] = {}
    for name in ("exact", "reference", "triton"):
        inputs = [
            item.detach().to(torch.float64 if name == "exact" else item.dtype).requires_grad_()
            for item in (hidden, weight, bias)
        ]
        which = "reference" if name == "exact" else name
        value = ops.masked_logprob(*inputs, targets, soft_cap=30.0, implementation=which).mean()
        found[name] = list(torch.autograd.grad(value, inputs))
    unit = torch.finfo(dtype).eps
    for exact, reference, got in zip(found["exact"], found["reference"], found["triton"], strict=True):
        reference_error, error = (largest(item - exact) / largest(exact) for item in (reference, got))
        assert error <= 2 * reference_error + 2 * unit


@pytest.mark.skipif(SIZES.beyond_int32 is None, reason="the interpreter would take hours")
def test_more_logits_than_an_int32_counts():
    """The gradient writes all of them where memory allows it."""
    assert SIZES.beyond_int32 is not None
    rows, width, size = SIZES.beyond_int32
    hidden = normal(rows, width, dtype=torch.bfloat16).requires_grad_()
    weight = normal(size, width, dtype=torch.bfloat16) / 8
    targets = integers(size, rows)
    value = ops.masked_logprob(hidden, weight, None, targets, implementation="triton").sum()
    (gradient,) = torch.autograd.grad(value, [hidden])
    last = hidden.detach()[-4:].double()
    softmax = (last @ weight.double().T).softmax(1)
    exact = weight.double()[targets[-4:]] - softmax @ weight.double()
    assert largest(gradient[-4:] - exact) / largest(exact) <= 0.02
