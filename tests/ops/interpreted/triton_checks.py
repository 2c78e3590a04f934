"""Results of the Triton kernels in Triton's interpreter; `test_triton.py` starts this with TRITON_INTERPRET=1.

Shapes are small: the interpreter runs one program at a time. `bench.aot` compiles the kernels to machine code.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from triton import language as tl
from triton.runtime import interpreter

from diffscore_fast.errors import ImplementationError
from diffscore_fast.ops import (
    Projection,
    evidence_bounds,
    log_mean_exp,
    masked_logprob,
    masked_logprob_statistics,
    prefix_attention,
)
from diffscore_fast.ops.triton_kernels import kernels
from tests.ops.test_masked_logprob import (
    check_infinite_logits,
    check_nan_beside_infinity,
    check_scale_gradient,
    check_second_derivative,
    check_wide_soft_cap,
    exact,
    problem,
    spread_out,
)
from tests.ops.test_prefix_attention import dense, make_layout, tensors
from tests.ops.test_segments import check_nan_in_a_segment

OPTIONS = {"excluded_ids": (3, 2050), "vocab_size": 2100, "logit_scale": 0.5, "soft_cap": 4.0}
LOW_PRECISION = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def bfloat16_products(monkeypatch):
    """Triton 3.9's interpreter keeps bfloat16 as bit patterns, which its dot would multiply, and casts integers to such
    patterns by their value: both go through float32."""
    dot = interpreter.InterpreterBuilder.create_dot

    def numbers(item):
        if item.dtype.scalar != tl.bfloat16 or item.data.dtype != np.uint16:
            return item
        return interpreter.TensorHandle((item.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self, left, right, *others):
        return dot(self, numbers(left), numbers(right), *others)

    cast = interpreter.InterpreterBuilder.cast_impl

    def cast_impl(self, item, kind):
        from_integer = kind.scalar == tl.bfloat16 and item.dtype.scalar.is_int()
        return cast(self, cast(self, item, tl.float32) if from_integer else item, kind)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "cast_impl", cast_impl)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def prepared(hidden, weight, bias, targets, excluded_ids=()):
    """The kernels' table of a call without options."""
    projection = Projection(weight, bias, None, excluded_ids, len(weight), 1.0, None)
    return kernels("masked_logprob").prepare(hidden, targets, None, **vars(projection))


