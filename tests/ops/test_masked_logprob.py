"""masked_logprob: every implementation against float64, edge cases of vocabulary projections, gradients."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from diffscore_fast.errors import ImplementationError
from diffscore_fast.ops import AUTO, MASKED_LOGPROB, Projection, masked_logprob, masked_logprob_statistics
from diffscore_fast.ops.masked_logprob import _wanted
from tests.support.products import needs_extension, runs_brgemm

CPU = torch.device("cpu")
IMPLEMENTATIONS = ["reference", pytest.param("cpu", marks=needs_extension)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [  # rows, width, vocabulary: odd sizes of each, and the two real vocabularies once
    (1, 32, 1),
    (2, 100, 2),
    (97, 32, 130),
    (257, 384, 1000),
    (97, 576, 1000),
    (2, 384, 30522),
    (25, 100, 50257),
]


def problem(rows: int, width: int, size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, ...]:
    """Hidden, weight, bias, targets; targets lie in the first, the last and the tail's tile."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, generator=generator).to(dtype)
    weight = (torch.randn(size, width, generator=generator) / math.sqrt(width)).to(dtype)
    bias = torch.randn(size, generator=generator).to(dtype)
    targets = torch.randint(size, (rows,), generator=generator)
    targets[0] = size - 1
    targets[-1] = 0
    return hidden, weight, bias, targets


def spread_out(matrix: Tensor) -> Tensor:
    """The same numbers with rows 2^30 apart: the third starts at 2^31. Only the pages touched take memory."""
    far = torch.empty((len(matrix) - 1) * 2**30 + matrix.shape[1]).as_strided(matrix.shape, (2**30, 1))
    return far.copy_(matrix)


