"""int8 products: exact sums against whole-number arithmetic, one set of bits on every processor, edges of the types."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from diffscore_fast.errors import ImplementationError
from diffscore_fast.ops import ResidualNorm, masked_logprob
from diffscore_fast.ops.int8_linear import (
    INT8_FEED_FORWARD,
    INT8_LINEAR,
    INT8_LOGPROB,
    MAX_DEPTH,
    Int8Layer,
    Int8Weight,
    int8_feed_forward,
    int8_linear,
    int8_logprob,
    int8_loops,
    int8_unavailable,
)
from tests.support.products import needs_extension

LOOPS = int8_loops()
SHAPES = [(1, 1, 1), (7, 13, 66), (97, 100, 130), (300, 1030, 200), (5, 3072, 64), (98, 768, 192)]


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weight_of(width: int, depth: int, seed: int = 0) -> Int8Weight:
    """Every code that int8 has, -128 among them."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-128, 128, (width, depth), dtype=torch.int8, generator=generator)
    return Int8Weight(codes, torch.rand(width, generator=generator) / depth**0.5 / 50 + 1e-5)


def whole_number_products(x: torch.Tensor, weight: Int8Weight, bias: torch.Tensor | None) -> np.ndarray:
    """The definition in numpy: codes by float32 division and rounding, sums in int64."""
    rows = x.numpy()
    largest = np.abs(rows).max(axis=1)
    squares = (np.rint(rows * (np.float32(2**14) / largest)[:, None]).astype(np.int64) ** 2).sum(axis=1)
    share = np.sqrt(squares / rows.shape[1]) * (3.0 / 2**14)
    reach = np.where(share < 1, largest * share.astype(np.float32), largest)
    codes = np.rint(rows * (np.float32(127) / reach)[:, None]).astype(np.int64)
    sums = codes @ weight.codes.numpy().astype(np.int64).T
    y = sums.astype(np.float32) * ((reach / np.float32(127))[:, None] * weight.scale.numpy())
    return y if bias is None else y + bias.numpy()


def run(loops: str, operation=INT8_LINEAR, *arguments):
    return operation.implementations["cpu"].function(*arguments, loops=loops)


@needs_extension
@pytest.mark.parametrize("loops", LOOPS)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_exact(loops, shape, with_bias):
    rows, depth, width = shape
    x, weight, bias = numbers(rows, depth), weight_of(width, depth), numbers(width, seed=1) if with_bias else None
    got = run(loops, INT8_LINEAR, x, Int8Layer(weight, bias), "none", None)
    np.testing.assert_array_equal(got.numpy(), whole_number_products(x, weight, bias))


@needs_extension
@pytest.mark.parametrize("loops", LOOPS)
def test_a_few_large_numbers_cost_the_others_no_precision(loops):
    """Exact sums with high parts, in few rows and columns; the error is that of a row without its large numbers."""
    x, weight = numbers(101, 768), weight_of(64, 768)
    x[:90, 5] *= 200.0
    x[17, 700] = -60.0
    got = run(loops, INT8_LINEAR, x, Int8Layer(weight, None), "none", None)
    np.testing.assert_array_equal(got.numpy(), whole_number_products(x, weight, None))
    matrix = weight.codes.double() * weight.scale[:, None].double()
    errors = (got.double() - x.double() @ matrix.T).square().mean(dim=1).sqrt()
    step = x.square().mean(dim=1).sqrt().double() * 3 / 127  # of a row; its rounding is uniform over a step
    expected = step / 12**0.5 * matrix.square().sum(dim=1).mean().sqrt()
    assert (errors < 1.5 * expected).all()
    by_maximum = x.abs().amax(dim=1).double() / 127 / 12**0.5 * matrix.square().sum(dim=1).mean().sqrt()
    assert (errors[:90] < 0.5 * by_maximum[:90]).sum() > 80


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_reference_is_the_definition(shape):
    rows, depth, width = shape
    x, weight, bias = numbers(rows, depth), weight_of(width, depth), numbers(width, seed=1)
    got = int8_linear(x, weight, bias, implementation="reference")
    np.testing.assert_array_equal(got.numpy(), whole_number_products(x, weight, bias))