@pytest.mark.parametrize("shape", [(1, 32, 1), (3, 100, 2), (70, 33, 130), (5, 32, 2500)], ids=str)
def test_masked_logprob_matches_float64(shape):
    hidden, weight, bias, targets = problem(*shape)
    for offset in (bias, None):
        got = masked_logprob(hidden, weight, offset, targets, implementation="triton")
        torch.testing.assert_close(got.double(), exact(hidden, weight, offset, targets), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", LOW_PRECISION, ids=str)
def test_low_precision_inputs_accumulate_in_float32(dtype):
    hidden, weight, bias, targets = problem(20, 96, 300, dtype)
    got = masked_logprob(hidden, weight, bias, targets, implementation="triton")
    torch.testing.assert_close(got.double(), exact(hidden, weight, bias, targets), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", LOW_PRECISION, ids=str)
def test_low_precision_gradients_lose_only_their_own_rounding(dtype):
    hidden, weight, bias, targets = problem(20, 96, 300, dtype)
    gradients = []
    for implementation in ("triton", "reference"):
        inputs = [item.detach().requires_grad_() for item in (hidden, weight, bias)]
        value = masked_logprob(*inputs, targets, implementation=implementation)
        gradients.append(torch.autograd.grad(value.sum(), inputs))
    for got, want in zip(*gradients, strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got, want, rtol=0, atol=4 * torch.finfo(dtype).eps * float(want.abs().max()))


def test_options_and_statistics_match_the_reference():
    hidden, weight, bias, targets = problem(9, 40, 2300)
    targets = targets % 2100
    targets[4] = 3
    weight[2100:] = math.nan
    rows = torch.tensor([8, 0, 0, 7, 1, 2, 3, 4, 5])
    want = masked_logprob_statistics(hidden, weight, bias, targets, rows=rows, implementation="reference", **OPTIONS)
    got = masked_logprob_statistics(hidden, weight, bias, targets, rows=rows, implementation="triton", **OPTIONS)
    assert got.log_prob[4] == -math.inf
    torch.testing.assert_close(got.log_prob, want.log_prob, rtol=0, atol=1e-5)
    torch.testing.assert_close(got.log_sum_exp, want.log_sum_exp, rtol=0, atol=1e-5)
    torch.testing.assert_close(got.entropy, want.entropy, rtol=0, atol=2e-5)
    # A target may outrank itself here: numpy's sums, unlike a GPU's, depend on a column's place in its tile.
    assert ((got.rank - want.rank).abs() <= 1).all()
    plain = masked_logprob(hidden, weight, bias, targets, rows=rows, implementation="triton", **OPTIONS)
    torch.testing.assert_close(plain, want.log_prob, rtol=0, atol=1e-5)


def test_gradients_match_the_reference(monkeypatch):
    monkeypatch.setattr(kernels("logit_gradients"), "GRADIENTS_CHUNK", 11 * 1024)  # several slices of the vocabulary
    hidden, weight, bias, targets = problem(11, 40, 2300)
    targets = 4 + targets % 2000
    rows, upstream = torch.arange(11).flip(0), torch.randn(11)
    gradients = {}
    for implementation in ("triton", "reference"):
        inputs = [item.clone().requires_grad_() for item in (hidden, weight, bias)]
        value = masked_logprob(*inputs, targets, rows=rows, implementation=implementation, **OPTIONS)
        gradients[implementation] = torch.autograd.grad((value * upstream).sum(), inputs)
    for got, want in zip(gradients["triton"], gradients["reference"], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


def test_gradients_that_are_not_wanted_are_not_made():
    hidden, weight, bias, targets = problem(6, 32, 130)
    states = hidden.clone().requires_grad_()
    values = masked_logprob(states, weight, bias, targets, implementation="triton")
    (gradient,) = torch.autograd.grad(values.sum(), states)
    launch = prepared(hidden, weight, bias, targets)
    normaliser = torch.logsumexp(hidden @ weight.T + bias, dim=1)
    wanted = (False, False, True)
    nothing, none, offset = kernels("logit_gradients").gradients(
        launch, normaliser, torch.ones(6), wanted, gathered=False
    )
    assert nothing is None and none is None
    p = torch.softmax(hidden @ weight.T + bias, dim=1)
    slope = torch.nn.functional.one_hot(targets, 130) - p
    torch.testing.assert_close(offset, slope.sum(dim=0), rtol=0, atol=1e-5)
    torch.testing.assert_close(gradient, slope @ weight, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, *LOW_PRECISION], ids=str)
def test_eight_bit_rows_are_spread_out_inside_the_tile(dtype):
    hidden, weight, bias, targets = problem(9, 40, 300)
    hidden, targets = hidden.to(dtype), targets % 290
    scale = weight.abs().amax(dim=1) / 127
    stored = (weight / scale[:, None]).round().to(torch.int8)
    want = exact(hidden, stored.double() * scale[:, None].double(), bias, targets)
    states = hidden.requires_grad_()
    got = masked_logprob(states, stored, bias, targets, weight_scale=scale, implementation="triton")
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5)
    statistics = masked_logprob_statistics(states, stored, bias, targets, weight_scale=scale, implementation="triton")
    torch.testing.assert_close(statistics.log_prob, got.detach())
    (gradient,) = torch.autograd.grad(got.sum(), states)
    plain = masked_logprob(states, stored, bias, targets, weight_scale=scale, implementation="reference")
    (want_gradient,) = torch.autograd.grad(plain.sum(), states)
    tolerance = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(gradient, want_gradient, rtol=0, atol=tolerance)


def test_infinite_logits():
    check_infinite_logits("triton")


@pytest.mark.parametrize("places", [(1, 2), (2, 1), (0, 63), (5, 2500), (2500, 5)], ids=str)
def test_nan_spoils_its_row_beside_plus_infinity(places):
    check_nan_beside_infinity("triton", places)


@pytest.mark.parametrize("soft_cap", [30.0, 3000.0])
def test_a_wide_soft_cap_costs_no_digits(soft_cap):
    check_wide_soft_cap("triton", soft_cap)


def test_what_has_no_gradient_is_refused():
    check_second_derivative("triton")
    check_scale_gradient("triton")


def test_mixed_types_are_refused():
    hidden, weight, bias, targets = problem(4, 32, 130)
    with pytest.raises(ImplementationError, match="needs one dtype"):
        masked_logprob(hidden, weight.bfloat16(), bias, targets, implementation="triton")
    layout = make_layout([3], [(0, 4)])
    query, *others = tensors(layout, 1, 1, 32, 4)
    with pytest.raises(ImplementationError, match="'triton' takes one dtype"):
        prefix_attention(query, *(item.bfloat16() for item in others), layout, implementation="triton")


def test_every_launch_is_on_its_tensors_device(monkeypatch):
    """Triton takes the current device, so that a launch outside `device_of` would miss a second GPU's tensors."""
    entered, launches = [], []

    @contextmanager
    def device_of(tensor):
        entered.append(tensor)
        yield
        entered.pop()

    launch = interpreter.GridExecutor.__call__

    def recorded(self, *arguments, **options):
        launches.append((self.fn.__name__, len(entered)))
        return launch(self, *arguments, **options)

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", recorded)
    hidden, weight, bias, targets = problem(3, 32, 130)
    masked_logprob(hidden.requires_grad_(), weight, bias, targets, implementation="triton").sum().backward()
    masked_logprob_statistics(hidden, weight, bias, targets, implementation="triton")
    layout = make_layout([3], [(0, 4)])
    prefix_attention(*tensors(layout, 1, 1, 32, 4), layout, implementation="triton")
    values, segments = torch.zeros(4, dtype=torch.float64), torch.tensor([0, 4])
    log_mean_exp(values, segments, implementation="triton")
    evidence_bounds(values, 2, segments, implementation="triton")
    assert {name for name, _ in launches} == {
        "masked_logprob_kernel",
        "masked_logprob_merge_kernel",
        "masked_logprob_gradient_kernel",
        "masked_logprob_target_kernel",
        "prefix_attention_kernel",
        "log_mean_exp_kernel",
        "evidence_bounds_kernel",
    }
    assert all(depth == 1 for _, depth in launches)


def test_excluded_ids_are_copied_to_a_device_once():
    hidden, weight, bias, targets = problem(4, 32, 130)
    first, again, other = (
        prepared(hidden, weight, bias, targets, excluded_ids=ids).inputs[-1] for ids in ((3, 7), [3, 7], (8,))
    )
    assert first is again and first.tolist() == [3, 7] and other.tolist() == [8]


def test_no_rows():
    hidden, weight, bias, targets = problem(4, 32, 130)
    assert masked_logprob(hidden[:0], weight, bias, targets[:0], implementation="triton").shape == (0,)


def test_offsets_beyond_31_bits():
    hidden, weight, bias, targets = problem(3, 16, 3)
    want = masked_logprob(hidden, weight, bias, targets, implementation="triton")
    far = (spread_out(hidden), spread_out(weight), bias, targets)
    assert torch.equal(masked_logprob(*far, implementation="triton"), want)


@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(2, 2, 32), (4, 2, 80), (2, 1, 13)])
@pytest.mark.parametrize("block", [0, 4])
def test_prefix_attention_matches_the_dense_mask(heads, kv_heads, width, block):
    layout = make_layout([5, 0, 40, 1, 33], [(0, 45), (0, 45), (0, 0), (7, 33), (0, 45)], block=block)
    inputs = tensors(layout, heads, kv_heads, width, 60)
    got = prefix_attention(*inputs, layout, implementation="triton")
    torch.testing.assert_close(got.double(), dense(*inputs, layout), rtol=0, atol=3e-6)


