"""The web page at `/`: three static files, which load nothing from elsewhere."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from starlette.responses import Response

router = APIRouter(include_in_schema=False)
_FOLDER = Path(__file__).parent


@router.get("/")
async def page() -> Response:
    """The page."""
    return _file("index.html", "text/html")


@router.get("/page.js")
async def script() -> Response:
    """Its script."""
    return _file("page.js", "text/javascript")


@router.get("/page.css")
async def style() -> Response:
    """Its style."""
    return _file("page.css", "text/css")


@router.get("/favicon.ico")
async def icon() -> Response:
    """There is none; browsers ask for it."""
    return Response(status_code=204)


def _file(name: str, media_type: str) -> Response:
    return Response((_FOLDER / name).read_bytes(), media_type=media_type)
