"""linear in blocks of bfloat16: epilogues against float64, batch invariance, and the weights that are kept packed."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from diffscore_fast.backbones.loader import load_model
from diffscore_fast.ops import ResidualNorm, linear, packed_weights
from diffscore_fast.ops.packed_weights import PackedWeights, pack_weight
from tests.ops.test_linear import exact, problem
from tests.support.products import in_blocks, needs_extension, runs_brgemm

pytestmark = needs_extension
BY = pytest.mark.parametrize("products", [pytest.param("brgemm", marks=runs_brgemm(torch.bfloat16)), "plain"])


def halves(rows: int, depth: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    x, weight, bias = problem(rows, depth, width)
    return x.bfloat16(), weight.bfloat16(), bias.bfloat16()


def made(products: str, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, norm: ResidualNorm | None):
    packed = pack_weight(weight, gated=activation == "swiglu")
    after = norm or (None, None, None, 0.0)
    return torch.ops.diffscore_fast.linear_packed(x, packed, len(weight), bias, activation, *after, products)


@BY
@pytest.mark.parametrize("activation", ["none", "gelu", "swiglu"])
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("shape", [(1, 32, 4), (97, 100, 130), (50, 1536, 384), (7, 13, 66), (193, 64, 96)], ids=str)
def test_epilogues_keep_the_error_budget(products, activation, with_norm, shape):
    x, weight, bias = halves(*shape)
    kept = shape[2] // 2 if activation == "swiglu" else shape[2]
    parts = [torch.randn(*size).bfloat16() for size in ((shape[0], kept), (kept,), (kept,))]
    norm = ResidualNorm(*parts, 1e-5) if with_norm else None
    for offset in (bias, None):
        want = exact(x, weight, offset, activation, norm)
        got = made(products, x, weight, offset, activation, norm)
        reference = linear(x, weight, offset, activation=activation, residual_norm=norm, implementation="reference")
        budget = 2 * (reference.double() - want).abs().max() + 1e-7
        assert (got.double() - want).abs().max() <= budget
        # One rounding of the result, 2^-8, and little before it; a norm over few columns divides by what may be small.
        torch.testing.assert_close(got.double(), want, rtol=2**-8 + 5e-4, atol=2e-2 if with_norm else 1e-5)


@BY
@pytest.mark.parametrize(
    ("depth", "width", "activation", "with_norm"),
    [(384, 576, "gelu", False), (768, 192, "none", True), (100, 66, "swiglu", False), (64, 200, "swiglu", True)],
)
def test_a_row_has_the_same_bits_whatever_is_beside_it(products, depth, width, activation, with_norm):
    x, weight, bias = halves(250, depth, width)
    kept = width // 2 if activation == "swiglu" else width
    residual, gain, offset = (torch.randn(*shape).bfloat16() for shape in ((250, kept), (kept,), (kept,)))

    def of(rows: Tensor) -> Tensor:
        norm = ResidualNorm(residual[rows], gain, offset, 1e-12) if with_norm else None
        return made(products, x[rows], weight, bias, activation, norm)

    whole, order = of(torch.arange(250)), torch.randperm(250, generator=torch.Generator().manual_seed(1))
    for first, count in ((0, 250), (3, 1), (9, 47), (9, 48), (9, 49), (40, 97), (249, 1)):
        rows = order[first : first + count]
        assert torch.equal(of(rows), whole[rows]), count
    wide = torch.cat([x, torch.full((250, 7), torch.nan).bfloat16()], dim=1)[:, :depth]
    plain = made(products, x, weight, bias, activation, None)
    assert torch.equal(made(products, wide[5:138], weight, bias, activation, None), plain[5:138])


@BY
def test_a_nan_or_an_infinity_stays_in_its_row(products):
    x, weight, bias = halves(60, 64, 100)
    norm = ResidualNorm(torch.randn(60, 100).bfloat16(), *torch.randn(2, 100).bfloat16(), 1e-5)
    clean = [made(products, x, weight, bias, name, after) for name, after in (("gelu", None), ("none", norm))]
    x[3, 7], x[58, 0] = torch.nan, torch.inf
    spoilt = [made(products, x, weight, bias, name, after) for name, after in (("gelu", None), ("none", norm))]
    others = [row for row in range(60) if row not in (3, 58)]
    for before, after in zip(clean, spoilt, strict=True):
        assert torch.equal(before[others], after[others])
        assert after[3].isnan().all()
    assert spoilt[1][58].isnan().all()


@BY
@pytest.mark.parametrize("name", ["gelu", "swiglu"])
def test_activations_of_all_numbers(products, name):
    """Of every finite bfloat16 number, after a product that leaves it unchanged: within one unit of its last digit."""
    x = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16)
    x = x[x.isfinite() & (x.abs() < 1e30) & ((x.abs() > 1e-30) | (x == 0))][:, None]
    if name == "gelu":
        got = made(products, x, torch.ones(1, 1).bfloat16(), None, name, None).squeeze(1)
        want = functional.gelu(x.double()).squeeze(1)
    else:
        ones = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).bfloat16()
        got = made(products, torch.cat([x, torch.ones_like(x)], dim=1), ones, None, name, None).squeeze(1)
        want = functional.silu(x.double()).squeeze(1)
    torch.testing.assert_close(got.double(), want, rtol=2**-7, atol=1e-12)


def test_kept_weights_follow_their_weight():
    weight = torch.nn.Parameter(torch.randn(96, 64).bfloat16())
    kept = PackedWeights()
    first = kept.of(weight, gated=False)
    assert kept.of(weight, gated=False) is first
    assert kept.of(weight[:48], gated=False) is kept.of(weight[:48], gated=False)
    assert torch.equal(kept.of(weight[48:], gated=False), pack_weight(weight[48:].clone(), gated=False))
    assert torch.equal(kept.of(weight, gated=True), pack_weight(weight, gated=True))
    with torch.no_grad():
        weight[50:].mul_(2)
    assert torch.equal(kept.of(weight, gated=False), pack_weight(weight, gated=False))
    assert not torch.equal(kept.of(weight, gated=False), first)
    assert copy.deepcopy(kept).num_bytes == 0 < kept.num_bytes
    kept.clear()
    assert kept.num_bytes == 0


def test_a_weight_never_gets_what_another_left_at_its_address():
    kept = PackedWeights()
    for seed in range(20):  # each is freed before the next is made, and the allocator likes to give its memory again
        weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()
        assert torch.equal(kept.of(weight, gated=False), pack_weight(weight, gated=False))


def test_kept_weights_are_bounded(monkeypatch):
    weights = [torch.randn(48, 64).bfloat16() for _ in range(3)]
    monkeypatch.setattr(packed_weights, "MAX_PACKED_BYTES", 2 * weights[0].nbytes)
    kept = PackedWeights()
    got = [kept.of(weight, gated=False) for weight in weights]
    assert kept.num_bytes == 2 * weights[0].nbytes
    for weight, packed in zip(weights, got, strict=True):
        assert torch.equal(packed, pack_weight(weight, gated=False))


def test_a_network_packs_each_weight_once():
    if not in_blocks():
        pytest.skip("bfloat16 is multiplied in float32 in this run")
    network = load_model("mini", dtype=torch.bfloat16).backbone
    hidden, positions = torch.randn(5, network.spec.hidden_size).bfloat16(), torch.arange(5)
    with torch.no_grad():
        first = network.attention_inputs(0, hidden, positions)
        size = network._packed_weights.num_bytes
        again = network.attention_inputs(0, hidden, positions)
    assert size == network._packed_weights.num_bytes == network.layers[0].qkv.weight.nbytes
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_registration_and_refusals():
    x, weight, bias = halves(5, 40, 20)
    packed = pack_weight(weight, gated=False)
    norm = (torch.randn(5, 20).bfloat16(), torch.ones(20).bfloat16(), torch.zeros(20).bfloat16())
    torch.library.opcheck(torch.ops.diffscore_fast.pack_weight.default, (weight, True))
    own = torch.ops.diffscore_fast.linear_packed
    torch.library.opcheck(own.default, (x, packed, 20, bias, "gelu", *norm, 1e-5, "plain"))
    assert own(x[:0], packed, 20, bias, "none", None, None, None, 0.0, "plain").shape == (0, 20)
    with pytest.raises(RuntimeError, match="the packed weight must be"):
        own(x, packed, 20, bias, "swiglu", None, None, None, 0.0, "plain")
    with pytest.raises(RuntimeError, match=r"bias must be \[20\] bfloat16"):
        own(x, packed, 20, bias[:19], "none", None, None, None, 0.0, "plain")
    with pytest.raises(RuntimeError, match="products of a packed weight must be brgemm or plain"):
        own(x, packed, 20, bias, "none", None, None, None, 0.0, "inner")
    with pytest.raises(RuntimeError, match="even number of weight rows"):
        pack_weight(weight[:19], gated=True)