def test_prefix_attention_of_chosen_queries():
    places = [[0, 3, 4], [], [0], [10, 2, 34]]
    layout = make_layout([7, 5, 1, 35], [(0, 20), (0, 20), (20, 0), (5, 40)], places, 4)
    inputs = tensors(layout, 2, 2, 32, 60)
    got = prefix_attention(*inputs, layout, implementation="triton")
    torch.testing.assert_close(got.double(), dense(*inputs, layout), rtol=0, atol=3e-6)


@pytest.mark.parametrize("dtype", LOW_PRECISION, ids=str)
@pytest.mark.parametrize("width", [32, 256])
def test_low_precision_attention_loses_only_its_weights_rounding(dtype, width):
    layout = make_layout([5, 40, 1], [(0, 45), (7, 33), (0, 0)], block=4)
    inputs = [item.to(dtype) for item in tensors(layout, 2, 1, width, 60)]
    got = prefix_attention(*inputs, layout, implementation="triton")
    assert got.dtype == dtype
    # Weights are rounded to the dtype before their product with the values.
    torch.testing.assert_close(got.double(), dense(*inputs, layout), rtol=0, atol=4 * torch.finfo(dtype).eps)


def test_a_layout_is_scheduled_once_for_all_layers(monkeypatch):
    module, made = kernels("prefix_attention"), []
    schedule_of = module.schedule_of

    def counted(*arguments):
        made.append(1)
        return schedule_of(*arguments)

    monkeypatch.setattr(module, "schedule_of", counted)
    layout = make_layout([5, 0, 40], [(0, 45), (0, 45), (7, 33)], block=4)
    for seed in range(3):
        inputs = tensors(layout, 2, 1, 32, 60, seed)
        got = prefix_attention(*inputs, layout, implementation="triton")
        torch.testing.assert_close(got.double(), dense(*inputs, layout), rtol=0, atol=3e-6)
    assert len(made) == 1
    (schedule,) = layout.schedules.values()
    parts = [*schedule.prefix, *schedule.window]
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 1  # one copy to the device
    assert all(part.data_ptr() % 16 == 0 for part in parts)
    assert not replace(layout, block=0).schedules


