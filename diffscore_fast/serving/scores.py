"""`/v1/scores`: rows with sources and candidates in, the same rows with scores out."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from diffscore_fast.options import (
    DEFAULT_AGGREGATE,
    MAX_DRAWS,
    MAX_LEVELS,
    Aggregate,
    AttentionOption,
    Coupling,
    Direction,
    EstimatorName,
    Masking,
    MaskRatios,
    Overlength,
)
from diffscore_fast.scoring.table import ScoreTable
from diffscore_fast.serving.answers import JSONAnswer, RefusedError, number
from diffscore_fast.serving.service import Service
from diffscore_fast.text.templates import TEMPLATES

router = APIRouter()

Text = Annotated[Any, Field(json_schema_extra={"type": ["string", "null"]})]  # what is not text gets a status
Count = Annotated[int, Field(ge=1)]


class Strict(BaseModel):
    """A part of a request: no unknown fields, no values of another type."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Options(Strict):
    """How rows are scored: arguments of `DiffScorer.score`, with its defaults. None names a file or a tagger."""

    direction: Direction | None = None
    draws: Annotated[int, Field(ge=1, le=MAX_DRAWS)] | None = None
    seed: int | None = None
    estimator: EstimatorName | None = None
    mask_ratios: MaskRatios | None = None
    masking: Masking | None = None
    levels: Annotated[int, Field(ge=1, le=MAX_LEVELS)] | None = None
    replicates: Count | None = None
    coupling: Coupling | None = None
    target_stderr: float | None = None
    max_draws: Annotated[int, Field(ge=1, le=MAX_DRAWS)] | None = None
    level_weights: Annotated[list[float], Field(max_length=MAX_LEVELS)] | None = None
    length_normalised: bool | None = None
    alpha: float | None = None
    attention: AttentionOption | None = None
    block_size: Count | None = None
    full_draws: Count | Literal["auto"] | None = None
    overlength: Overlength | None = None
    template: Literal[tuple(TEMPLATES)] | None = None  # type: ignore[valid-type]
    aggregate: Aggregate | None = None

    def given(self) -> dict[str, Any]:
        """The options that the request names."""
        return self.model_dump(exclude_none=True)


class Row(Strict):
    """A row: a candidate with its source, or with references in the source's place."""

    candidate: Text = None
    source: Text = None
    references: list[Text] | None = None
    item: Annotated[Any, Field(json_schema_extra={"type": ["string", "integer", "null"]})] = None


class ScoresRequest(Strict):
    """Rows, and how they are scored."""

    rows: list[Row]
    options: Options = Options()
    token_scores: bool = False
    profile: bool = False


@router.post("/v1/scores", summary="Scores of rows")
async def scores(request: Request, asked: ScoresRequest) -> JSONAnswer:
    """Scores in nats per token, closer to 0 is better; one result per row, in order, each with a status."""
    service: Service = request.app.state.service
    service.check_rows(len(asked.rows))
    with_references = _all_or_none(asked.rows, "references")
    with_items = _all_or_none(asked.rows, "item")
    if with_references and any(row.source is not None for row in asked.rows):
        raise RefusedError(400, "references take the place of sources; give rows one of the two")
    options = asked.options.given()
    if with_references:
        options.setdefault("aggregate", DEFAULT_AGGREGATE)
    elif "aggregate" in options:
        raise RefusedError(400, "aggregate belongs to rows with references")
    config = service.config(**options, masks_by_item=with_items, token_scores=asked.token_scores)
    rows: list[tuple[Any, ...]] = []
    for row in asked.rows:
        read = row.references if with_references else row.source
        rows.append((read, row.candidate, row.item) if with_items else (read, row.candidate))
    table = await service.score(rows, config)
    service.count(table.status, int(table.num_tokens.sum()))
    answer: dict[str, Any] = {
        "kind": table.kind,
        "unit": "nats per token",
        "signature": str(table.signature),
        "results": [row_of(table, row, profile=asked.profile) for row in range(len(table))],
    }
    if asked.profile:
        answer["profile_ratios"] = [number(ratio) for ratio in table.profile_ratios]
    return JSONAnswer(answer)


def row_of(table: ScoreTable, row: int, *, profile: bool = False) -> dict[str, Any]:
    """A row of a table as JSON has it."""
    found: dict[str, Any] = {
        "score": number(table.scores[row]),
        "stderr": number(table.stderr[row]),
        "tokens": int(table.num_tokens[row]),
        "draws": int(table.num_draws[row]),
        "status": table.status[row],
    }
    if table.messages[row]:
        found["message"] = table.messages[row]
    if table.truncated_tokens[row]:
        found["truncated_tokens"] = int(table.truncated_tokens[row])
    if table.reference is not None:
        chosen = int(table.reference[row])
        found["reference"] = chosen if chosen >= 0 else None
    if profile:
        found["profile"] = [number(value) for value in table.profile[row]]
    if table.tokens is not None:
        first, last = (int(table.tokens.offsets[row + place]) for place in (0, 1))
        spans = table.tokens.spans[first:last].tolist()
        values = table.tokens.log_probs[first:last].tolist()
        found["token_scores"] = [
            {"start": start, "end": end, "score": number(value)}
            for (start, end), value in zip(spans, values, strict=True)
        ]
    return found


def _all_or_none(rows: list[Row], name: str) -> bool:
    """Whether rows have a field; all of them must, or none."""
    having = sum(name in row.model_fields_set for row in rows)
    if having not in (0, len(rows)):
        raise RefusedError(400, f"{having} of {len(rows)} rows have the field {name}; give it in all rows, or in none")
    return having > 0
