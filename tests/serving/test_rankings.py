"""Scores and rankings in the shapes that clients of vLLM and text-embeddings-inference send and read."""

from __future__ import annotations

import math

import pytest

from tests.support.service import post

QUERY = "A ship in Puerto Rico."
DOCUMENTS = [
    "The weather was fine on Thursday.",
    "Two passengers were found dead on a cruise ship in Puerto Rico on Thursday, officials said.",
    "A cat sat on the mat.",
]


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
def test_pairs_in_the_shape_of_vllm(mini, path):
    expected = mini.score([QUERY] * 3, DOCUMENTS).scores
    one_to_many = post(mini, path, {"model": "mini", "text_1": QUERY, "text_2": DOCUMENTS}).json()
    assert [item["score"] for item in one_to_many["data"]] == expected.tolist()
    assert [item["index"] for item in one_to_many["data"]] == [0, 1, 2]
    assert one_to_many["usage"]["prompt_tokens"] == int(mini.count_tokens([QUERY] * 3 + DOCUMENTS).sum())
    one_to_one = post(mini, path, {"text_1": QUERY, "text_2": DOCUMENTS[1]}).json()
    assert [item["score"] for item in one_to_one["data"]] == [expected[1]]
    many_to_many = post(mini, path, {"text_1": DOCUMENTS[:2], "text_2": DOCUMENTS[1:]}).json()
    assert [item["score"] for item in many_to_many["data"]] == mini.score(DOCUMENTS[:2], DOCUMENTS[1:]).scores.tolist()
    assert post(mini, path, {"text_1": DOCUMENTS[:2], "text_2": DOCUMENTS}).status_code == 400


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank"])
def test_a_ranking_in_the_shape_of_vllm(mini, path):
    expected = mini.score(DOCUMENTS, [QUERY] * 3).scores
    answer = post(mini, path, {"model": "mini", "query": QUERY, "documents": DOCUMENTS, "top_n": 2}).json()
    order = sorted(range(3), key=lambda row: -expected[row])[:2]
    assert [item["index"] for item in answer["results"]] == order
    assert [item["relevance_score"] for item in answer["results"]] == [expected[row] for row in order]
    assert answer["results"][0]["document"]["text"] == DOCUMENTS[order[0]]
    assert order[0] == 1
    everything = post(mini, path, {"query": QUERY, "documents": DOCUMENTS}).json()
    assert len(everything["results"]) == 3


def test_a_ranking_in_the_shape_of_text_embeddings_inference(mini):
    expected = mini.score(DOCUMENTS, [QUERY] * 3).scores
    order = sorted(range(3), key=lambda row: -expected[row])
    raw = post(mini, "/rerank", {"query": QUERY, "texts": DOCUMENTS, "raw_scores": True}).json()
    assert raw == [{"index": row, "score": expected[row]} for row in order]
    shown = post(mini, "/rerank", {"query": QUERY, "texts": DOCUMENTS, "return_text": True, "truncate": True}).json()
    assert shown == [{"index": row, "score": math.exp(expected[row]), "text": DOCUMENTS[row]} for row in order]
    assert all(0 < item["score"] <= 1 for item in shown)


def test_a_document_without_a_score_comes_last_and_is_null(mini):
    answer = post(mini, "/rerank", {"query": QUERY, "texts": ["", *DOCUMENTS]}).json()
    assert (answer[-1]["index"], answer[-1]["score"], answer[-1]["status"]) == (0, None, "empty_source")
    answer = post(mini, "/rerank", {"query": QUERY, "documents": ["", DOCUMENTS[0]]}).json()
    assert answer["results"][-1]["relevance_score"] is None


def test_predictions_in_the_shape_of_text_embeddings_inference(mini):
    marginal = mini.score(None, DOCUMENTS, direction="marginal").scores
    pair = mini.score([QUERY], [DOCUMENTS[1]]).scores[0]
    alone = post(mini, "/predict", {"inputs": DOCUMENTS[0], "raw_scores": True}).json()
    assert alone == [{"score": marginal[0], "label": "marginal"}]
    assert post(mini, "/predict", {"inputs": [QUERY, DOCUMENTS[1]], "raw_scores": True}).json()[0]["score"] == pair
    batch = post(mini, "/predict", {"inputs": [[text] for text in DOCUMENTS], "raw_scores": True}).json()
    assert [item[0]["score"] for item in batch] == marginal.tolist()
    assert post(mini, "/predict", {"inputs": [[QUERY, DOCUMENTS[1]]]}).json()[0][0]["score"] == math.exp(pair)
    for wrong in ([], [["a", "b", "c"]], [["a"], ["a", "b"]], [[]]):
        assert post(mini, "/predict", {"inputs": wrong}).status_code == 400


@pytest.mark.parametrize("field", ["documents", "texts"])
def test_the_fields_of_the_other_shape_are_refused(mini, field):
    body = {"query": QUERY, field: DOCUMENTS, "top_n" if field == "texts" else "raw_scores": 1}
    assert post(mini, "/rerank", body).status_code == 422
    assert post(mini, "/rerank", {"query": QUERY, field: []}).status_code == 400