def test_prefix_attention_without_anything():
    layout = make_layout([0], [(0, 0)])
    assert prefix_attention(*tensors(layout, 2, 2, 32, 0), layout, implementation="triton").shape == (0, 2, 32)


def test_log_mean_exp_matches_the_reference():
    values = torch.tensor([*torch.randn(150).tolist(), -5000.0, -4999.0, -math.inf, -math.inf], dtype=torch.float64)
    segments = torch.tensor([0, 150, 150, 151, 152, 154])
    want = log_mean_exp(values, segments, implementation="reference")
    got = log_mean_exp(values, segments, implementation="triton")
    for name in ("log_mean", "standard_error", "minimum", "maximum", "count"):
        torch.testing.assert_close(getattr(got, name), getattr(want, name), equal_nan=True)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_nan_is_both_extremes_of_its_segment(place):
    check_nan_in_a_segment("triton", place)


def test_evidence_bounds_match_the_reference():
    values = torch.tensor([*torch.randn(210).tolist(), *[-math.inf] * 3, 0.0, -900.0, -901.0], dtype=torch.float64)
    segments = torch.tensor([0, 210, 213, 216])
    want = evidence_bounds(values, 3, segments, implementation="reference")
    got = evidence_bounds(values, 3, segments, implementation="triton")
    for name in ("lower", "upper_plain", "upper"):
        torch.testing.assert_close(getattr(got, name), getattr(want, name))


def test_evidence_bounds_of_many_folds():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2 * 100 + 130, generator=generator, dtype=torch.float64) * 20.0
    values[100:200] = -math.inf
    values[150] = 3.0  # one fold holds everything; without it there is nothing
    for folds, segments in ((50, [0, 100, 200]), (65, [0, 130])):
        part, edges = values[-segments[-1] :] if folds == 65 else values[:200], torch.tensor(segments)
        want = evidence_bounds(part, folds, edges, implementation="reference")
        got = evidence_bounds(part, folds, edges, implementation="triton")
        for name in ("lower", "upper_plain", "upper"):
            torch.testing.assert_close(getattr(got, name), getattr(want, name))


def test_layout_in_memory_does_not_matter():
    hidden, weight, bias, targets = problem(7, 33, 130)
    strided = torch.stack([bias, torch.full_like(bias, 7.0)], dim=1)[:, 0]
    loose_hidden, loose_weight = (item.repeat_interleave(2, dim=1)[:, ::2] for item in (hidden, weight))
    got = masked_logprob(loose_hidden, loose_weight, strided, targets, implementation="triton")
    torch.testing.assert_close(got, masked_logprob(hidden, weight, bias, targets, implementation="triton"))


def test_a_query_that_is_not_a_number_gives_none():
    layout = make_layout([3, 2], [(0, 2), (0, 0)])
    query, *others = tensors(layout, 1, 1, 32, 2)
    query[1] = math.nan
    got = prefix_attention(query, *others, layout, implementation="triton")
    assert got[1].isnan().all() and got[[0, 2, 3, 4]].isfinite().all()


def test_a_row_is_bitwise_the_same_alone_and_in_a_batch():
    hidden, weight, bias, targets = problem(70, 32, 300)
    together = masked_logprob(hidden, weight, bias, targets, implementation="triton")
    for row in (0, 33, 69):
        alone = masked_logprob(hidden[row : row + 1], weight, bias, targets[row : row + 1], implementation="triton")
        assert torch.equal(alone[0], together[row])
