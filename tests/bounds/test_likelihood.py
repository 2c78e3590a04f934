"""LikelihoodBounds with the embedded model: bounds, exact values, and texts that have none."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy.stats import norm as normal
from scipy.stats import t as student_t

from diffscore_fast import LikelihoodBounds
from diffscore_fast.bounds import likelihood as bounds_module
from diffscore_fast.bounds.config import BoundsConfig
from diffscore_fast.bounds.orders import Generation
from diffscore_fast.bounds.states import SampledOrders
from diffscore_fast.engine.plan import AttentionPattern
from diffscore_fast.errors import InputError, UnsupportedPatternError
from tests.support.networks import dense_log_probs

TEXTS = ["The cat sat on the mat and looked at the dog.", "It rained.", "Rain"]


@pytest.fixture(scope="module")
def bounds():
    return LikelihoodBounds("mini", block_size=4)


@pytest.fixture(scope="module")
def exact(bounds):
    return bounds.exact(TEXTS, autoregressive=True)


def test_exact_equals_brute_force_over_all_orders_with_a_dense_network(bounds):
    """Every order of every block, every step a full forward pass without cache or windows."""
    backbone = bounds._runner.backbone
    ids = bounds._tokenizer.encode(["The cat sat on a mat"])[0].ids.tolist()
    total, attention = 0.0, AttentionPattern("block", 4)
    for start, stop in ((0, 3), (3, len(ids))):
        terms = []
        for order in itertools.permutations(range(stop - start)):
            log_p = 0.0
            for place in order:
                masked = [order.index(other) >= order.index(place) for other in range(stop - start)]
                answers = dense_log_probs(backbone, attention, [], ids, masked, start, stop)
                log_p += answers[[i for i, flag in enumerate(masked) if flag].index(place)]
            terms.append(log_p)
        total += np.logaddexp.reduce(terms) - math.log(len(terms))
    assert bounds.exact(["The cat sat on a mat"]).exact[0] == pytest.approx(total, abs=1e-3)


def test_the_exact_value_lies_between_the_bounds(bounds, exact):
    table = bounds.estimate(TEXTS, orders=32, surrogate_orders=32)
    low, high = table.interval()
    assert (low <= exact.exact).all() and (exact.exact <= high).all()
    assert (table.distinct_states <= exact.distinct_states).all()
    assert table.visited_states.tolist() == (64 * table.num_tokens).tolist()
    means = [bounds.estimate(TEXTS[:1], orders=2, surrogate_orders=2, seed=seed) for seed in range(60)]
    lower, upper = (np.array([getattr(item, name)[0] for item in means]) for name in ("lower", "upper"))
    assert lower.mean() - 2 * lower.std() / 60**0.5 < exact.exact[0] < upper.mean() + 2 * upper.std() / 60**0.5
    assert lower.mean() < upper.mean()


@pytest.mark.parametrize("steps", [1, 3])
def test_parallel_generation(bounds, steps):
    exact = bounds.exact(TEXTS, generation="parallel", steps=steps)
    table = bounds.estimate(TEXTS, generation="parallel", steps=steps)
    low, high = table.interval()
    assert (low - 1e-9 <= exact.exact).all() and (exact.exact <= high + 1e-9).all()
    if steps == 1:
        np.testing.assert_allclose(table.lower, table.upper, atol=1e-9)
        np.testing.assert_allclose(table.lower, exact.exact, atol=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        dict(surrogate="single"),
        dict(surrogate="autoregressive"),
        dict(cross_fitted=False),
        dict(design="antithetic"),
        dict(design="antithetic", cross_fitted=False),
    ],
)
def test_every_surrogate_and_design_bounds_the_exact_value(bounds, exact, options):
    table = bounds.estimate(TEXTS, orders=128, surrogate_orders=128, **options)
    low, high = table.interval(4.0)
    assert (low <= exact.exact).all() and (exact.exact <= high).all()


def test_a_surrogate_may_be_any_function_of_the_tokens(bounds):
    """A function that returns the log-probs of block size 1 gives the bounds of surrogate="autoregressive"."""
    single = LikelihoodBounds("mini", block_size=1).exact(TEXTS).blocks.exact  # one block per token
    own = bounds.estimate(TEXTS, surrogate="autoregressive")

    def answers(texts: list[np.ndarray]) -> list[np.ndarray]:
        return np.split(single, np.cumsum([len(ids) for ids in texts])[:-1])

    with pytest.raises(InputError, match="attribute `name`"):
        bounds.estimate(TEXTS, surrogate=answers)
    answers.name = "my answers"  # type: ignore[attr-defined]
    table = bounds.estimate([*TEXTS, "", None], surrogate=answers)
    np.testing.assert_allclose(table.upper[:3], own.upper, rtol=1e-4)
    assert table.signature.surrogate == "my answers" and table.status[3:] == ["empty_text", "missing"]
    assert bounds.estimate(["", None], surrogate=answers).status == ["empty_text", "missing"]
    for wrong in (
        lambda texts: [np.zeros(len(ids) + 1) for ids in texts],
        lambda texts: [],
        lambda texts: [np.full(len(ids), np.nan) for ids in texts],
    ):
        wrong.name = "wrong"
        with pytest.raises(InputError, match="surrogate"):
            bounds.estimate(TEXTS, surrogate=wrong)


def test_block_size_one_is_the_autoregressive_model(exact):
    single = LikelihoodBounds("mini", block_size=1).exact(TEXTS)
    np.testing.assert_allclose(single.exact, exact.autoregressive, atol=1e-4)
    assert (single.distinct_states == single.num_tokens).all()


def test_bounds_do_not_depend_on_neighbours_or_budgets(bounds, exact):
    small = LikelihoodBounds("mini", block_size=4, token_budget=50, cache_bytes=1)
    np.testing.assert_allclose(small.exact(TEXTS[::-1]).exact, exact.exact[::-1], atol=1e-4)
    alone = [bounds.estimate([text], orders=4, surrogate_orders=4).upper[0] for text in TEXTS]
    np.testing.assert_allclose(bounds.estimate(TEXTS, orders=4, surrogate_orders=4).upper, alone, atol=1e-4)


def test_blocks_add_up_to_texts_and_tables_to_perplexities(exact):
    for row in range(len(TEXTS)):
        owned = slice(exact.block_offsets[row], exact.block_offsets[row + 1])
        assert exact.blocks.exact[owned].sum() == pytest.approx(exact.exact[row])
        assert exact.blocks.num_tokens[owned].sum() == exact.num_tokens[row]
    low, high = exact.perplexity_interval()
    assert low == pytest.approx(high) == pytest.approx(np.exp(-exact.exact.sum() / exact.num_tokens.sum()))


@pytest.mark.parametrize(
    ("text", "status", "message"),
    [
        ("", "empty_text", "no tokens"),
        (None, "missing", "text is missing"),
        (3, "invalid_text", "is a number"),
        ("\ud800", "invalid_text", "lone surrogate"),
        ("word " * 2048, "too_long", "2048 tokens, the model takes 2047"),
    ],
)
def test_bad_texts_get_a_status_and_no_bounds(bounds, exact, text, status, message):
    table = bounds.exact([TEXTS[1], text, TEXTS[2]])
    assert table.status == ["ok", status, "ok"] and message in table.messages[1]
    assert np.isnan([table.lower[1], table.upper[1], table.exact[1]]).all() and table.num_tokens[1] == 0
    np.testing.assert_allclose(table.exact[[0, 2]], exact.exact[1:], atol=1e-4)


def test_a_bound_that_one_draw_decides_is_unreliable(bounds, exact):
    """With one order for each bound the larger one decides; exact values need no draws."""
    few = bounds.estimate([*TEXTS, ""], orders=1, surrogate="autoregressive")
    assert few.effective_draws[0] == 1 and few.unreliable.tolist() == [True, True, True, False]
    assert not bounds.estimate(TEXTS, orders=32, surrogate_orders=32).unreliable.any()
    assert not exact.unreliable.any()


@pytest.mark.parametrize(
    ("orders", "design", "few"),
    [(2, "independent", True), (4, "independent", False), (4, "antithetic", True), (8, "antithetic", False)],
)
def test_few_independent_draws_are_unreliable_and_their_interval_wider(bounds, exact, orders, design, few):
    texts = [*TEXTS, ""]
    table = bounds.estimate(texts, orders=orders, surrogate_orders=orders, design=design)
    low, high = table.interval()
    pairs = 2 * orders if design == "independent" else orders
    assert table.few_draws.tolist()[:2] == [few, few] and set(table.blocks.degrees_of_freedom) <= {pairs - 1.0, np.inf}
    assert [state == "unreliable" for state in table.status] == table.unreliable.tolist()
    assert [bool(message) for message in table.messages] == [*table.unreliable[:3], True]
    shown = ~np.isnan(low)
    assert (low <= table.lower - 3 * table.stderr_lower + 1e-9)[shown].all() and (high >= table.upper)[shown].all()
    assert (table.degrees_lower[:2] >= pairs - 1 - 1e-9).all()  # errors of several blocks are known better than one's


def test_draws_that_are_equal_by_chance_have_no_known_error():
    """A block of three tokens has only three pairs of orders; two equal pairs do not show that the error is 0."""
    config = BoundsConfig(orders=2, surrogate_orders=2, design="antithetic")
    log_p = np.full((4, 4), -5.0)
    found = bounds_module.sampled_bounds(config, log_p, np.array([1, 2, 3, 4]), np.full(4, np.nan))
    assert found.few_draws.tolist() == [False, False, True, True]
    np.testing.assert_allclose(found.lower.stderr, [0, 0, np.nan, np.nan], atol=1e-12)
    parallel = BoundsConfig(orders=2, surrogate_orders=2, generation=Generation(1))
    assert not bounds_module.sampled_bounds(parallel, log_p, np.array([1, 2, 3, 4]), log_p[0]).few_draws.any()


def test_no_texts_is_an_empty_table(bounds):
    for table in (bounds.exact([]), bounds.estimate([])):
        assert len(table) == 0 and np.isnan(table.perplexity_interval()).all()


def test_wrong_use_is_refused(bounds):
    with pytest.raises(InputError, match="texts is one string"):
        bounds.exact("text")
    with pytest.raises(InputError, match="65,535 states per block, 257 times as many as at block size 8"):
        LikelihoodBounds("mini", block_size=16).exact(["text"])
    with pytest.raises(UnsupportedPatternError, match="block size 5"):
        LikelihoodBounds("mini", block_size=5)
    for wrong in (None, 3, {"a": "b"}, {"a"}):
        with pytest.raises(InputError, match="sequence of texts"):
            bounds.exact(wrong)
    for options in (
        dict(generation="other"),
        dict(generation="parallel"),
        dict(steps=3),
        dict(orders=0),
        dict(surrogate="other"),
        dict(design="other"),
        dict(folds=5),
        dict(folds=1),
        dict(design="antithetic", orders=3),
        dict(seed=2**128),
        dict(steps=2.5),
        dict(surrogate="single", folds=7),
    ):
        with pytest.raises(InputError):
            bounds.estimate(TEXTS, **options)


def test_a_surrogate_that_rules_a_text_out_leaves_the_others_alone(bounds):
    """psi = 0 has no tangent: the upper bound is +inf, there and nowhere else."""

    def surrogate(texts: list[np.ndarray]) -> list[np.ndarray]:
        return [np.where(ids == ids[0], -np.inf if len(ids) > 9 else -4.0, -4.0) for ids in texts]

    surrogate.name = "test"  # type: ignore[attr-defined]
    alone = bounds.estimate(TEXTS[1:], surrogate=surrogate)
    together = bounds.estimate(TEXTS, surrogate=surrogate)
    assert together.upper[0] == np.inf and together.interval()[1][0] == np.inf
    assert together.upper[1:].tolist() == alone.upper.tolist()
    assert together.perplexity_interval()[0] == 0.0 < together.perplexity_interval()[1] < np.inf


def test_errors_of_equal_texts_are_added_not_averaged_out(bounds):
    """Their orders are the same, so the mean over copies has the error of one."""
    options = dict(orders=8, surrogate_orders=8)
    one, many = bounds.estimate(TEXTS[:1], **options), bounds.estimate(TEXTS[:1] * 50, **options)
    assert many.perplexity_interval() == pytest.approx(one.perplexity_interval())
    # Different texts are independent: errors add in quadrature, and the interval is narrower than the sum of widths.
    both = bounds.estimate(TEXTS[:2], **options)
    assert both.keys[0] != both.keys[1]
    error = np.sqrt((both.stderr_lower**2).sum())
    width = student_t.isf(normal.sf(3.0), error**4 / (both.stderr_lower**4 / both.degrees_lower).sum())
    assert 3.0 < width < 4.6
    expected = np.exp(-(both.lower.sum() - width * error) / both.num_tokens.sum())
    assert both.perplexity_interval()[1] == pytest.approx(expected)


def test_a_text_with_many_draws_is_evaluated_in_chunks(bounds, monkeypatch):
    """Planning holds numbers for each token of each draw; with little room for them, a text is cut between blocks."""
    text, options = [" ".join(TEXTS) * 2], dict(orders=64, surrogate_orders=64)
    whole = bounds.estimate(text, **options)
    made = []

    def sampled(*arguments):
        made.append(1)
        return SampledOrders(*arguments)

    monkeypatch.setattr(bounds_module, "SampledOrders", sampled)
    monkeypatch.setattr(bounds._runner, "plan_tokens", 1024)
    parts = bounds.estimate(text, **options)
    assert len(made) == whole.num_tokens[0] // 8 + 1  # two blocks of 4 tokens, the first with the start token, a part
    assert parts.lower.tolist() == pytest.approx(whole.lower.tolist(), rel=1e-6)
    assert parts.upper.tolist() == pytest.approx(whole.upper.tolist(), rel=1e-6)
    assert parts.distinct_states.tolist() == whole.distinct_states.tolist()
