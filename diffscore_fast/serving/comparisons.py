"""`/v1/compare`: two systems on the same sources."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import Field

from diffscore_fast.errors import DiffScoreError
from diffscore_fast.options import DEFAULT_CONFIDENCE, DEFAULT_RESAMPLES, DEFAULT_SEED
from diffscore_fast.scoring.compare import compare
from diffscore_fast.serving.answers import JSONAnswer, RefusedError, number
from diffscore_fast.serving.scores import Options, Strict, Text
from diffscore_fast.serving.service import Service

router = APIRouter()
MAX_RESAMPLED_VALUES = 50_000_000  # resamples times rows: a second or two, which cannot be stopped


class CompareRequest(Strict):
    """Outputs of two systems; row i of both has the source of row i."""

    a: list[Text]
    b: list[Text]
    sources: list[Text] | None = None
    options: Options = Options()
    resamples: Annotated[int, Field(ge=1)] = DEFAULT_RESAMPLES
    confidence: float = DEFAULT_CONFIDENCE
    seed: int = DEFAULT_SEED


@router.post("/v1/compare", summary="Two systems on the same sources")
async def compare_systems(request: Request, asked: CompareRequest) -> JSONAnswer:
    """Mean difference a - b with its paired bootstrap interval, and the p-value of a paired permutation test."""
    service: Service = request.app.state.service
    count = len(asked.a)
    service.check_rows(2 * count)
    options = asked.options.given()
    if "aggregate" in options:
        raise RefusedError(400, "a comparison has no references")
    # As `diffscore compare`: outputs for one source share their masks, or where none is read those of one row.
    config = service.config(**options, masks_by_item=True)
    sources = asked.sources if config.needs_source else [None] * count
    if sources is None:
        raise RefusedError(400, f"direction {config.direction!r} reads sources; give one per row")
    if not len(sources) == len(asked.b) == count:
        raise RefusedError(
            400, f"{len(sources)} sources, {count} outputs of a and {len(asked.b)} of b; give equal numbers"
        )
    if asked.resamples * count > MAX_RESAMPLED_VALUES:
        raise RefusedError(
            413, f"{asked.resamples:,} resamples of {count:,} rows are too many; ask for fewer resamples"
        )
    items = sources if config.needs_source else list(range(count))
    table = await service.score(
        [*zip(sources, asked.a, items, strict=True), *zip(sources, asked.b, items, strict=True)], config
    )
    service.count(table.status, int(table.num_tokens.sum()))
    a, b = table.take(range(count)), table.take(range(count, 2 * count))
    try:
        found = await asyncio.to_thread(
            compare, a, b, resamples=asked.resamples, confidence=asked.confidence, seed=asked.seed
        )
    except DiffScoreError as error:
        raise RefusedError(400, str(error)) from None
    scores = [
        {name: {"score": number(side.scores[row]), "status": side.status[row]} for name, side in (("a", a), ("b", b))}
        for row in range(count)
    ]
    return JSONAnswer(
        {"signature": str(table.signature), "unit": "nats per token", **found.to_dict(), "results": scores}
    )
