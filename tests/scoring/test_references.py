"""Several references per candidate, against the score of each reference alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from diffscore_fast.errors import InputError
from diffscore_fast.scoring.references import aggregate, expand

CANDIDATES = ["A cat sat.", "It rained.", "Birds sing."]
REFERENCES = [["The cat sat on the mat.", "A dog ran."], "It rained all day.", ["Birds sang.", "Snow fell.", "Birds."]]
FEW = dict(draws=1, levels=3)


def one_by_one(mini, **options):
    """A table for each row, with one pair per reference."""
    lists = [[item] if isinstance(item, str) else item for item in REFERENCES]
    return [
        mini.score(items, [candidate] * len(items), **options)
        for items, candidate in zip(lists, CANDIDATES, strict=True)
    ]


@pytest.mark.parametrize("direction", ["conditional", "reverse", "bidirectional", "pmi"])
def test_max_and_mean_are_those_of_the_single_scores(mini, direction):
    apart = one_by_one(mini, direction=direction, **FEW)
    best = mini.score(None, CANDIDATES, references=REFERENCES, direction=direction, **FEW)
    np.testing.assert_allclose(best.scores, [item.scores.max() for item in apart], atol=1e-5)
    assert best.reference.tolist() == [int(item.scores.argmax()) for item in apart]
    assert best.num_tokens.tolist() == [int(item.num_tokens[item.scores.argmax()]) for item in apart]
    mean = mini.score(None, CANDIDATES, references=REFERENCES, aggregate="mean", direction=direction, **FEW)
    np.testing.assert_allclose(mean.scores, [item.scores.mean() for item in apart], atol=1e-5)
    np.testing.assert_allclose(mean.profile, [item.profile.mean(axis=0) for item in apart], atol=1e-5)
    assert mean.reference is None and np.isnan(mean.nats).all()
    assert (best.signature.aggregate, mean.signature.aggregate) == ("max", "mean")
    assert best.status == mean.status == ["ok"] * 3


def test_token_scores_are_those_of_the_best_or_the_mean(mini):
    options = dict(direction="conditional", token_scores=True, draws=4, mask_ratios="uniform")
    apart = one_by_one(mini, **options)
    best = mini.score(None, CANDIDATES, references=REFERENCES, **options)
    mean = mini.score(None, CANDIDATES, references=REFERENCES, aggregate="mean", **options)
    for row, table in enumerate(apart):
        values = table.tokens.log_probs.reshape(len(table), -1)
        owned = slice(best.tokens.offsets[row], best.tokens.offsets[row + 1])
        np.testing.assert_allclose(best.tokens.log_probs[owned], values[table.scores.argmax()], atol=1e-5)
        np.testing.assert_allclose(mean.tokens.log_probs[owned], values.mean(axis=0), atol=1e-5)
        spans = [CANDIDATES[row][start:end] for start, end in mean.tokens.spans[owned]]
        assert "".join(spans) == CANDIDATES[row].replace(" ", "")
    with pytest.raises(InputError, match="use max"):
        mini.score(None, CANDIDATES, references=REFERENCES, aggregate="mean", direction="reverse", token_scores=True)


def test_a_mean_counts_the_draws_and_the_cuts_of_all_its_references(mini, monkeypatch):
    """Independent of which scored best: one is enumerated, one is cut."""
    patterns = {name: replace(item, position_limit=40) for name, item in mini.spec.patterns.items()}
    monkeypatch.setattr(mini, "spec", replace(mini.spec, patterns=patterns))
    both = ["Cat.", "A cat was sitting on the mat."]
    for references in (both, both[::-1]):
        table = mini.score(None, ["A cat."], references=[references], aggregate="mean", direction="reverse", draws=8)
        assert table.num_draws.tolist() == [8]
    for aggregate_by in ("max", "mean"):
        table = mini.score(
            None,
            ["A cat."],
            references=[["A cat.", "word " * 42]],
            aggregate=aggregate_by,
            draws=1,
            overlength="truncate-source",
        )
        assert table.status == ["truncated_source"] and "reference 1: the last 3" in table.messages[0]


def test_equal_pairs_are_evaluated_once(mini):
    """Each distinct pair is evaluated once; the marginal side of pmi once per candidate, whatever its references."""

    def evaluated(references, direction):
        counts = []
        mini.score(None, [CANDIDATES[0]], references=[references], direction=direction, progress=counts.append, **FEW)
        return sum(counts)

    one, other = "The cat sat on the mat.", "A dog ran."
    assert evaluated([one, one], "reverse") == evaluated([one], "reverse")
    assert evaluated([one, other], "conditional") == 2 * evaluated([one], "conditional")
    assert evaluated([one, other], "pmi") == 3 * evaluated([one], "conditional")


def test_a_bad_reference_leaves_the_others(mini):
    good = REFERENCES[0][0]
    rows = [
        (
            [None, good, "", 3],
            "skipped_reference",
            "reference 0: the reference is missing; reference 2: the reference "
            "has no tokens; reference 3: the reference is a number, not text",
        ),
        ([""], "empty_source", "the reference has no tokens"),
        ([], "missing", "the reference is missing"),
        (None, "missing", "the reference is missing"),
        ([["nested"]], "invalid_text", "the reference is a list, not text"),
        (["word " * 2100, good], "skipped_reference", "reference 0: the reference has 2100 tokens, there is room"),
        ([good], "ok", ""),
    ]
    references = [row[0] for row in rows]
    for how in ("max", "mean"):
        table = mini.score(None, [CANDIDATES[0]] * len(rows), references=references, aggregate=how, **FEW)
        assert table.status == [row[1] for row in rows]
        assert all(message.startswith(row[2]) for message, row in zip(table.messages, rows, strict=True))
        scored = np.array([state in ("ok", "skipped_reference") for state in table.status])
        np.testing.assert_allclose(table.scores[scored], table.scores[-1], atol=1e-5)
        assert np.isnan(table.scores[~scored]).all() and (table.num_tokens[~scored] == 0).all()
        if how == "max":
            assert table.reference.tolist() == [1, -1, -1, -1, -1, 1, 0]
    bad_candidate = mini.score(None, [None], references=[["x", "y"]], **FEW)
    assert bad_candidate.status == ["missing"] and bad_candidate.messages == ["the candidate is missing"]


def test_chunks_are_cut_between_rows_not_references(mini, monkeypatch):
    from diffscore_fast.scoring import scorer

    together = mini.score(None, CANDIDATES, references=REFERENCES, **FEW)
    monkeypatch.setattr(scorer, "TOKENS_CHUNK", 1)
    apart = mini.score(None, CANDIDATES, references=REFERENCES, **FEW)
    np.testing.assert_allclose(apart.scores, together.scores, atol=1e-5)
    assert apart.reference.tolist() == together.reference.tolist()
    assert len(mini.score(None, [], references=[], **FEW)) == 0


@pytest.mark.parametrize(
    ("direction", "texts", "expected"),
    [
        ("reverse", ["r", "s"], 0.25),  # sqrt(0.3^2 + 0.4^2) / 2: masks of their own
        ("reverse", ["r", "r"], 0.35),  # one text, one set of masks: the errors move together
        ("reverse", ["r", " r"], 0.35),  # texts of equal tokens as well
        ("conditional", ["r", "s"], 0.35),
    ],
)
def test_the_error_of_a_mean_counts_the_masks_that_are_shared(mini, direction, texts, expected):
    table = mini.score(texts, ["c", "c"], direction=direction, **FEW)
    errors = [0.35, 0.35] if texts[0] == texts[1].strip() else [0.3, 0.4]  # equal tokens have equal errors
    table = replace(table, stderr=np.array(errors))
    _, offsets = expand([(texts, "c")])
    assert aggregate(table, offsets, "mean").stderr.tolist() == pytest.approx([expected])
    best = aggregate(table, offsets, "max")
    assert best.stderr.tolist() == [table.stderr[table.scores.argmax()]]


def test_the_error_of_a_mean_in_reverse_covers_the_spread_over_seeds(mini):
    scores, errors = [], []
    for seed in range(36):
        table = mini.score(
            None,
            ["It rained."],
            references=[["It rained all day.", "Rain fell."]],
            aggregate="mean",
            direction="reverse",
            draws=8,
            mask_ratios="uniform",
            seed=seed,
        )
        scores.append(table.scores[0])
        errors.append(table.stderr[0])
    # The ratio of two estimates from 36 samples lies within 0.35 of 1 with probability above 0.99.
    assert np.sqrt(np.mean(np.square(errors))) == pytest.approx(np.std(scores, ddof=1), rel=0.35)


def test_the_maximum_of_lower_bounds_is_no_lower_bound(mini):
    options = dict(references=[["a", "b"]], estimator="elbo", mask_ratios="uniform", draws=2)
    assert mini.score(None, ["c"], **options).kind == "maximum of lower bounds"
    assert mini.score(None, ["c"], aggregate="mean", **options).kind == "lower bound"


@pytest.mark.parametrize(
    ("sources", "references", "options", "message"),
    [
        (["s"], [["r"]], {}, "references take the place of sources"),
        (None, [["r"], ["r"]], {}, "2 lists of references but 1 candidates"),
        (None, "r", {}, "references is one string"),
        (None, [["r"]], {"direction": "marginal"}, "marginal reads no references"),
        (None, [["r"]], {"aggregate": "median"}, "aggregate 'median' is unknown; use max, mean"),
    ],
)
def test_wrong_use_is_refused(mini, sources, references, options, message):
    with pytest.raises(InputError, match=message):
        mini.score(sources, ["c"], references=references, **options)


def test_a_cut_and_a_skipped_reference_are_both_in_the_message(mini):
    long = "word " * 3000
    table = mini.score(
        None,
        ["A dog ran."],
        references=[[None, long, "A dog ran home."]],
        aggregate="max",
        overlength="truncate-source",
        **FEW,
    )
    assert table.status == ["skipped_reference"]
    assert "reference 0: the reference is missing" in table.messages[0]
    assert "reference 1: the last " in table.messages[0] and "were cut" in table.messages[0]
