"""`/v1/scores`: the numbers of `DiffScorer`, whoever else asks at the same time."""

from __future__ import annotations

import asyncio
import json
import random

import pytest
from httpx import AsyncClient

from diffscore_fast.serving.guard import Guard
from diffscore_fast.serving.settings import Limits, Settings
from tests.support.service import JSON, get, post, running

SOURCE = "Two passengers were found dead on a cruise ship in Puerto Rico on Thursday, officials said."
CANDIDATES = [
    "Two people were found dead on a cruise ship.",
    "Three passengers were rescued from a cruise ship.",
    "The weather was fine on Thursday.",
    "Dead.",
]


def rows_of(candidates: list[str]) -> list[dict[str, str]]:
    return [{"source": SOURCE, "candidate": candidate} for candidate in candidates]


def test_scores_are_those_of_the_scorer(mini):
    table = mini.score([SOURCE] * 4, CANDIDATES, draws=5, token_scores=True)
    body = {"rows": rows_of(CANDIDATES), "options": {"draws": 5}, "token_scores": True, "profile": True}
    answer = post(mini, "/v1/scores", body).json()
    assert [row["score"] for row in answer["results"]] == table.scores.tolist()
    assert [row["status"] for row in answer["results"]] == table.status
    assert answer["signature"] == str(table.signature)
    assert answer["profile_ratios"] == table.profile_ratios.tolist()
    assert len(answer["results"][0]["profile"]) == len(table.profile_ratios)
    tokens = answer["results"][0]["token_scores"]
    assert [item["score"] for item in tokens] == table.tokens.log_probs[: len(tokens)].tolist()
    assert CANDIDATES[0][tokens[1]["start"] : tokens[1]["end"]] == "people"


def test_references_and_items_are_those_of_the_scorer(mini):
    references = [[SOURCE, "It rained."], ["A ship.", CANDIDATES[0]]]
    table = mini.score(None, CANDIDATES[:2], references=references, items=["a", 7], draws=2)
    rows = [
        {"candidate": candidate, "references": given, "item": item}
        for candidate, given, item in zip(CANDIDATES[:2], references, ["a", 7], strict=True)
    ]
    answer = post(mini, "/v1/scores", {"rows": rows, "options": {"draws": 2}}).json()
    assert [row["score"] for row in answer["results"]] == table.scores.tolist()
    assert [row["reference"] for row in answer["results"]] == table.reference.tolist()
    assert answer["signature"] == str(table.signature)


def test_a_row_without_a_score_is_null_with_its_status(mini):
    rows = [
        {"source": SOURCE, "candidate": None},
        {"source": 3, "candidate": "A."},
        {"source": "a", "candidate": "\ud800"},
    ]
    answer = post(mini, "/v1/scores", {"rows": rows, "options": {"draws": 1}})
    assert answer.status_code == 200
    assert [row["status"] for row in answer.json()["results"]] == ["missing", "invalid_text", "invalid_text"]
    assert [row["score"] for row in answer.json()["results"]] == [None] * 3
    assert "NaN" not in answer.text