@needs_extension
@pytest.mark.parametrize("loops", LOOPS)
def test_the_largest_sums_fit(loops):
    """The deepest row that is taken, of the codes with the largest products, of either sign."""
    codes = torch.full((2, MAX_DEPTH), -128, dtype=torch.int8)
    codes[1] = 127
    weight = Int8Weight(codes, torch.ones(2))
    x = torch.full((2, MAX_DEPTH), 127.0)
    x[1] = -127.0
    got = run(loops, INT8_LINEAR, x, Int8Layer(weight, None), "none", None)
    exact = 127 * MAX_DEPTH * np.array([[-128.0, 127.0], [128.0, -127.0]])
    np.testing.assert_array_equal(got.double().numpy(), exact.astype(np.float32))
    with pytest.raises(ValueError, match="sums in 32 bits"):
        Int8Weight(torch.zeros(1, MAX_DEPTH + 1, dtype=torch.int8), torch.ones(1))


@needs_extension
@pytest.mark.parametrize("activation", ["none", "gelu", "swiglu"])
@pytest.mark.parametrize("shape", [(1, 32, 2), (97, 100, 130), (25, 1536, 384), (7, 13, 66)], ids=str)
def test_epilogues_have_one_set_of_bits_and_the_references_meaning(activation, shape):
    rows, depth, width = shape
    kept = width // 2 if activation == "swiglu" else width
    x, layer = numbers(rows, depth), Int8Layer(weight_of(width, depth), numbers(width, seed=1))
    norm = ResidualNorm(numbers(rows, kept, seed=2), numbers(kept, seed=3), numbers(kept, seed=4), 1e-5)
    for after in (None, norm):
        found = [run(loops, INT8_LINEAR, x, layer, activation, after) for loops in LOOPS]
        assert all(torch.equal(item, found[0]) for item in found)
        want = int8_linear(x, *layer, activation=activation, residual_norm=after, implementation="reference")
        # A norm over one or two columns divides by a difference that may be small.
        torch.testing.assert_close(found[0], want, rtol=1e-4, atol=2e-5)


@needs_extension
@pytest.mark.parametrize("loops", LOOPS)
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_a_feed_forward_is_its_two_layers(loops, activation):
    x, up = numbers(131, 96), Int8Layer(weight_of(140, 96), numbers(140, seed=1))
    between = 70 if activation == "swiglu" else 140
    down = Int8Layer(weight_of(96, between, seed=5), numbers(96, seed=6))
    norm = ResidualNorm(x, numbers(96, seed=3), numbers(96, seed=4), 1e-12)
    got = run(loops, INT8_FEED_FORWARD, x, up, down, activation, norm)
    first = run(loops, INT8_LINEAR, x, up, activation, None)
    assert torch.equal(got, run(loops, INT8_LINEAR, first, down, "none", norm))
    want = int8_feed_forward(x, up, down, activation=activation, residual_norm=norm, implementation="reference")
    # The reference's activation rounds otherwise, so that a code between the layers may differ by one.
    torch.testing.assert_close(got, want, rtol=0, atol=0.05)
    assert (got - want).abs().mean() < 1e-3


