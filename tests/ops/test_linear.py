"""linear: epilogues against float64, odd shapes, batch invariance."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from diffscore_fast.errors import ImplementationError
from diffscore_fast.ops import ResidualNorm, linear
from tests.support.products import needs_extension

IMPLEMENTATIONS = ["reference", "tiles", pytest.param("cpu", marks=needs_extension)]


def problem(rows: int, depth: int, width: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, depth, generator=generator)
    weight = torch.randn(width, depth, generator=generator) / depth**0.5
    return x, weight, torch.randn(width, generator=generator)


def exact(x, weight, bias, activation="none", norm=None):
    y = x.double() @ weight.double().T
    if bias is not None:
        y = y + bias.double()
    if activation == "gelu":
        y = 0.5 * y * (1 + torch.erf(y / 2**0.5))
    if activation == "swiglu":
        half = y.shape[1] // 2
        y = y[:, :half] / (1 + torch.exp(-y[:, :half])) * y[:, half:]
    if norm is not None:
        y = y + norm.residual.double()
        centred = y - y.mean(dim=1, keepdim=True)
        variance = (centred**2).mean(dim=1, keepdim=True)
        y = centred / torch.sqrt(variance + norm.epsilon) * norm.gain.double() + norm.offset.double()
    return y


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("activation", ["none", "gelu", "swiglu"])
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("shape", [(1, 32, 2), (97, 100, 130), (25, 1536, 384), (7, 13, 66)], ids=str)
def test_epilogues_match_float64(implementation, activation, with_norm, shape):
    x, weight, bias = problem(*shape)
    kept = shape[2] // 2 if activation == "swiglu" else shape[2]
    norm = ResidualNorm(torch.randn(shape[0], kept), torch.randn(kept), torch.randn(kept), 1e-5) if with_norm else None
    for offset in (bias, None):
        got = linear(x, weight, offset, activation=activation, residual_norm=norm, implementation=implementation)
        # A norm over one or two columns divides by a difference that may be small.
        torch.testing.assert_close(got.double(), exact(x, weight, offset, activation, norm), rtol=1e-4, atol=2e-5)


@needs_extension
def test_gelu_keeps_its_tails():
    x = torch.linspace(-12, 12, 4001)[:, None]
    got = linear(x, torch.ones(1, 1), activation="gelu", implementation="cpu")
    want = functional.gelu(x.double())
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=3e-7)


@needs_extension
def test_error_is_at_most_twice_the_references():
    x, weight, bias = problem(257, 384, 576)
    want = exact(x, weight, bias)
    errors = [
        (linear(x, weight, bias, implementation=name).double() - want).abs().max() for name in ("cpu", "reference")
    ]
    assert errors[0] <= 2 * errors[1] + 1e-7


@needs_extension
def test_a_row_is_bitwise_the_same_alone_in_seven_and_in_a_thousand():
    x, weight, bias = problem(1000, 100, 130)
    norm = ResidualNorm(torch.randn(1000, 130), torch.randn(130), torch.randn(130), 1e-12)
    whole = linear(x, weight, bias, activation="gelu", residual_norm=norm, implementation="cpu")
    for first, count in ((0, 7), (501, 7), (0, 1), (999, 1)):
        rows = slice(first, first + count)
        part = norm._replace(residual=norm.residual[rows])
        got = linear(x[rows], weight, bias, activation="gelu", residual_norm=part, implementation="cpu")
        assert torch.equal(got, whole[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("depth", "width", "activation", "with_norm"),
    [(384, 1536, "gelu", False), (1536, 384, "none", True), (3072, 768, "none", True), (100, 66, "swiglu", False)],
)
@pytest.mark.parametrize("implementation", ["tiles", pytest.param("cpu", marks=needs_extension)])
def test_a_row_has_the_same_bits_whatever_is_beside_it(implementation, dtype, depth, width, activation, with_norm):
    """For everything that "auto" takes on a CPU: any number of rows, at any place, in rows of an odd stride."""
    if implementation == "tiles" and dtype == torch.float32 and activation != "none":
        pytest.skip("the C++ kernel serves float32; torch's activations are by tail and vector")
    x, weight, bias = (item.to(dtype) for item in problem(300, depth, width))
    residual, gain, offset = (torch.randn(*shape).to(dtype) for shape in ((300, width), (width,), (width,)))

    def made(rows: torch.Tensor) -> torch.Tensor:
        norm = ResidualNorm(residual[rows], gain, offset, 1e-12) if with_norm else None
        return linear(x[rows], weight, bias, activation=activation, residual_norm=norm, implementation=implementation)

    whole, order = made(torch.arange(300)), torch.randperm(300, generator=torch.Generator().manual_seed(1))
    for first, count in ((0, 300), *((count * 3, count) for count in range(1, 71)), (299, 1), (70, 200)):
        rows = order[first : first + count]
        assert torch.equal(made(rows), whole[rows]), count
    wide = torch.cat([x, torch.full((300, 7), torch.nan).to(dtype)], dim=1)[:, :depth]
    strided, plain = (linear(item, weight, bias, implementation=implementation) for item in (wide[5:38], x))
    assert torch.equal(strided, plain[5:38])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[1:])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bits_keep_the_error_budget(implementation, dtype):
    x, weight, bias = (item.to(dtype) for item in problem(97, 384, 130))
    want = exact(x, weight, bias, "gelu")
    got, reference = (
        linear(x, weight, bias, activation="gelu", implementation=name) for name in (implementation, "reference")
    )
    assert got.dtype == dtype
    assert (got.double() - want).abs().max() <= 2 * (reference.double() - want).abs().max() + 1e-7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["gelu", "swiglu"])
def test_activations_in_tiles_are_the_nearest_numbers(name, dtype):
    """For all 65,536 numbers, after a matmul that leaves them unchanged."""
    x = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)[:, None]
    weight = torch.ones(1 if name == "gelu" else 2, 1, dtype=dtype)
    got = linear(x, weight, activation=name, implementation="tiles").squeeze(1)
    wanted = functional.gelu(x.double()) if name == "gelu" else functional.silu(x.double()).to(dtype) * x
    torch.testing.assert_close(got, wanted.to(dtype).squeeze(1), rtol=0, atol=0, equal_nan=True)


@needs_extension
def test_views_and_no_rows():
    x, weight, bias = problem(30, 64, 48)
    want = exact(x, weight, bias)
    got = linear(x.repeat(1, 2)[:, 64:], weight.T.contiguous().T, bias, implementation="cpu")
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5)
    assert linear(x[:0], weight, bias, implementation="cpu").shape == (0, 48)


@needs_extension
def test_any_tensor_that_wants_a_gradient_gets_one():
    x, weight = torch.randn(12, 16), torch.randn(32, 16)
    bias = torch.zeros(32, requires_grad=True)
    linear(x, weight, bias, activation="gelu").sum().backward()
    assert bias.grad is not None and bias.grad.abs().sum() > 0
    with pytest.raises(ImplementationError, match="'cpu' has no gradient"):
        linear(x, weight, bias, implementation="cpu")
    with torch.no_grad():
        assert linear(x, weight, bias, implementation="cpu").shape == (12, 32)


@pytest.mark.parametrize("implementation", ["auto", *IMPLEMENTATIONS])
def test_a_bias_may_be_strided_or_expanded(implementation):
    x, weight, bias = problem(5, 16, 20)
    norm = ResidualNorm(torch.randn(5, 20), torch.randn(40)[::2], torch.randn(1).expand(20), 1e-5)
    for view in (torch.stack([bias, bias], dim=1)[:, 0], bias[:1].expand(20)):
        got = linear(x, weight, view, residual_norm=norm, implementation=implementation)
        torch.testing.assert_close(got.double(), exact(x, weight, view, norm=norm), rtol=1e-4, atol=2e-5)
    for wrong in (bias[:1], bias[:, None], torch.zeros(5, 20)):  # some of which would broadcast
        with pytest.raises(ValueError, match=r"bias must be \[20\]"):
            linear(x, weight, wrong, implementation=implementation)


@needs_extension
def test_more_rows_than_sizes_can_count_are_refused():
    with pytest.raises(RuntimeError, match="the weight has 9223372036854775807 rows; at most 2147483647"):
        linear(torch.zeros(1, 1), torch.zeros(1, 1).expand(2**63 - 1, 1), implementation="cpu")


def test_registration_and_refusals():
    x, weight, bias = problem(5, 16, 20)
    norm = (torch.randn(5, 20), torch.ones(20), torch.zeros(20))
    torch.library.opcheck(torch.ops.diffscore_fast.linear.default, (x, weight, bias, "gelu", *norm, 1e-5))
    with pytest.raises(RuntimeError, match=r"weight must be \[M, 16\]"):
        linear(x, weight[:, :15], bias, implementation="cpu")
    with pytest.raises(ValueError, match="activation must be"):
        linear(x, weight, bias, activation="relu")