def test_scores_under_load_equal_scores_alone_bit_for_bit(mini):
    """Many clients with rows of many lengths and three configurations at once."""
    generator = random.Random(7)
    words = SOURCE.split()
    asked = []
    for _ in range(40):
        rows = [
            {
                "source": " ".join(generator.choices(words, k=generator.randint(1, 30))),
                "candidate": " ".join(generator.choices(words, k=generator.randint(1, 12))),
            }
            for _ in range(generator.randint(1, 5))
        ]
        options = generator.choice([{"draws": 2}, {"draws": 3, "direction": "pmi"}, {"draws": 2, "attention": "full"}])
        asked.append((rows, options))

    async def use(client: AsyncClient, app: Guard) -> tuple[list[list[float]], str]:
        async def ask(rows: list[dict[str, str]], options: dict) -> list[float]:
            await asyncio.sleep(generator.random() / 20)
            answer = await client.post("/v1/scores", json={"rows": rows, "options": options})
            return [row["score"] for row in answer.json()["results"]]

        scores = await asyncio.gather(*(ask(*item) for item in asked))
        text = (await client.get("/metrics")).text
        return scores, text

    found, metrics = running(mini, Settings(batch_tokens=3000), use)
    for (rows, options), scores in zip(asked, found, strict=True):
        for row, score in zip(rows, scores, strict=True):
            alone = mini.score([row["source"]], [row["candidate"]], **options)
            assert score == alone.scores[0]
    batches = float(
        next(line for line in metrics.splitlines() if line.startswith("diffscore_batch_rows_count")).split()[1]
    )
    assert batches < len(asked)  # requests did meet


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"rows": []}, 400, "no rows"),
        ({"rows": rows_of(["a"]), "file": "/etc/passwd"}, 422, "file"),
        ({"rows": rows_of(["a"]), "options": {"template": "/etc/template.toml"}}, 422, "options.template"),
        ({"rows": rows_of(["a"]), "options": {"tagger": "en_core_web_sm"}}, 422, "options.tagger"),
        ({"rows": rows_of(["a"]), "options": {"model": "other"}}, 422, "options.model"),
        ({"rows": rows_of(["a"]), "options": {"draws": "8"}}, 422, "options.draws"),
        ({"rows": rows_of(["a"]), "options": {"alpha": 2.0}}, 400, "alpha"),
        ({"rows": rows_of(["a"]), "options": {"block_size": 3}}, 400, "block size 3"),
        ({"rows": [*rows_of(["a"]), {"candidate": "a", "references": ["b"]}]}, 400, "in all rows"),
        (b'{"rows": [{"candidate": "a"}], "options": {"alpha": NaN}}', 422, "finite"),
        (b"{", 422, "JSON"),
        (b"[" * 100_000, 400, "parsing"),
        (b'"\xff"', 400, "parsing"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(mini, body, status, words):
    answer = post(mini, "/v1/scores", body)
    assert answer.status_code == status
    assert words in answer.json()["error"]["message"]


def test_a_refusal_repeats_no_value_of_the_request(mini):
    answer = post(
        mini,
        "/v1/scores",
        {"rows": [{"candidate": "a", "source": "b", "secret words": 1}], "options": {"seed": "hidden"}},
    )
    assert answer.status_code == 422
    assert "hidden" not in answer.text


def test_limits_on_rows_and_tokens_count_draws(mini):
    limits = Settings(limits=Limits(rows=2, tokens=2000))
    assert post(mini, "/v1/scores", {"rows": rows_of(["a"] * 3)}, limits).status_code == 413
    assert post(mini, "/v1/scores", {"rows": rows_of(["a b c d e"])}, limits).status_code == 200
    answer = post(mini, "/v1/scores", {"rows": rows_of(["a b c d e"]), "options": {"draws": 2000}}, limits)
    assert answer.status_code == 413
    assert "draws" in answer.json()["error"]["message"]


def test_metrics_count_requests_rows_and_tokens(mini):
    async def use(client: AsyncClient, app: Guard) -> str:
        rows = [*rows_of(CANDIDATES[:2]), {"source": SOURCE, "candidate": ""}]
        answer = await client.post(
            "/v1/scores", content=json.dumps({"rows": rows, "options": {"draws": 1}}), headers=JSON
        )
        counted.append(sum(row["tokens"] for row in answer.json()["results"]))
        await client.get("/a/path/of/the/client")
        return (await client.get("/metrics")).text

    counted: list[int] = []
    lines = running(mini, Settings(), use).splitlines()
    assert 'diffscore_requests_total{path="/v1/scores",status="200"} 1.0' in lines
    assert 'diffscore_requests_total{path="other",status="404"} 1.0' in lines
    assert 'diffscore_rows_total{status="ok"} 2.0' in lines
    assert 'diffscore_rows_total{status="empty_candidate"} 1.0' in lines
    assert f"diffscore_tokens_total {float(counted[0])}" in lines
    assert "diffscore_queue_requests 0.0" in lines


def test_info_has_the_signature_of_the_default_options(mini):
    assert get(mini, "/info").json()["signature"] == str(mini.score([], []).signature)