@needs_extension
@pytest.mark.parametrize("loops", LOOPS)
def test_a_row_has_the_same_bits_whatever_is_beside_it(loops):
    x, layer = numbers(300, 100), Int8Layer(weight_of(130, 100), numbers(130, seed=1))
    residual, gain, offset = numbers(300, 130, seed=2), numbers(130, seed=3), numbers(130, seed=4)
    targets = torch.arange(300) % 130

    def made(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        norm = ResidualNorm(residual[rows], gain, offset, 1e-12)
        product = run(loops, INT8_LINEAR, x[rows], layer, "gelu", norm)
        vocabulary = layer.weight.scale[:, None] * layer.weight.codes
        arguments = (x[rows], layer.weight, vocabulary, layer.bias, targets[rows], (), 1.0)
        return product, run(loops, INT8_LOGPROB, *arguments)

    whole, order = made(torch.arange(300)), torch.randperm(300, generator=torch.Generator().manual_seed(1))
    threads = torch.get_num_threads()
    for first, count in ((0, 300), *((count * 3, count) for count in range(1, 20)), (299, 1), (70, 200)):
        rows = order[first : first + count]
        torch.set_num_threads(1 + count % 3)
        found = made(rows)
        torch.set_num_threads(threads)
        assert torch.equal(found[0], whole[0][rows]), count
        assert torch.equal(found[1], whole[1][rows]), count
    wide = torch.cat([x, torch.full((300, 7), torch.nan)], dim=1)[:, :100]
    strided, plain = (run(loops, INT8_LINEAR, item, layer, "none", None) for item in (wide[5:38], x))
    assert torch.equal(strided, plain[5:38])


@needs_extension
@pytest.mark.parametrize("loops", ["reference", *LOOPS])
def test_rows_at_the_edges_of_the_type(loops):
    weight, bias = weight_of(70, 20), numbers(70, seed=1)
    x = numbers(8, 20)
    x[0] = 0.0
    x[1] = 1e-40  # denormal: 127 / max is infinite
    x[2, 3] = torch.nan
    x[3, 0] = torch.inf
    x[4, 19] = -torch.inf
    x[5] *= 1e-30
    x[6] = x[7] * 2.0**60
    if loops == "reference":
        got = int8_linear(x, weight, bias, implementation="reference")
    else:
        got = run(loops, INT8_LINEAR, x, Int8Layer(weight, bias), "none", None)
    assert torch.equal(got[:2], bias.expand(2, -1))
    assert got[2:5].isnan().all()
    # A power of two changes no code.
    codes = (got[7] - bias) * 2.0**60
    torch.testing.assert_close(got[6], codes, rtol=1e-2, atol=2.0**60 * 1e-6)
    np.testing.assert_array_equal(got[5:].numpy(), whole_number_products(x[5:], weight, bias))


@needs_extension
@pytest.mark.parametrize("loops", LOOPS)
def test_gelu_keeps_its_tails(loops):
    """One code of the largest number: x itself up to the rounding of its step."""
    x = torch.linspace(-12, 12, 4001)[:, None]
    weight = Int8Weight(torch.full((1, 1), 127, dtype=torch.int8), torch.tensor([1 / 127.0]))
    got = run(loops, INT8_LINEAR, x, Int8Layer(weight, None), "gelu", None)
    torch.testing.assert_close(got.double(), torch.nn.functional.gelu(x.double()), rtol=2e-5, atol=6e-7)


@needs_extension
@pytest.mark.parametrize("loops", ["reference", *LOOPS])
@pytest.mark.parametrize("logit_scale", [1.0, 0.25])
def test_log_probs_take_the_targets_logit_from_float32(loops, logit_scale):
    """Against float64, with the logits of all other tokens from the definition of the int8 products."""
    hidden, codes, bias = numbers(150, 40), weight_of(5000, 40), numbers(5000, seed=1)
    weight = codes.scale[:, None] * codes.codes + 0.001 * numbers(5000, 40, seed=2)
    targets = torch.arange(150) * 29
    excluded = (7, int(targets[3]))
    arguments = (hidden, codes, weight, bias, targets, excluded, logit_scale)
    got = (
        INT8_LOGPROB.implementations["reference"].function(*arguments)
        if loops == "reference"
        else run(loops, INT8_LOGPROB, *arguments)
    )
    logits = torch.from_numpy(whole_number_products(hidden, codes, bias)).double()
    gold = ((hidden.double() * weight[targets].double()).sum(dim=1) + bias[targets]).double()
    logits[torch.arange(150), targets] = gold
    logits *= logit_scale
    logits[:, list(excluded)] = -torch.inf
    want = logits.log_softmax(dim=1).gather(1, targets[:, None]).squeeze(1)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=2e-5)
    assert got[3] == -torch.inf


