"""Scores of pairs and rankings in the shapes of vLLM and of text-embeddings-inference."""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Discriminator, Field, Tag

from diffscore_fast.scoring.table import ScoreTable
from diffscore_fast.serving.answers import JSONAnswer, RefusedError, number
from diffscore_fast.serving.scores import Strict
from diffscore_fast.serving.service import Service

router = APIRouter()


class ScoreRequest(Strict):
    """vLLM: one text_1 for all text_2, or one each."""

    text_1: str | list[str]
    text_2: str | list[str]
    model: str | None = None


class DocumentsRequest(Strict):
    """vLLM's `/rerank`."""

    query: str
    documents: list[str]
    top_n: Annotated[int, Field(ge=0)] = 0  # 0: all
    model: str | None = None


class TextsRequest(Strict):
    """text-embeddings-inference's `/rerank`."""

    query: str
    texts: list[str]
    raw_scores: bool = False
    return_text: bool = False
    truncate: bool = False


class PredictRequest(Strict):
    """text-embeddings-inference's `/predict`: a text, a pair, or a list of lists of one or two texts."""

    inputs: str | list[str] | list[list[str]]
    raw_scores: bool = False
    truncate: bool = False


def _shape(body: Any) -> str:
    return "texts" if isinstance(body, dict) and "texts" in body else "documents"


RerankRequest = Annotated[
    Annotated[DocumentsRequest, Tag("documents")] | Annotated[TextsRequest, Tag("texts")], Discriminator(_shape)
]


@router.post("/v1/score", summary="Scores of pairs, in vLLM's shape")
@router.post("/score", include_in_schema=False)
async def score(request: Request, asked: ScoreRequest) -> JSONAnswer:
    """S(text_2 | text_1) in nats per token."""
    service: Service = request.app.state.service
    first, second = (item if isinstance(item, list) else [item] for item in (asked.text_1, asked.text_2))
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        raise RefusedError(400, f"{len(first)} texts text_1 and {len(second)} text_2; give one text_1, or one each")
    table = await _scored(service, list(zip(first, second, strict=True)))
    data = [
        {"index": row, "object": "score", "score": number(table.scores[row]), **_failure(table, row)}
        for row in range(len(table))
    ]
    tokens = await _tokens(service, [*first, *second])
    return JSONAnswer(
        {
            "id": f"score-{uuid.uuid4().hex}",
            "object": "list",
            "created": int(time.time()),
            "model": service.scorer.spec.name,
            "data": data,
            "usage": {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens},
        }
    )


@router.post("/rerank", summary="Documents by relevance, in the shapes of vLLM and of text-embeddings-inference")
@router.post("/v1/rerank", include_in_schema=False)
async def rerank(request: Request, asked: RerankRequest) -> JSONAnswer:
    """Query likelihood: S(query | document), the largest first. The same tokens are scored for all documents."""
    service: Service = request.app.state.service
    texts = asked.texts if isinstance(asked, TextsRequest) else asked.documents
    truncate = isinstance(asked, TextsRequest) and asked.truncate
    table = await _scored(service, [(text, asked.query) for text in texts], truncate)
    order = sorted(range(len(texts)), key=lambda row: -math.inf if math.isnan(table.scores[row]) else table.scores[row])
    order.reverse()
    if isinstance(asked, TextsRequest):
        return JSONAnswer(
            [
                {
                    "index": row,
                    "score": _shown(table, row, asked.raw_scores),
                    **({"text": texts[row]} if asked.return_text else {}),
                    **_failure(table, row),
                }
                for row in order
            ]
        )
    results = [
        {
            "index": row,
            "document": {"text": texts[row]},
            "relevance_score": number(table.scores[row]),
            **_failure(table, row),
        }
        for row in order[: asked.top_n or None]
    ]
    tokens = await _tokens(service, [*texts, asked.query])
    return JSONAnswer(
        {
            "id": f"rerank-{uuid.uuid4().hex}",
            "model": service.scorer.spec.name,
            "usage": {"total_tokens": tokens},
            "results": results,
        }
    )


@router.post("/predict", summary="Scores of texts and pairs, in text-embeddings-inference's shape")
async def predict(request: Request, asked: PredictRequest) -> JSONAnswer:
    """S(second | first) of a pair, S(text) of a text alone."""
    service: Service = request.app.state.service
    is_batch = isinstance(asked.inputs, list) and bool(asked.inputs) and isinstance(asked.inputs[0], list)
    items: Any = asked.inputs if is_batch else [asked.inputs if isinstance(asked.inputs, list) else [asked.inputs]]
    sizes = {len(item) for item in items}
    if not sizes <= {1, 2} or len(sizes) > 1:
        raise RefusedError(400, "an input is a text or a pair of texts, and all inputs of a request are of one kind")
    pairs = [(item[0], item[1]) if len(item) == 2 else (None, item[0]) for item in items]
    direction = "conditional" if sizes == {2} else "marginal"
    table = await _scored(service, pairs, asked.truncate, direction)
    found = [
        [{"score": _shown(table, row, asked.raw_scores), "label": direction, **_failure(table, row)}]
        for row in range(len(table))
    ]
    return JSONAnswer(found if is_batch else found[0])


async def _scored(
    service: Service, rows: list[tuple[Any, Any]], truncate: bool = False, direction: str = "conditional"
) -> ScoreTable:
    """Scores of (source, candidate) rows with default options."""
    service.check_rows(len(rows))
    config = service.config(direction=direction, overlength="truncate-source" if truncate else "error")
    table = await service.score(rows, config)
    service.count(table.status, int(table.num_tokens.sum()))
    return table


def _shown(table: ScoreTable, row: int, raw: bool) -> float | None:
    """A score; if it is not asked for raw, its exponential, which lies in [0, 1]."""
    value = number(table.scores[row])
    return value if raw or value is None else math.exp(value)


def _failure(table: ScoreTable, row: int) -> dict[str, str]:
    """Why a row has no score; nothing where it has one."""
    if math.isfinite(table.scores[row]):
        return {}
    return {"status": table.status[row], "message": table.messages[row]}


async def _tokens(service: Service, texts: list[str]) -> int:
    return int((await asyncio.to_thread(service.scorer.count_tokens, texts)).sum())
