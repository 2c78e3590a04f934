"""`/v1/bounds` and `/v1/compare`: the numbers of the Python calls."""

from __future__ import annotations

import pytest

from diffscore_fast import LikelihoodBounds
from diffscore_fast.scoring.compare import compare
from diffscore_fast.serving.settings import Limits, Settings
from tests.support.service import post

TEXTS = ["The cat sat on the mat.", "", "It rained all day in Puerto Rico."]
SOURCES = ["The cat sat on the mat.", "It rained all day.", "Nobody came."]
A, B = ["A cat sat.", "It rained.", None], ["A dog sat.", "Rained it.", "Nobody."]


def test_exact_values_are_those_of_the_python_call(mini):
    table = LikelihoodBounds("mini", block_size=4).exact(TEXTS, autoregressive=True)
    answer = post(mini, "/v1/bounds", {"texts": TEXTS, "block_size": 4, "autoregressive": True}).json()
    assert answer["kind"] == "exact"
    assert answer["signature"] == str(table.signature)
    for row in (0, 2):
        found = answer["results"][row]
        assert found["exact"] == found["lower"] == found["upper"] == table.exact[row]
        assert found["autoregressive"] == table.autoregressive[row]
        assert found["tokens"] == table.num_tokens[row]
    assert answer["results"][1]["exact"] is None
    assert answer["results"][1]["status"] == "empty_text"


def test_bounds_are_those_of_the_python_call(mini):
    sampling = {"orders": 8, "surrogate_orders": 8, "seed": 3, "design": "antithetic"}
    table = LikelihoodBounds("mini", block_size=8).estimate(TEXTS, generation="parallel", steps=4, **sampling)
    body = {"texts": TEXTS, "generation": "parallel", "steps": 4, "sampling": sampling, "z": 2.0}
    answer = post(mini, "/v1/bounds", body).json()
    low, high = table.interval(2.0)
    for row in (0, 2):
        found = answer["results"][row]
        assert (found["lower"], found["upper"]) == (table.lower[row], table.upper[row])
        assert found["interval"] == [low[row], high[row]]
    assert answer["results"][1]["interval"] == [None, None]


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({"block_size": 3}, 400, "block size 3"),
        ({"block_size": 16, "method": "exact"}, 400, "states per block"),
        ({"method": "exact", "sampling": {"orders": 4}}, 400, "sampled orders"),
        ({"generation": "parallel"}, 400, "steps"),
        ({"z": 100.0}, 400, "z"),
        ({"sampling": {"surrogate": "os.system"}}, 422, "sampling.surrogate"),
        ({"sampling": {"orders": 100_000}}, 413, "tokens"),
    ],
)
def test_bounds_that_cannot_be_had_are_refused(mini, change, status, words):
    answer = post(mini, "/v1/bounds", {"texts": TEXTS, **change}, Settings(limits=Limits(tokens=100_000)))
    assert answer.status_code == status
    assert words in answer.json()["error"]["message"]


def test_a_comparison_is_that_of_the_python_call(mini):
    a, b = (mini.score(SOURCES, texts, items=SOURCES, draws=3) for texts in (A, B))
    expected = compare(a, b, resamples=200, seed=5)
    body = {"sources": SOURCES, "a": A, "b": B, "options": {"draws": 3}, "resamples": 200, "seed": 5}
    answer = post(mini, "/v1/compare", body).json()
    for name, value in expected.to_dict().items():
        assert answer[name] == value
    assert answer["excluded"] == {"A: missing": 1}
    assert [row["a"]["score"] for row in answer["results"]] == [*a.scores[:2].tolist(), None]
    assert answer["signature"] == str(a.signature)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"a": A, "b": B}, 400),
        ({"a": A, "b": B[:2], "sources": SOURCES}, 400),
        ({"a": [], "b": [], "sources": []}, 400),
        ({"a": A, "b": B, "sources": SOURCES, "resamples": 50_000_000}, 413),
        ({"a": A, "b": B, "sources": SOURCES, "confidence": 2.0}, 400),
    ],
)
def test_comparisons_that_cannot_be_made_are_refused(mini, body, status):
    assert post(mini, "/v1/compare", body).status_code == status


def test_a_comparison_without_sources_shares_masks_within_rows(mini):
    answer = post(mini, "/v1/compare", {"a": A[:2], "b": A[:2], "options": {"direction": "marginal"}, "resamples": 9})
    assert answer.json()["difference"] == 0