def exact(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
    logits = hidden.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    return torch.log_softmax(logits, dim=1).gather(1, targets[:, None]).squeeze(1)


@needs_extension
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_error_is_at_most_twice_the_float32_references(shape, dtype):
    hidden, weight, bias, targets = problem(*shape, dtype)
    want = exact(hidden, weight, bias, targets)
    budget = (masked_logprob(hidden, weight, bias, targets, implementation="reference") - want).abs().max()
    error = (masked_logprob(hidden, weight, bias, targets, implementation="cpu") - want).abs().max()
    # Always allow a unit in the last place of the largest value: small problems can be exact by chance.
    assert error <= 2 * budget + torch.finfo(torch.float32).eps * want.abs().max()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_common_offset_of_the_logits_costs_no_more_than_rounding_them(implementation):
    hidden, weight, bias, targets = problem(97, 32, 1000)
    want = exact(hidden, weight, bias, targets)
    got = masked_logprob(hidden, weight, bias + 1e4, targets, implementation=implementation)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=2.5e-3)  # float32 near 1e4 steps by 1e-3


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_very_negative_logits_are_not_outdone_by_padding(implementation):
    hidden, weight, bias, targets = problem(5, 32, 130)
    want = exact(hidden, weight, bias - 500.0, targets)
    got = masked_logprob(hidden, weight, bias - 500.0, targets, implementation=implementation)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_minus_infinity_in_the_bias_removes_a_token(implementation):
    hidden, weight, bias, targets = problem(9, 32, 200)
    bias[7] = -math.inf
    targets[:] = torch.tensor([1, 2, 3, 4, 5, 6, 8, 199, 7])
    got = masked_logprob(hidden, weight, bias, targets, implementation=implementation)
    others = [token for token in range(200) if token != 7]
    index = torch.tensor([others.index(int(token)) for token in targets[:-1]])
    want = exact(hidden[:-1], weight[others], bias[others], index)
    torch.testing.assert_close(got[:-1].double(), want, rtol=0, atol=1e-5)
    assert got[-1] == -math.inf


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("soft_cap", [None, 3.0])
@pytest.mark.parametrize("logit_scale", [1.0, 0.25])
def test_options_together_match_their_formula(implementation, soft_cap, logit_scale):
    hidden, weight, bias, targets = problem(33, 100, 150)
    targets = targets % 120
    targets[3] = 5
    # Rows from 140 on are padding of the weight; NaN would show if they were read.
    weight[140:] = math.nan
    bias[140:] = math.nan
    logits = logit_scale * (hidden.double() @ weight[:140].double().T + bias[:140].double())
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    logits[:, [5, 139]] = -math.inf
    want = torch.log_softmax(logits, dim=1).gather(1, targets[:, None]).squeeze(1)
    got = masked_logprob(
        hidden,
        weight,
        bias,
        targets,
        excluded_ids=(5, 139),
        vocab_size=140,
        logit_scale=logit_scale,
        soft_cap=soft_cap,
        implementation=implementation,
    )
    assert got[3] == -math.inf
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_name_hidden_states_in_any_order_and_repeat(implementation):
    hidden, weight, bias, _ = problem(40, 32, 130)
    rows = torch.tensor([39, 0, 7, 7, 12])
    targets = torch.tensor([0, 129, 64, 63, 1])
    got = masked_logprob(hidden, weight, bias, targets, rows=rows, implementation=implementation)
    torch.testing.assert_close(got.double(), exact(hidden[rows], weight, bias, targets), rtol=0, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_layout_in_memory_does_not_matter(implementation):
    hidden, weight, bias, targets = problem(31, 64, 300)
    want = masked_logprob(hidden, weight, bias, targets, implementation=implementation)
    transposed = masked_logprob(
        hidden.T.contiguous().T,
        weight.T.contiguous().T,
        bias.repeat(2).view(2, -1).T.contiguous()[:, 0],
        targets,
        implementation=implementation,
    )
    strided = masked_logprob(
        hidden.repeat(1, 2)[:, :64], weight.repeat(1, 2)[:, :64], bias, targets, implementation=implementation
    )
    torch.testing.assert_close(transposed, want, rtol=0, atol=2e-6)
    torch.testing.assert_close(strided, want, rtol=0, atol=2e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_rows(implementation):
    hidden, weight, bias, targets = problem(4, 32, 130)
    assert masked_logprob(hidden[:0], weight, bias, targets[:0], implementation=implementation).shape == (0,)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_eight_bit_rows_with_scales(implementation):
    hidden, weight, bias, targets = problem(30, 64, 500)
    scale = weight.abs().amax(dim=1) / 127
    stored = (weight / scale[:, None]).round().to(torch.int8)
    want = exact(hidden, stored.double() * scale[:, None].double(), bias, targets)
    got = masked_logprob(hidden, stored, bias, targets, weight_scale=scale, implementation=implementation)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_statistics_match_the_full_distribution(implementation):
    hidden, weight, bias, targets = problem(50, 64, 700)
    logits = hidden.double() @ weight.double().T + bias.double()
    logits[:, 3] = -math.inf
    p = torch.softmax(logits, dim=1)
    got = masked_logprob_statistics(hidden, weight, bias, targets, excluded_ids=(3,), implementation=implementation)
    torch.testing.assert_close(got.log_sum_exp.double(), logits.logsumexp(1), rtol=0, atol=1e-5)
    torch.testing.assert_close(got.entropy.double(), torch.special.entr(p).sum(1), rtol=0, atol=2e-5)
    target = logits.gather(1, targets[:, None])
    assert torch.equal(got.rank, (logits > target).sum(1))
    torch.testing.assert_close(got.log_prob.double(), p.log().gather(1, targets[:, None])[:, 0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_logit_of_plus_infinity_takes_all_the_mass_and_nan_spoils_its_row(implementation):
    check_infinite_logits(implementation)


def check_infinite_logits(implementation: str) -> None:
    hidden, weight, bias, _ = problem(6, 32, 1500)
    bias[[7, 1400]] = torch.tensor([math.inf, -math.inf])
    hidden[4] = math.nan
    targets = torch.tensor([0, 7, 1400, 1499, 0, 7])
    got = masked_logprob_statistics(hidden, weight, bias, targets, implementation=implementation)
    assert got.log_prob.tolist() == pytest.approx(
        [-math.inf, math.nan, -math.inf, -math.inf, math.nan, math.nan], nan_ok=True
    )
    assert got.log_sum_exp.tolist() == pytest.approx([*[math.inf] * 4, math.nan, math.inf], nan_ok=True)
    assert got.entropy.isnan().all()
    finite = [0, 1, 2, 3]  # a row of NaN has no rank
    expected = masked_logprob_statistics(hidden, weight, bias, targets, implementation="reference").rank
    # Two sums of a logit may round to either side of the target's.
    assert (got.rank - expected)[finite].abs().max() <= 1 and got.rank[0] > 0 and got.rank[1] == 0
    plain = masked_logprob(hidden, weight, bias, targets, implementation=implementation)
    torch.testing.assert_close(plain, got.log_prob, equal_nan=True)
    excluded = masked_logprob(hidden, weight, bias, targets, excluded_ids=(7,), implementation=implementation)
    assert excluded[[0, 3]].isfinite().all() and excluded[[1, 2, 5]].tolist() == [-math.inf] * 3


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("places", [(1, 2), (2, 1), (0, 63), (5, 2500), (2500, 5)], ids=str)
def test_nan_spoils_its_row_beside_plus_infinity(implementation, places):
    check_nan_beside_infinity(implementation, places)


def check_nan_beside_infinity(implementation: str, places: tuple[int, int]) -> None:
    """A NaN in the bias, and +inf before or after it, in the same tile, split or another."""
    hidden, weight = torch.zeros(3, 32), torch.zeros(2600, 32)
    bias = torch.zeros(2600)
    bias[[*places, 7]] = torch.tensor([math.inf, math.nan, -math.inf])
    targets = torch.tensor([3, 7, places[0]])
    got = masked_logprob_statistics(hidden, weight, bias, targets, implementation=implementation)
    for column in (got.log_prob, got.log_sum_exp, got.entropy):
        assert column.isnan().all()
    assert masked_logprob(hidden, weight, bias, targets, implementation=implementation).isnan().all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("soft_cap", [30.0, 3000.0])
def test_a_wide_soft_cap_costs_no_digits(implementation, soft_cap):
    check_wide_soft_cap(implementation, soft_cap)


def check_wide_soft_cap(implementation: str, soft_cap: float) -> None:
    hidden, weight, bias, targets = problem(8, 64, 500)
    logits = soft_cap * torch.tanh((hidden.double() @ weight.double().T + bias.double()) / soft_cap)
    want = torch.log_softmax(logits, dim=1).gather(1, targets[:, None]).squeeze(1)
    got = masked_logprob(hidden, weight, bias, targets, soft_cap=soft_cap, implementation=implementation)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=3e-6)


@pytest.mark.parametrize("soft_cap", [0.0, -3.0, math.nan, math.inf])
def test_a_soft_cap_that_caps_nothing_is_refused(soft_cap):
    hidden, weight, bias, targets = problem(4, 32, 130)
    for function in (masked_logprob, masked_logprob_statistics):
        with pytest.raises(ValueError, match="soft_cap must be above 0"):
            function(hidden, weight, bias, targets, soft_cap=soft_cap)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_tied_target_is_not_outranked_by_itself(implementation):
    hidden, weight, bias, targets = problem(30, 384, 300)
    weight[1::2] = weight[::2]  # every token has a twin with the same logit
    bias[1::2] = bias[::2]
    logits = hidden @ weight.T + bias
    best = logits.argmax(dim=1)
    got = masked_logprob_statistics(hidden, weight, bias, best, implementation=implementation)
    assert (got.rank == 0).all()


def test_a_target_outside_the_vocabulary_names_its_row():
    hidden, weight, bias, targets = problem(4, 32, 130)
    for wrong in (-1, 130):
        targets[2] = wrong
        with pytest.raises(IndexError, match=rf"targets\[2\] is {wrong}"):
            masked_logprob(hidden, weight, bias, targets)
    with pytest.raises(IndexError, match=r"rows\[1\] is 4, outside the hidden states of 4"):
        masked_logprob(hidden, weight, bias, targets % 130, rows=torch.tensor([0, 4, 1, 2]))


def test_targets_on_the_host_are_checked_there_and_go_to_the_device():
    """`meta` stands for a GPU: its values cannot be read, so a check there would fail."""
    hidden, weight, bias, targets = problem(4, 32, 130)
    far = [item.to("meta") for item in (hidden, weight, bias)]
    assert masked_logprob(*far, targets).device.type == "meta"
    targets[3] = 130
    with pytest.raises(IndexError, match=r"targets\[3\] is 130, outside the vocabulary of 130"):
        masked_logprob(*far, targets)


@needs_extension
def test_a_graph_takes_the_operation_whole():
    hidden, weight, bias, targets = problem(5, 32, 130)
    rows = torch.tensor([0, 4, 4, 1, 2])

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(hidden, targets):
        return masked_logprob(hidden, weight, bias, targets, rows=rows, excluded_ids=(3,), soft_cap=4.0)

    states = hidden.requires_grad_()
    want = masked_logprob(states, weight, bias, targets, rows=rows, excluded_ids=(3,), soft_cap=4.0)
    got = compiled(states, targets)
    assert torch.equal(got, want)
    assert torch.equal(*(torch.autograd.grad(item.sum(), states)[0] for item in (got, want)))
    with pytest.raises(IndexError, match=r"targets\[1\] is 130"):
        compiled(states, targets.index_fill(0, torch.tensor([1]), 130))


@needs_extension
def test_the_kernel_itself_refuses_what_it_cannot_read():
    hidden, weight, bias, targets = problem(4, 32, 130)
    call = torch.ops.diffscore_fast.masked_logprob

    def run(hidden=hidden, weight=weight, bias=bias, targets=targets, rows=None):
        return call(hidden, weight, bias, targets, rows, [], weight.shape[0], 1.0, None, None, "auto")

    with pytest.raises(RuntimeError, match=r"hidden must be \[N, D\]"):
        run(hidden=hidden.double())
    with pytest.raises(RuntimeError, match=r"weight must be \[V, 32\]"):
        run(weight=weight[:, :31])
    with pytest.raises(RuntimeError, match=r"bias must be \[130\]"):
        run(bias=bias[:100])
    with pytest.raises(RuntimeError, match=r"targets must be \[N\] int64"):
        run(targets=targets.int())
    with pytest.raises(RuntimeError, match="3 targets for 4 rows"):
        run(targets=targets[:3])
    with pytest.raises(IndexError, match=r"rows\[1\] is 9"):
        run(rows=torch.tensor([0, 9, 1, 2]))


def test_an_implementation_asked_for_by_name_runs_or_raises():
    hidden, weight, bias, targets = problem(4, 32, 130)
    with pytest.raises(ImplementationError, match="no implementation 'nonsense'"):
        masked_logprob(hidden, weight, bias, targets, implementation="nonsense")
    assert "CPU" in str(MASKED_LOGPROB.implementations["cpu"].unavailable(torch.device("cuda")))


@needs_extension
def test_dtypes_that_kernels_do_not_take_go_to_the_reference():
    hidden, weight, bias, targets = problem(4, 32, 130)
    want = masked_logprob(hidden, weight, bias, targets, implementation="reference")
    assert torch.equal(masked_logprob(hidden, weight.double(), bias, targets), want)
    mixed = Projection(weight, None, None, (), 130, 1.0, None)
    assert _wanted(hidden.bfloat16(), mixed, AUTO) == AUTO  # the CPU's kernel reads any pair of its dtypes
    far = hidden.bfloat16().to("meta"), replace(mixed, weight=weight.to("meta"))  # a device that is not the CPU
    assert _wanted(*far, AUTO) == "reference"
    assert _wanted(*far, "triton") == "triton"


@needs_extension
def test_offsets_beyond_31_bits():
    hidden, weight, bias, targets = problem(3, 16, 3)
    want = masked_logprob(hidden, weight, bias, targets, implementation="cpu")
    far = masked_logprob(spread_out(hidden), spread_out(weight), bias, targets, implementation="cpu")
    assert torch.equal(far, want)


@needs_extension
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_is_bitwise_the_same_alone_in_seven_and_in_a_thousand(dtype):
    hidden, weight, bias, targets = problem(1000, 100, 1500, dtype)
    whole = masked_logprob(hidden, weight, bias, targets, implementation="cpu")
    for first, count in ((0, 7), (501, 7), (0, 1), (23, 1), (999, 1)):
        rows = slice(first, first + count)
        part = masked_logprob(hidden[rows], weight, bias, targets[rows], implementation="cpu")
        assert torch.equal(part, whole[rows])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(masked_logprob(hidden, weight, bias, targets, implementation="cpu"), whole)
    finally:
        torch.set_num_threads(threads)


def made_by(
    products: str, hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, **options
) -> tuple[Tensor, ...]:
    """Statistics with the products made by "brgemm", or by "plain" loops in its place."""
    return torch.ops.diffscore_fast.masked_logprob_statistics(
        hidden,
        weight,
        bias,
        targets,
        options.get("rows"),
        options.get("excluded_ids", ()),
        options.get("vocab_size", len(weight)),
        options.get("logit_scale", 1.0),
        options.get("soft_cap"),
        None,
        products,
    )


def blocks(dtype: torch.dtype) -> list:
    return [
        pytest.param("brgemm", dtype, marks=runs_brgemm(dtype)),
        pytest.param("plain", dtype, marks=needs_extension),
    ]


IN_BLOCKS = pytest.mark.parametrize(("products", "dtype"), blocks(torch.float32) + blocks(torch.bfloat16), ids=str)


@IN_BLOCKS
@pytest.mark.parametrize("shape", [(1, 32, 1), (97, 32, 130), (25, 576, 1000), (49, 1120, 700)], ids=str)
def test_products_in_blocks_keep_the_error_budget(shape, products, dtype):
    hidden, weight, bias, targets = problem(*shape, dtype)
    want = exact(hidden, weight, bias, targets)
    budget = (masked_logprob(hidden, weight, bias, targets, implementation="reference") - want).abs().max()
    statistics = made_by(products, hidden, weight, bias, targets)
    error = (statistics[0] - want).abs().max()
    assert error <= 2 * budget + torch.finfo(torch.float32).eps * want.abs().max()
    plain = torch.ops.diffscore_fast.masked_logprob(
        hidden, weight, bias, targets, None, [], len(weight), 1.0, None, None, products
    )[0]
    assert torch.equal(plain, statistics[0])


@IN_BLOCKS
def test_products_in_blocks_with_every_option(products, dtype):
    hidden, weight, bias, targets = problem(60, 96, 300, dtype)
    weight = weight.repeat(1, 2)[:, :96]
    weight[1:280:2] = weight[:280:2]  # every token has a twin with the same logit
    bias[1:280:2] = bias[:280:2]
    weight[290:] = math.nan
    targets, rows = targets % 280, torch.arange(60).flip(0)
    options = {"rows": rows, "excluded_ids": (5, 289), "vocab_size": 290, "logit_scale": 0.5, "soft_cap": 3.0}
    got = made_by(products, hidden, weight, bias, targets, **options)
    want = masked_logprob_statistics(hidden, weight, bias, targets, implementation="reference", **options)
    torch.testing.assert_close(got[0], want.log_prob, rtol=0, atol=1e-5)
    torch.testing.assert_close(got[1], want.log_sum_exp, rtol=0, atol=1e-5)
    torch.testing.assert_close(got[2], want.entropy, rtol=0, atol=2e-5)
    twins = made_by(products, hidden, weight, bias, targets ^ 1, **options)  # a tie does not count as above
    untouched = ~torch.isin(targets, torch.tensor([4, 5]))
    assert torch.equal(got[3][untouched], twins[3][untouched])


@IN_BLOCKS
def test_products_in_blocks_are_bitwise_the_same_in_any_batch(products, dtype):
    hidden, weight, bias, targets = problem(1000, 96, 1500, dtype)
    whole = made_by(products, hidden, weight, bias, targets)
    for first, count in ((0, 7), (501, 7), (23, 1), (999, 1)):
        rows = slice(first, first + count)
        for part, full in zip(made_by(products, hidden[rows], weight, bias, targets[rows]), whole, strict=True):
            assert torch.equal(part, full[rows])


@needs_extension
def test_brgemm_asked_for_runs_or_says_why_not():
    hidden, weight, bias, targets = problem(5, 33, 40)
    with pytest.raises(RuntimeError, match="the width is no multiple of 32"):
        made_by("brgemm", hidden, weight, bias, targets)
    with pytest.raises(RuntimeError, match="not both float32 or both bfloat16"):
        made_by("brgemm", hidden, weight.half(), bias, targets)
    enabled = torch.backends.mkldnn.enabled
    try:
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
        with pytest.raises(RuntimeError, match="oneDNN is switched off"):
            made_by("brgemm", hidden[:, :32], weight[:, :32], bias, targets)
    finally:
        torch.backends.mkldnn.enabled = enabled


@needs_extension
def test_a_tile_of_two_gib_is_multiplied_by_the_inner_loops():
    """oneDNN counts its bytes in 32 bits. Only the pages touched take memory."""
    hidden, plain, bias, targets = problem(3, 32, 66)
    for stride, fits in ((2**23 - 32, True), (2**23, False)):
        far = torch.empty(65 * stride + 32).as_strided(plain.shape, (stride, 1)).copy_(plain)
        got = masked_logprob(hidden, far, bias, targets, implementation="cpu")
        torch.testing.assert_close(got.double(), exact(hidden, plain, bias, targets), rtol=0, atol=1e-5)
        if fits:
            made_by("plain", hidden, far, bias, targets)
            continue
        for products in ("brgemm", "plain"):
            with pytest.raises(RuntimeError, match="64 rows of the weight span 2 GiB or more"):
                made_by(products, hidden, far, bias, targets)


@needs_extension
@pytest.mark.parametrize("change", [{"bias": torch.complex64}, {"scale": torch.complex64}, {"rows": 2**40}], ids=str)
def test_the_kernel_itself_refuses_what_it_would_misread(change):
    weight = torch.zeros(1, 8, dtype=torch.int8).expand(change.get("rows", 9), 8)
    bias = torch.zeros(9, dtype=change.get("bias", torch.float32))
    scale = torch.ones(9, dtype=change.get("scale", torch.float32))
    if "rows" in change:
        bias, scale = bias[:1].expand(2**40), scale[:1].expand(2**40)
    arguments = (torch.zeros(2, 8), weight, bias, torch.tensor([0, 1]), None, [], len(weight), 1.0, None, scale, "auto")
    with pytest.raises(RuntimeError, match="must be of real numbers|1099511627776 rows; at most"):
        torch.ops.diffscore_fast.masked_logprob(*arguments)


@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_reference_passes_gradcheck(soft_cap):
    hidden, weight, bias = (item.double() for item in problem(5, 4, 7)[:3])
    inputs = [item.requires_grad_() for item in (hidden, weight, bias)]
    targets, rows = torch.tensor([0, 6, 2, 2, 4]), torch.tensor([4, 0, 0, 2, 1])

    def function(hidden, weight, bias):
        return masked_logprob(
            hidden,
            weight,
            bias,
            targets,
            rows=rows,
            excluded_ids=(5,),
            soft_cap=soft_cap,
            logit_scale=0.7,
            implementation="reference",
        )

    assert torch.autograd.gradcheck(function, inputs)


@needs_extension
@pytest.mark.parametrize(
    "options", [{}, {"excluded_ids": (3,), "logit_scale": 0.5, "soft_cap": 4.0, "vocab_size": 150}]
)
def test_gradients_match_the_references(options):
    hidden, weight, bias, targets = problem(37, 48, 160)
    targets = 4 + targets % 140
    rows = torch.arange(37).flip(0)
    upstream = torch.randn(37)
    gradients = {}
    for implementation in ("cpu", "reference"):
        inputs = [item.clone().requires_grad_() for item in (hidden, weight, bias)]
        value = masked_logprob(*inputs, targets, rows=rows, implementation=implementation, **options)
        gradients[implementation] = torch.autograd.grad((value * upstream).sum(), inputs)
    for got, want in zip(gradients["cpu"], gradients["reference"], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


@needs_extension
def test_a_second_derivative_is_the_references_alone():
    check_second_derivative("cpu")


def check_second_derivative(implementation: str) -> None:
    hidden, weight, bias, targets = problem(5, 16, 40)
    states = hidden.requires_grad_()
    value = masked_logprob(states, weight, bias, targets, implementation=implementation).sum()
    with pytest.raises(ImplementationError, match=f"{implementation}' has no second derivative"):
        torch.autograd.grad(value, states, create_graph=True)
    value = masked_logprob(states, weight, bias, targets, implementation="reference").sum()
    (gradient,) = torch.autograd.grad(value, states, create_graph=True)
    (second,) = torch.autograd.grad(gradient.square().sum(), states)
    assert second.abs().sum() > 0


@needs_extension
def test_a_gradient_of_the_weights_scale_is_the_references_alone():
    check_scale_gradient("cpu")


def check_scale_gradient(implementation: str) -> None:
    hidden, weight, bias, targets = problem(5, 16, 40)
    stored = (weight * 100).round().to(torch.int8)
    scale = torch.full((40,), 0.01, requires_grad=True)
    masked_logprob(hidden, stored, bias, targets, weight_scale=scale).sum().backward()
    assert scale.grad is not None and scale.grad.abs().sum() > 0
    with pytest.raises(ImplementationError, match="no gradient of weight_scale"):
        masked_logprob(hidden, stored, bias, targets, weight_scale=scale, implementation=implementation)


POISONED = """
import torch
from diffscore_fast.ops import AttentionLayout, ResidualNorm, linear, masked_logprob_statistics, prefix_attention
import numpy as np
torch.manual_seed(0)
got = masked_logprob_statistics(torch.randn(25, 40), torch.randn(130, 40), torch.randn(130), torch.arange(25))
edges = np.array([0, 3, 3, 12])
layout = AttentionLayout(edges, edges, np.array([0, 0, 5]), np.array([7, 0, 0]))
q, k, v, pk, pv = (torch.randn(n, 2, 16) for n in (12, 12, 12, 9, 9))
norm = ResidualNorm(torch.randn(25, 30), torch.ones(30), torch.zeros(30), 1e-5)
parts = [got.log_prob, got.entropy, got.rank.float(), prefix_attention(q, k, v, pk, pv, layout, implementation="cpu"),
         linear(torch.randn(25, 40), torch.randn(30, 40), residual_norm=norm, implementation="cpu")]
print(torch.cat([part.flatten() for part in parts]).numpy().tobytes().hex())
"""


@needs_extension
def test_scratch_is_written_before_it_is_read():
    """The same bits whichever of two patterns the C library writes to fresh memory (one is -1.7e38 as float32)."""
    outputs = {
        subprocess.run(
            [sys.executable, "-c", POISONED],
            env={**os.environ, "MALLOC_PERTURB_": pattern},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for pattern in ("1", "160")
    }
    assert len(outputs) == 1


@needs_extension
def test_registration_passes_opcheck():
    hidden, weight, bias, targets = problem(5, 16, 20)
    inputs = [item.requires_grad_() for item in (hidden, weight, bias)]
    arguments = (*inputs, targets, None, [3], 20, 1.0, None, None, "auto")
    targets[targets == 3] = 4
    torch.library.opcheck(torch.ops.diffscore_fast.masked_logprob.default, arguments)
    with torch.no_grad():
        torch.library.opcheck(
            torch.ops.diffscore_fast.masked_logprob_statistics.default,
            tuple(item.detach() if isinstance(item, Tensor) else item for item in arguments),
        )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(vocab_size=60), ValueError, "vocab_size 60 is not in 1 .. 40"),
        (dict(bias=torch.zeros(10)), ValueError, r"bias must be \[40\]"),
        (dict(targets=torch.zeros(3, dtype=torch.int64)), ValueError, r"\[3\] targets for 5 rows"),
        (dict(rows=torch.tensor([0, 1, 2, 3, 9])), IndexError, r"rows\[4\] is 9"),
        (dict(rows=torch.arange(5, dtype=torch.int32)), TypeError, "must be int64"),
        (dict(weight=torch.zeros(40, 9)), ValueError, r"weight \[V, D\]"),
        (dict(excluded_ids=(-1,)), ValueError, "must not be negative"),
        (dict(bias=torch.zeros(40, dtype=torch.complex64)), TypeError, "bias must be of real numbers"),
        (dict(hidden=torch.zeros(5, 8, dtype=torch.complex64)), TypeError, "hidden must be of real numbers"),
        (dict(weight=torch.zeros(40, 8, dtype=torch.complex64)), TypeError, "weight must be of real numbers"),
        (dict(weight_scale=torch.ones(40, dtype=torch.complex64)), TypeError, "weight_scale must be of real numbers"),
        (dict(weight_scale=torch.ones(39)), ValueError, r"weight_scale must be \[40\]"),
        (dict(weight=torch.zeros(1, 8).expand(2**31, 8), bias=None), ValueError, "2147483648 rows; at most 2147483647"),
        (
            dict(hidden=torch.zeros(5, 1), weight=torch.zeros(1, 1).expand(2**63 - 1, 1), bias=None),
            ValueError,
            "9223372036854775807 rows; at most 2147483647",
        ),
    ],
)
def test_what_a_kernel_would_read_beyond_is_refused(implementation, change, error, message):
    hidden, weight, bias, targets = problem(5, 8, 40)
    arguments = {"hidden": hidden, "weight": weight, "bias": bias, "targets": targets, **change}
    with pytest.raises(error, match=message):
        masked_logprob(**arguments, implementation=implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_an_excluded_id_among_the_padding_changes_nothing(implementation):
    hidden, weight, bias, targets = problem(5, 8, 40)
    targets = targets % 30
    plain = masked_logprob(hidden, weight, bias, targets, vocab_size=30, implementation=implementation)
    padded = masked_logprob(
        hidden, weight, bias, targets, vocab_size=30, excluded_ids=(30, 39, 50), implementation=implementation
    )
    assert torch.equal(plain, padded)
