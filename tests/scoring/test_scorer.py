"""DiffScorer: what a score may and may not depend on, and what happens to rows that cannot be scored."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pandas
import pytest
import torch

from diffscore_fast import DiffScorer
from diffscore_fast.errors import InputError, UnsupportedPatternError
from diffscore_fast.scoring import scorer
from diffscore_fast.scoring.calibrate import calibrate
from tests.support.products import stands_in

SOURCES = [
    "Two passengers found dead on a cruise ship in Puerto Rico appear to have died in a murder-suicide.",
    "Manchester City are keen to sign the Anderlecht teenager.",
    "Manchester City are keen to sign the Anderlecht teenager.",
    "The cat sat on the mat.",
]
CANDIDATES = [
    "Two passengers were found dead on a cruise ship.",
    "City want to sign a teenager from Anderlecht.",
    "A cat.",
    "A cat sat on a mat while the dog slept in the garden.",
]
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def conditional(mini):
    return mini.score(SOURCES, CANDIDATES, draws=5)


def test_a_table_has_one_entry_per_row(mini):
    table = mini.score(SOURCES, CANDIDATES, draws=20, coupling="independent")
    assert table.status == ["ok"] * 4 and table.messages == [""] * 4
    assert (table.scores < 0).all() and (table.stderr[[0, 1, 3]] > 0).all() and table.stderr[2] == 0
    assert table.num_draws.tolist() == [18, 18, 7, 18]
    assert table.num_tokens.tolist() == [len(item.ids) for item in mini._tokenizer.encode(CANDIDATES)]
    assert table.profile.shape == (4, 9) and np.isfinite(table.profile).all()
    np.testing.assert_allclose(table.profile.mean(1), table.scores, atol=1e-12)
    assert table.kind == "mean log-prob" and table.signature.draws == 18 and table.signature.replicates == 2
    frame = table.to_pandas()
    assert isinstance(frame, pandas.DataFrame) and frame.columns.tolist() == ["score", "stderr", "tokens", "status"]


def test_scores_do_not_depend_on_order_neighbours_or_repetition(mini, conditional):
    for rows in ([3, 2, 1, 0], [1], [0, 0, 2]):
        table = mini.score([SOURCES[i] for i in rows], [CANDIDATES[i] for i in rows], draws=5)
        np.testing.assert_allclose(table.scores, conditional.scores[rows], atol=TOLERANCE)
    with_bad = mini.score(["", *SOURCES, None], ["x", *CANDIDATES, "y"], draws=5)
    assert with_bad.status == ["empty_source", "ok", "ok", "ok", "ok", "missing"]
    np.testing.assert_allclose(with_bad.scores[1:5], conditional.scores, atol=TOLERANCE)


def test_scores_do_not_depend_on_budgets_or_batches(conditional, monkeypatch):
    small = DiffScorer("mini", token_budget=40, cache_bytes=1)
    np.testing.assert_allclose(small.score(SOURCES, CANDIDATES, draws=5).scores, conditional.scores, atol=TOLERANCE)
    monkeypatch.setattr(scorer, "TOKENS_CHUNK", 1)  # every row a batch of its own
    table = small.score(SOURCES, CANDIDATES, draws=5, token_scores=True)
    np.testing.assert_allclose(table.scores, conditional.scores, atol=TOLERANCE)
    assert table.tokens.offsets.tolist() == np.cumsum([0, *table.num_tokens]).tolist()


def test_bfloat16_scores_are_the_same_bits_alone_and_in_a_batch():
    """1,000 random short pairs: all together, in batches of other sizes and in another order, and 150 alone.

    Where products are stand-ins for units that the processor lacks, fewer: they take ten times as long.
    """
    low = DiffScorer("mini", dtype=torch.bfloat16)
    generator = np.random.default_rng(3)
    words = " ".join(SOURCES + CANDIDATES).split()
    slow = stands_in()
    count, singles = (60, 12) if slow else (1000, 150)
    sources, candidates = (
        [" ".join(generator.choice(words, size)) for size in generator.integers(1, most, count)] for most in (9, 4)
    )
    options = dict(draws=1, mask_ratios="uniform")

    def score(rows: np.ndarray) -> np.ndarray:
        return low.score([sources[i] for i in rows], [candidates[i] for i in rows], **options).scores

    together, order = score(np.arange(count)), generator.permutation(count)
    assert np.isfinite(together).all()
    portions = np.split(order, np.cumsum(generator.integers(2, 40, count // 40)))
    for portion in (*portions, *order[:singles, None]):
        assert np.array_equal(score(portion), together[portion])


def test_reverse_is_conditional_with_the_texts_exchanged(mini):
    reverse = mini.score(SOURCES, CANDIDATES, direction="reverse", draws=5)
    exchanged = mini.score(CANDIDATES, SOURCES, direction="conditional", draws=5)
    np.testing.assert_allclose(reverse.scores, exchanged.scores, atol=TOLERANCE)
    assert reverse.num_tokens.tolist() == exchanged.num_tokens.tolist()


def test_bidirectional_is_the_weighted_sum(mini):
    options = dict(draws=20, seed=4)
    parts = [mini.score(SOURCES, CANDIDATES, direction=item, **options) for item in ("conditional", "reverse")]
    both = mini.score(SOURCES, CANDIDATES, direction="bidirectional", alpha=0.3, **options)
    np.testing.assert_allclose(both.scores, 0.3 * parts[0].scores + 0.7 * parts[1].scores, atol=TOLERANCE)
    assert (both.num_tokens == parts[0].num_tokens + parts[1].num_tokens).all()


def test_pmi_is_conditional_minus_marginal_on_common_masks(mini):
    options = dict(draws=20, seed=4, token_scores=True)
    parts = [mini.score(SOURCES, CANDIDATES, direction=item, **options) for item in ("conditional", "marginal")]
    pmi = mini.score(SOURCES, CANDIDATES, direction="pmi", **options)
    np.testing.assert_allclose(pmi.scores, parts[0].scores - parts[1].scores, atol=TOLERANCE)
    assert parts[0].tokens.counts.tolist() == parts[1].tokens.counts.tolist() == pmi.tokens.counts.tolist()
    difference = parts[0].tokens.log_probs - parts[1].tokens.log_probs
    np.testing.assert_allclose(pmi.tokens.log_probs, difference, atol=TOLERANCE)
    assert pmi.kind == "difference"


def test_marginal_reads_no_source(mini):
    without = mini.score(None, CANDIDATES, direction="marginal", draws=5)
    ignored = mini.score([None, 3, "", "x"], CANDIDATES, direction="marginal", draws=5)
    np.testing.assert_array_equal(without.scores, ignored.scores)


def test_masks_follow_the_seed_and_the_target_alone(mini):
    first = mini.score(SOURCES[:1], CANDIDATES[:1], draws=5, seed=1, token_scores=True)
    other_source = mini.score(SOURCES[1:2], CANDIDATES[:1], draws=5, seed=1, token_scores=True)
    other_seed = mini.score(SOURCES[:1], CANDIDATES[:1], draws=5, seed=2, token_scores=True)
    assert first.tokens.counts.tolist() == other_source.tokens.counts.tolist()
    assert first.tokens.counts.tolist() != other_seed.tokens.counts.tolist()
    assert first.scores[0] != other_seed.scores[0]


def test_standard_error_covers_the_spread_over_seeds(mini):
    """Over 200 seeds the spread of scores matches the root mean square of their standard errors."""
    scores, errors = [], []
    for seed in range(200):
        table = mini.score(SOURCES[3:], ["A cat sat there."], draws=8, mask_ratios="uniform", seed=seed)
        scores.append(table.scores[0])
        errors.append(table.stderr[0])
    # The ratio of two estimates from 200 samples lies within 0.2 of 1 with probability above 0.99.
    assert np.sqrt(np.mean(np.square(errors))) == pytest.approx(np.std(scores, ddof=1), rel=0.2)


def test_token_scores_have_the_spans_of_their_characters(mini):
    text = "Café  opened\tin Zürich"
    table = mini.score(None, [text], direction="marginal", draws=20, token_scores=True)
    pieces = [text[start:end] for start, end in table.tokens.spans]
    assert "".join(pieces) == text.replace(" ", "").replace("\t", "")
    assert table.tokens.log_probs.shape == table.tokens.counts.shape == (len(pieces),)


DESIGNS = [
    {"draws": 4},
    {"draws": 4, "target_stderr": 0.5, "max_draws": 8},
    {"draws": 4, "attention": "corrected"},
    {"draws": 4, "attention": "corrected", "full_draws": "auto", "direction": "pmi"},
]


@pytest.mark.parametrize("options", DESIGNS, ids=str)
def test_scores_do_not_depend_on_neighbours_in_any_design(mini, options):
    """Rows that are enumerated, cut short by a target error or corrected, in one batch and alone."""
    sources, candidates = ["It rained.", "The cat.", "The cat."], ["A cat on a ship.", "A cat.", "A cat sat."]
    together = mini.score(sources, candidates, **options)
    for row in (2, 1, 0):
        alone = mini.score(sources[row : row + 1], candidates[row : row + 1], **options)
        for name in ("scores", "stderr", "num_draws", "full_draws"):
            np.testing.assert_allclose(getattr(alone, name)[0], getattr(together, name)[row], atol=TOLERANCE)


def test_short_candidates_are_scored_exactly(mini):
    table = mini.score(SOURCES, ["Cat.", "A cat.", "A cat sat there.", ""], draws=8, token_scores=True)
    assert table.num_draws.tolist() == [3, 7, 8, 0]
    assert table.stderr[:2].tolist() == [0, 0] and table.stderr[2] > 0
    other = mini.score(SOURCES[:2], ["Cat.", "A cat."], draws=7, seed=5, coupling="independent", mask_ratios="grid")
    np.testing.assert_allclose(other.scores, table.scores[:2], atol=TOLERANCE)
    np.testing.assert_allclose(table.profile[:2].mean(axis=1), table.scores[:2], atol=1e-9)


def test_the_corrected_estimator_reads_both_patterns_within_both_limits(mini, monkeypatch):
    candidate = "A cat sat on a mat."
    corrected = mini.score(SOURCES[:1], [candidate], attention="corrected", draws=6, full_draws=6, replicates=1)
    assert corrected.full_draws.tolist() == [6] and "full_draws:6" in str(corrected.signature)
    spec = mini.spec
    patterns = {**spec.patterns, "full": replace(spec.patterns["full"], position_limit=20)}
    monkeypatch.setattr(mini, "spec", replace(spec, patterns=patterns))
    table = mini.score(["word " * 15, "word " * 11], [candidate] * 2, attention="corrected", draws=2)
    assert table.status == ["too_long", "ok"]
    monkeypatch.setattr(mini, "spec", replace(spec, patterns={"prefix": spec.patterns["prefix"]}))
    with pytest.raises(UnsupportedPatternError, match="it has: prefix"):
        mini.score(SOURCES[:1], [candidate], attention="corrected")


def test_full_attention_is_another_score_under_another_signature(mini, conditional):
    full = mini.score(SOURCES, CANDIDATES, draws=5, attention="full")
    assert full.signature != conditional.signature and "attention:full" in str(full.signature)
    assert np.abs(full.scores - conditional.scores).min() > 1e-3


@pytest.mark.parametrize(
    ("source", "candidate", "status", "message"),
    [
        ("s", "", "empty_candidate", "candidate has no tokens"),
        ("s", " \t\n ", "empty_candidate", "candidate has no tokens"),
        ("s", "​﻿", "empty_candidate", "candidate has no tokens"),
        ("", "c", "empty_source", "source has no tokens"),
        (None, "c", "missing", "source is missing"),
        ("s", None, "missing", "candidate is missing"),
        ("s", float("nan"), "missing", "candidate is missing"),
        ("s", pandas.NA, "missing", "candidate is missing"),
        (3, "c", "invalid_text", "source is a number"),
        ("s", ["c"], "invalid_text", "candidate is a list"),
        ("s", b"c", "invalid_text", "candidate is bytes"),
        ("s", "broken \ud800 text", "invalid_text", "lone surrogate at character 7"),
        ("s", "word " * 2048, "too_long", "candidate has 2048 tokens, the model takes 2047"),
        ("word " * 2048, "c", "too_long", "source has 2048 tokens, there is room for 2047"),
    ],
)
def test_bad_rows_get_a_status_and_no_score(mini, conditional, source, candidate, status, message):
    table = mini.score([SOURCES[0], source, SOURCES[1]], [CANDIDATES[0], candidate, CANDIDATES[1]], draws=5)
    assert table.status == ["ok", status, "ok"] and message in table.messages[1]
    assert np.isnan(table.scores[1]) and np.isnan(table.stderr[1]) and table.num_tokens[1] == 0
    np.testing.assert_allclose(table.scores[[0, 2]], conditional.scores[:2], atol=TOLERANCE)


@pytest.fixture
def short(mini, monkeypatch):
    """The embedded model, told that it has 40 positions."""
    patterns = {name: replace(item, position_limit=40) for name, item in mini.spec.patterns.items()}
    monkeypatch.setattr(mini, "spec", replace(mini.spec, patterns=patterns))
    return mini


@pytest.mark.parametrize("direction", ["conditional", "reverse", "bidirectional"])
def test_truncating_the_source_is_counted(short, direction):
    table = short.score(["word " * 42], ["A word."], direction=direction, draws=1, overlength="truncate-source")
    assert table.status == ["truncated_source"] and table.truncated_tokens.tolist() == [3]
    assert "last 3 of the source's 42 tokens were cut" in table.messages[0] and table.scores[0] < 0
    cut = short.score(["word " * 39], ["A word."], direction=direction, draws=1)
    np.testing.assert_allclose(table.scores, cut.scores, atol=TOLERANCE)
    too_long = short.score(["s"], ["word " * 42], direction=direction, draws=1, overlength="truncate-source")
    assert too_long.status == ["too_long"]


def test_full_attention_shares_its_positions_between_both_texts(short):
    table = short.score(["word " * 20] * 2, ["word " * 19, "word " * 20], draws=1, attention="full")
    assert table.status == ["ok", "too_long"] and "there is room for 19" in table.messages[1]


@pytest.mark.parametrize("options", [{"target_stderr": 0.3}, {"attention": "corrected", "full_draws": "auto"}])
def test_pilots_of_enumerated_rows_raise_no_warning(mini, options):
    """The variance is 0, not unknown; warnings are errors here."""
    table = mini.score(["It rained."], ["Cat."], **options)
    assert table.num_draws.tolist() == [3] and table.stderr.tolist() == [0]


def test_control_token_strings_are_text(mini):
    table = mini.score(["The [CLS] cat [MASK]."], ["A [MASK] cat [SEP] sat."], draws=5)
    assert table.status == ["ok"]
    assert table.num_tokens[0] >= len(["A", "[", "MASK", "]", "cat", "[", "SEP", "]", "sat", "."])


def test_nats_are_scores_times_tokens(mini):
    table = mini.score(
        [None] * 2, ["A cat sat.", ""], direction="marginal", draws=4, estimator="elbo", mask_ratios="stratified"
    )
    assert table.kind == "lower bound" and table.nats[0] == table.scores[0] * table.num_tokens[0]
    assert np.isnan(table.nats[1])
    assert np.isnan(mini.score(["A dog."], ["A cat."], direction="bidirectional", draws=1).nats[0])


def test_no_rows_is_an_empty_table(mini):
    table = mini.score([], [], draws=5, token_scores=True)
    assert len(table) == 0 and table.profile.shape == (0, 9) and table.tokens.offsets.tolist() == [0]


@pytest.mark.parametrize(
    ("sources", "candidates", "options", "message"),
    [
        (["s"], ["a", "b"], {}, "1 sources but 2 candidates"),
        ("source", ["c"], {}, "sources is one string"),
        (["s"], "candidate", {}, "candidates is one string"),
        (["s"], None, {}, "not NoneType"),
        (None, ["c"], {}, "reads sources"),
        (["s"], 3, {}, "must be a sequence"),
        (["s"], ["c"], {"direction": "backward"}, "direction 'backward' is unknown"),
        (["s"], ["c"], {"attention": "other"}, "attention 'other' is unknown"),
        (["s"], ["c"], {"attention": "full", "full_draws": 2}, "belong to attention 'corrected'"),
        (["s"], ["c"], {"attention": "corrected", "full_draws": 3}, "multiple of the 2 replicates"),
        (["s"], ["c"], {"target_stderr": -1.0}, "must be a positive number"),
        (["s"], ["c"], {"coupling": "other"}, "coupling 'other' is unknown"),
        (["s"], ["c"], {"coupling": "balanced", "mask_ratios": "uniform"}, "independent draws"),
        (["s"], ["c"], {"overlength": "cut"}, "overlength policy 'cut' is unknown"),
        (["s"], ["c"], {"alpha": 1.5}, "alpha must lie in"),
        (["s"], ["c"], {"draws": 0}, "draws must be at least 1"),
        (["s"], ["c"], {"draws": 5.5}, "draws must be a whole number"),
        (["s"], ["c"], {"seed": 0.5}, "seed must be a whole number"),
        (["s"], ["c"], {"seed": 2**128}, "must fit in 128 bits"),
        (["s"], {"c"}, {}, "candidates must be a sequence of texts, not set"),
    ],
)
def test_wrong_use_is_refused_before_anything_runs(mini, sources, candidates, options, message):
    with pytest.raises(InputError, match=message):
        mini.score(sources, candidates, **options)


def test_a_pattern_the_model_lacks_is_refused(mini, monkeypatch):
    spec = mini.spec
    monkeypatch.setattr(mini, "spec", replace(spec, patterns={"full": spec.patterns["full"]}))
    with pytest.raises(UnsupportedPatternError, match="it has: full"):
        mini.score(["s"], ["c"], attention="prefix")


def test_signatures_tell_every_choice_apart(mini):
    base: dict[str, Any] = dict(draws=5)
    variants: list[dict[str, Any]] = [
        {},
        {"seed": 1},
        {"direction": "reverse"},
        {"direction": "bidirectional"},
        {"direction": "bidirectional", "alpha": 0.2},
        {"estimator": "elbo"},
        {"mask_ratios": "uniform"},
        {"masking": "count"},
        {"levels": 5},
        {"draws": 20},
        {"attention": "full"},
        {"length_normalised": True},
        {"overlength": "skip"},
        {"estimator": "weighted", "level_weights": [1] * 9},
        {"estimator": "weighted", "level_weights": range(1, 10)},
        {"draws": 20, "replicates": 1},
        {"coupling": "independent"},
        {"target_stderr": 0.1},
        {"target_stderr": 0.1, "max_draws": 64},
        {"attention": "corrected"},
        {"attention": "corrected", "full_draws": 4},
        {"attention": "corrected", "full_draws": "auto"},
    ]
    seen = {str(mini.score([], [], **(base | item)).signature) for item in variants}
    assert len(seen) == len(variants)
    assert all(f"weights:{mini._identity['weights']}" in item for item in seen)


def test_rows_are_taken_by_number_or_by_one_bool_per_row(mini):
    table = mini.score(["a", "b", "c"], ["A cat sat.", "It rained.", "Rain"], draws=2)
    assert table.take([2, 0]).scores.tolist() == table.scores[[2, 0]].tolist()
    chosen = table.scores > np.median(table.scores)
    assert table.take(chosen).scores.tolist() == table.scores[chosen].tolist()
    assert len(table.take([])) == 0
    for wrong in ([True], [0.5], [[0], [1]]):
        with pytest.raises(InputError, match="row numbers, or 3 bools"):
            table.take(wrong)


def test_series_are_read_by_position(mini):
    texts, index = ["one two three", "one", "one two"], [2, 0, 1]
    series = pandas.Series(texts, index=index)
    assert mini.count_tokens(series).tolist() == mini.count_tokens(texts).tolist()
    expected = calibrate(mini, texts, texts, draws=2)
    assert calibrate(mini, series, series, draws=2) == expected
    with pytest.raises(InputError, match="sequence of texts, not DataFrame"):
        mini.score(None, pandas.DataFrame({"a": texts}), direction="marginal")


def test_signatures_of_numpy_numbers_are_plain(mini):
    options = dict(direction="bidirectional", alpha=np.float32(0.25), target_stderr=np.float64(0.5), draws=np.int64(4))
    table = mini.score(["a"], ["A cat sat."], **options)
    assert json.loads(json.dumps(table.signature.to_dict()))["alpha"] == 0.25


@pytest.mark.parametrize(
    "options", [dict(alpha="0.5"), dict(target_stderr="0.1"), dict(template=3), dict(level_weights=[None] * 9)]
)
def test_values_of_another_type_are_refused_by_name(mini, options):
    with pytest.raises(InputError):
        mini.score(["a"], ["b"], **options)


def test_models_refuse_options_of_another_type():
    with pytest.raises(InputError, match="memory must be a whole number, not '1G'"):
        DiffScorer("mini", memory="1G")
    with pytest.raises(InputError, match="token_budget must be at least 1, not 0"):
        DiffScorer("mini", token_budget=0)
    with pytest.raises(InputError, match="dtype must be a torch.dtype"):
        DiffScorer("mini", dtype="float33")


def test_a_direction_of_weight_zero_does_not_change_the_other(mini):
    options = dict(mask_ratios="uniform", draws=6)
    one = mini.score(["The cat sat on the mat."], ["A cat sat."], **options)
    both = mini.score(["The cat sat on the mat."], ["A cat sat."], direction="bidirectional", alpha=1.0, **options)
    np.testing.assert_allclose(both.scores, one.scores)
    np.testing.assert_allclose(both.profile, one.profile)
