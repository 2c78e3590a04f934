"""The ASGI application: its endpoints behind the guard."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.responses import Response

from diffscore_fast.scoring.scorer import DiffScorer
from diffscore_fast.serving import bounds, comparisons, completions, page, rankings, scores
from diffscore_fast.serving.answers import JSONAnswer, RefusedError, refused
from diffscore_fast.serving.guard import Guard
from diffscore_fast.serving.service import Service
from diffscore_fast.serving.settings import Settings
from diffscore_fast.version import __version__

router = APIRouter()
MAX_PROBLEMS = 5  # of a request that an answer names


def create_app(scorer: DiffScorer, settings: Settings) -> Guard:
    """The application that serves a scorer.

    Parameters
    ----------
    scorer : DiffScorer
    settings : Settings

    Returns
    -------
    Guard
        An ASGI application. It computes what waits, and ends its thread, when it is shut down.
    """
    service = Service(scorer, settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.queue.close)

    # The page of FastAPI for the description loads its parts from elsewhere: there is the description alone.
    app = FastAPI(title="diffscore", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.service = service
    parts = (router, *(module.router for module in (scores, bounds, comparisons, completions, rankings, page)))
    for part in parts:
        app.include_router(part)
    app.add_exception_handler(RefusedError, _refuse)
    app.add_exception_handler(HTTPException, _refuse_http)
    app.add_exception_handler(RequestValidationError, _refuse_fields)
    paths = frozenset(getattr(route, "path", "") for part in parts for route in part.routes) | {"/openapi.json"}
    return Guard(app, service, paths)


@router.get("/health", summary="Whether the service works")
async def health(request: Request) -> Response:
    """200 while the scoring thread lives."""
    return _state(request.app.state.service.queue.is_alive)


@router.get("/ready", summary="Whether the service takes requests")
async def ready(request: Request) -> Response:
    """200 once the model is loaded, 503 while the service ends."""
    return _state(request.app.state.service.queue.is_alive)


@router.get("/info", summary="Model, limits and the signature of the default options")
async def info(request: Request) -> JSONAnswer:
    """What the scores of this service depend on."""
    service: Service = request.app.state.service
    scorer, limits = service.scorer, service.settings.limits
    signature = scorer.signature(service.config())
    patterns = {
        name: {"block_sizes": list(pattern.block_sizes), "position_limit": pattern.position_limit}
        for name, pattern in scorer.spec.patterns.items()
    }
    return JSONAnswer(
        {
            "version": __version__,
            "model": scorer.spec.name,
            "device": str(scorer.backbone.device),
            "attention": patterns,
            "default_attention": scorer.spec.default_pattern,
            "signature": str(signature),
            "limits": {
                "body_bytes": limits.body_bytes,
                "rows": limits.rows,
                "tokens": limits.tokens,
                "requests": limits.requests,
                "seconds": limits.seconds,
            },
        }
    )


@router.get("/metrics", summary="Metrics for Prometheus")
async def metrics(request: Request) -> Response:
    """Counters, gauges and histograms, in Prometheus's text format."""
    service: Service = request.app.state.service
    return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)


def _state(fine: bool) -> Response:
    return JSONAnswer({"status": "ok" if fine else "ending"}, 200 if fine else 503)


async def _refuse(request: Request, error: Any) -> Response:
    return refused(error)


async def _refuse_http(request: Request, error: Any) -> Response:
    return refused(RefusedError(error.status_code, str(error.detail)))


async def _refuse_fields(request: Request, error: Any) -> Response:
    """Which fields are wrong, without their values."""
    problems = []
    for problem in error.errors()[:MAX_PROBLEMS]:
        place = ".".join(str(part)[:60] for part in problem["loc"] if part != "body")
        problems.append(f"{place or 'the body'}: {problem['msg']}")
    return refused(RefusedError(422, "; ".join(problems)))
