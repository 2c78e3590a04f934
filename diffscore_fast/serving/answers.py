"""Answers: JSON without NaN, and errors in one shape."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response


class RefusedError(Exception):
    """A request that gets an error for an answer.

    Parameters
    ----------
    status : int
        Of HTTP.
    message : str
        What was wrong, and what to do.
    retry_after : int, optional
        Seconds after which the client may try again.
    """

    def __init__(self, status: int, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.retry_after = status, message, retry_after


class JSONAnswer(Response):
    """A JSON answer in ASCII, so that a lone surrogate of a request cannot break it. It refuses NaN."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


def refused(error: RefusedError, headers: Mapping[str, str] | None = None) -> JSONAnswer:
    """The answer to a refused request, in the shape that OpenAI's clients read."""
    found = dict(headers or {})
    if error.retry_after is not None:
        found["Retry-After"] = str(error.retry_after)
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    body = {"error": {"message": error.message, "type": kind, "code": error.status}}
    return JSONAnswer(body, error.status, found)


def number(value: float) -> float | None:
    """A finite number, or None: JSON has no NaN."""
    value = float(value)
    return value if math.isfinite(value) else None