@needs_extension
def test_log_probs_have_one_set_of_bits():
    hidden, codes = numbers(150, 40), weight_of(5000, 40)
    weight, targets = codes.scale[:, None] * codes.codes, torch.arange(150)
    found = [run(loops, INT8_LOGPROB, hidden, codes, weight, None, targets, (), 1.0) for loops in LOOPS]
    assert all(torch.equal(item, found[0]) for item in found)


@needs_extension
@pytest.mark.parametrize("loops", LOOPS)
def test_no_log_prob_exceeds_0(loops):
    """A target that takes nearly all the mass, and whose int8 logit is at times below the float32 one."""
    codes = Int8Weight(weight_of(300, 64).codes, torch.full((300,), 0.01))
    weight, targets = codes.scale[:, None] * codes.codes, torch.arange(300)
    hidden = weight * torch.linspace(1, 3000, 300)[:, None] / weight.norm(dim=1, keepdim=True) ** 2
    got = run(loops, INT8_LOGPROB, hidden, codes, weight, None, targets, (), 1.0)
    assert (got <= 0).all() and (got[100:] > -1e-3).all()
    own = torch.from_numpy(whole_number_products(hidden, codes, None)).diagonal()
    assert ((hidden * weight).sum(dim=1) > own + 0.1)[100:].any()
    torch.testing.assert_close(got, masked_logprob(hidden, weight, None, targets), rtol=0.02, atol=0.02)


@needs_extension
@pytest.mark.parametrize("loops", LOOPS)
def test_log_probs_of_broken_rows_are_nan(loops):
    codes = weight_of(100, 16)
    hidden = numbers(3, 16)
    hidden[0, 2], hidden[1, 3] = torch.nan, torch.inf
    weight = codes.scale[:, None] * codes.codes
    got = run(loops, INT8_LOGPROB, hidden, codes, weight, None, torch.zeros(3, dtype=torch.int64), (), 1.0)
    assert got.isnan().tolist() == [True, True, False]


def test_a_slice_is_a_matrix_of_those_rows():
    weight = weight_of(130, 20)
    x = numbers(5, 20)
    whole = int8_linear(x, weight)
    assert torch.equal(int8_linear(x, weight[40:]), whole[:, 40:])
    assert torch.equal(int8_linear(x, weight[:40]), whole[:, :40])
    assert weight[40:] is weight[40:130] and weight[:] is weight
    with pytest.raises(IndexError):
        weight[::2]


@needs_extension
def test_wrong_calls_are_refused():
    weight = weight_of(10, 20)
    with pytest.raises(RuntimeError, match="not packed for rows of 21"):
        int8_linear(numbers(2, 21), weight)
    with pytest.raises(RuntimeError, match="bias must be"):
        int8_linear(numbers(2, 20), weight, numbers(9))
    with pytest.raises(RuntimeError, match="no int8 loops named neon"):
        run("neon", INT8_LINEAR, numbers(2, 20), Int8Layer(weight, None), "none", None)
    with pytest.raises(ImplementationError):
        int8_linear(numbers(2, 20), weight, implementation="triton")
    with pytest.raises(IndexError):
        int8_logprob(numbers(1, 20), weight, numbers(10, 20), None, torch.tensor([10]))
    with pytest.raises(ValueError, match="soft cap"):
        int8_logprob(numbers(1, 20), weight, numbers(10, 20), None, torch.tensor([1]), soft_cap=3.0)


def test_int8_is_for_cpus_with_vnni():
    assert "not for cuda" in str(int8_unavailable(torch.device("cuda")))
    reason = int8_unavailable(torch.device("cpu"))
    assert (reason is None) == ("avx512_vnni" in LOOPS)
