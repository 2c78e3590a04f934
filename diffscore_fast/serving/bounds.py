"""`/v1/bounds`: bounds on the log-likelihood of texts, or their exact values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field

from diffscore_fast.bounds.config import BoundsConfig, check_lattice, make_generation
from diffscore_fast.bounds.intervals import checked_z
from diffscore_fast.bounds.likelihood import LikelihoodBounds
from diffscore_fast.bounds.table import BoundsTable
from diffscore_fast.errors import DiffScoreError
from diffscore_fast.options import (
    DEFAULT_BLOCK_SIZE,
    DEFAULT_GENERATION,
    DEFAULT_METHOD,
    DEFAULT_Z,
    MAX_AUTO_EXACT_BLOCK_SIZE,
    MAX_ORDERS,
    GenerationName,
    Method,
    OrderDesign,
    SurrogateName,
)
from diffscore_fast.serving.answers import JSONAnswer, RefusedError, number
from diffscore_fast.serving.scores import Count, Strict, Text
from diffscore_fast.serving.service import Service

router = APIRouter()
Orders = Annotated[int, Field(ge=1, le=MAX_ORDERS)]


class Sampling(Strict):
    """Options of sampled orders: arguments of `LikelihoodBounds.estimate`, with its defaults."""

    orders: Orders | None = None
    surrogate_orders: Orders | None = None
    surrogate: SurrogateName | None = None
    cross_fitted: bool | None = None
    folds: Count | None = None
    design: OrderDesign | None = None
    seed: int | None = None


class BoundsRequest(Strict):
    """Texts, and how they are bounded."""

    texts: list[Text]
    block_size: Count = DEFAULT_BLOCK_SIZE
    method: Method = DEFAULT_METHOD
    generation: GenerationName = DEFAULT_GENERATION
    steps: Count | None = None
    sampling: Sampling = Sampling()
    autoregressive: bool = False
    z: float = DEFAULT_Z


@dataclass(frozen=True)
class BoundsWork:
    """Bounds of texts under one configuration."""

    bounds: LikelihoodBounds
    config: BoundsConfig

    def size(self, row: Any) -> int:
        """About how many tokens the model reads for a text."""
        return self.bounds.text_size(self.config)(row)

    def run(self, rows: list[Any], progress: Callable[[int], None]) -> list[tuple[BoundsTable, int]]:
        """Each text's place in a table."""
        tables = self.bounds.bound_batches(rows, self.config, progress)
        return [(table, row) for table in tables for row in range(len(table))]


@router.post("/v1/bounds", summary="Bounds on the log-likelihood of texts")
async def bounds(request: Request, asked: BoundsRequest) -> JSONAnswer:
    """Lower and upper bound in nats per text, with their errors, or the exact log-likelihood."""
    service: Service = request.app.state.service
    service.check_rows(len(asked.texts))
    try:
        config = _config(asked)
        z = checked_z(asked.z)
    except DiffScoreError as error:
        raise RefusedError(400, str(error)) from None
    product = await service.bounds(asked.block_size)
    results = await service.compute(BoundsWork(product, config), asked.texts)
    intervals = {id(table): table.interval(z) for table, _ in results}
    found = []
    for table, row in results:
        low, high = (edge[row] for edge in intervals[id(table)])
        found.append(_row(table, row, config) | {"interval": [number(low), number(high)]})
    service.count([item["status"] for item in found], sum(item["tokens"] for item in found))
    return JSONAnswer(
        {
            "kind": "exact" if config.exact else "lower bound, upper bound",
            "unit": "nats per text",
            "z": z,
            "signature": str(product.signature(config)),
            "results": found,
        }
    )


def _config(asked: BoundsRequest) -> BoundsConfig:
    sampling = asked.sampling.model_dump(exclude_none=True)
    method = asked.method
    if method == "auto":
        method = "exact" if asked.block_size <= MAX_AUTO_EXACT_BLOCK_SIZE and not sampling else "estimate"
    if method == "exact":
        if sampling:
            raise RefusedError(400, "sampling belongs to sampled orders, not to the exact method")
        check_lattice(asked.block_size, forced=False)
    generation = make_generation(asked.generation, asked.steps, None)
    return BoundsConfig(exact=method == "exact", generation=generation, autoregressive=asked.autoregressive, **sampling)


def _row(table: BoundsTable, row: int, config: BoundsConfig) -> dict[str, Any]:
    names = ["lower", "upper", "stderr_lower", "stderr_upper"]
    names += ["exact"] if config.exact else ["effective_draws"]
    names += ["autoregressive"] if config.autoregressive else []
    found: dict[str, Any] = {name: number(getattr(table, name)[row]) for name in names}
    found |= {"tokens": int(table.num_tokens[row]), "status": table.status[row]}
    if table.messages[row]:
        found["message"] = table.messages[row]
    return found
