"""What all adapters stand on."""

from __future__ import annotations

import math
import pickle

import pytest

from diffscore_fast import DiffScorer
from diffscore_fast.errors import InputError
from diffscore_fast.integrations.rows import RowScorer, check_has_unit_interval, unit_interval

SOURCES = ["The cat sat on the mat.", "It rained all day.", "Something."]
CANDIDATES = ["A cat sat.", "", "word " * 3000]


def test_scores_are_those_of_the_scorer_and_rows_without_one_say_why():
    rows = RowScorer(draws=2)(CANDIDATES, SOURCES)
    table = DiffScorer("mini").score(SOURCES, CANDIDATES, draws=2)
    assert rows[0].score == table.scores[0] and rows[0].reason == "ok"
    assert [row.score for row in rows[1:]] == [None, None] and [row.stderr for row in rows[1:]] == [None, None]
    assert rows[1].reason == "empty_candidate: the candidate has no tokens" and rows[2].status == "too_long"


def test_one_list_among_the_contexts_makes_all_references():
    scorer = RowScorer(draws=2)
    rows = scorer(["A cat sat.", "It rained."], [["A dog ran.", "The cat sat."], "It rained all day."])
    table = DiffScorer("mini").score(
        None, ["A cat sat.", "It rained."], references=[["A dog ran.", "The cat sat."], ["It rained all day."]], draws=2
    )
    assert [row.score for row in rows] == table.scores.tolist()


def test_wrong_columns_are_refused():
    scorer = RowScorer(draws=1)
    with pytest.raises(InputError, match="2 candidates but 1 contexts"):
        scorer(["a", "b"], ["a"])
    with pytest.raises(InputError, match="candidates is a single text"):
        scorer("a", ["a"])
    with pytest.raises(InputError, match="no option 'draw'"):
        RowScorer(draw=1)


def test_a_scorer_is_pickled_without_its_model():
    scorer = RowScorer(draws=2)
    before = scorer(["A cat sat."], ["The cat sat."])
    stored = pickle.dumps(scorer)
    assert len(stored) < 2000 and pickle.loads(stored)(["A cat sat."], ["The cat sat."]) == before


def test_the_unit_interval_keeps_order_and_refuses_differences():
    assert unit_interval(0.0) == 1 and unit_interval(-2.0) == math.exp(-2) and unit_interval(1e-9) == 1
    check_has_unit_interval("reverse")
    with pytest.raises(InputError, match="pmi"):
        check_has_unit_interval("pmi")
