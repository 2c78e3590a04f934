"""What stands before every request: who asks, how much is sent, how many ask at once, and who has left."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import ipaddress
import time
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diffscore_fast.serving.answers import RefusedError, refused
from diffscore_fast.serving.service import Service
from diffscore_fast.serving.telemetry import where

OPEN_PATHS = frozenset({"/health", "/ready"})  # they say nothing, and probes carry no token
SECURITY_HEADERS = (
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)


class Guard:
    """ASGI middleware that checks requests, bounds them, and frees the work of clients that leave.

    Parameters
    ----------
    app : ASGI application
    service : Service
    paths : set of str
        Known paths; the log and the metrics name no other.
    """

    def __init__(self, app: ASGIApp, service: Service, paths: frozenset[str]) -> None:
        self.service = service
        self._app, self._paths = app, paths
        self._settings, self._metrics, self._logger = service.settings, service.metrics, service.logger
        self._at_work = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        started = time.perf_counter()
        path = scope["path"] if scope["path"] in self._paths else "other"
        status = 499  # if no answer begins: the client has left

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), *SECURITY_HEADERS]}
            await send(message)

        try:
            await self._admit(scope, receive, answer)
        except RefusedError as error:
            headers = {"WWW-Authenticate": 'Basic realm="diffscore", charset="UTF-8"'} if error.status == 401 else None
            await refused(error, headers)(scope, receive, answer)
        except Exception as error:
            self._logger.error("error", extra={"fields": {"path": path, **where(error)}})
            if status == 499:
                await refused(RefusedError(500, "the service failed; its log says where"))(scope, receive, answer)
        finally:
            seconds = time.perf_counter() - started
            self._metrics.requests.labels(path, str(status)).inc()
            self._metrics.latency.labels(path).observe(seconds)
            if path not in OPEN_PATHS and path != "/metrics":
                fields = {"method": scope["method"], "path": path, "status": status, "seconds": round(seconds, 4)}
                self._logger.info("request", extra={"fields": fields})

    async def _admit(self, scope: Scope, receive: Receive, answer: Send) -> None:
        headers = _headers(scope)
        self._check_host(headers)
        if scope["path"] not in OPEN_PATHS:
            self._check_token(headers)
        if scope["method"] in ("GET", "HEAD"):
            await self._app(scope, receive, answer)
            return
        _check_content(headers)
        limits = self._settings.limits
        if self._at_work >= limits.requests:
            raise RefusedError(
                429, f"{self._at_work} requests are at work, which is the limit; try again later", self._retry_after()
            )
        self._at_work += 1
        self._metrics.at_work.set(self._at_work)
        try:
            await self._bounded(scope, receive, answer, headers)
        finally:
            self._at_work -= 1
            self._metrics.at_work.set(self._at_work)

    async def _bounded(self, scope: Scope, receive: Receive, answer: Send, headers: dict[bytes, bytes]) -> None:
        """Read the body, and answer in time, unless the client leaves."""
        deadline = asyncio.get_running_loop().time() + self._settings.limits.seconds
        try:
            async with asyncio.timeout_at(deadline):
                body = await self._read(receive, headers)
        except TimeoutError:
            raise RefusedError(408, "the request did not arrive in time") from None
        if body is None:
            self._metrics.abandoned.inc()
            return
        left = asyncio.Event()
        given = False

        async def replay() -> Message:
            nonlocal given
            if not given:
                given = True
                return {"type": "http.request", "body": body, "more_body": False}
            await left.wait()
            return {"type": "http.disconnect"}

        work = asyncio.ensure_future(self._app(scope, replay, answer))
        gone = asyncio.ensure_future(_until_gone(receive))
        try:
            remaining = deadline - asyncio.get_running_loop().time()
            await asyncio.wait({work, gone}, timeout=max(0.0, remaining), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
            elif gone.done():
                self._metrics.abandoned.inc()
            else:
                await _cancelled(work)
                raise RefusedError(
                    503,
                    f"no answer within {self._settings.limits.seconds:g} seconds; send fewer rows, or try again later",
                    self._retry_after(),
                )
        finally:
            left.set()
            await _cancelled(work)
            await _cancelled(gone)

    async def _read(self, receive: Receive, headers: dict[bytes, bytes]) -> bytes | None:
        """The body; None if the client leaves."""
        limit = self._settings.limits.body_bytes
        too_large = RefusedError(413, f"the body has more than {limit:,} bytes; send fewer rows")
        declared = headers.get(b"content-length", b"")
        if declared.isdigit() and int(declared[:20]) > limit:
            raise too_large
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            part = message.get("body", b"")
            size += len(part)
            if size > limit:
                raise too_large
            parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts)

    def _check_host(self, headers: dict[bytes, bytes]) -> None:
        """Refuse a Host that a page elsewhere could have pointed at this service (DNS rebinding)."""
        name = _host_name(headers.get(b"host", b"").decode("latin-1"))
        allowed = {"localhost", self._settings.host.lower(), *(item.lower() for item in self._settings.allowed_hosts)}
        if name in allowed:
            return
        try:
            ipaddress.ip_address(name)  # an address cannot be pointed elsewhere
        except ValueError:
            raise RefusedError(400, "this Host is not served here; the service allows it by --allowed-host") from None

    def _check_token(self, headers: dict[bytes, bytes]) -> None:
        token = self._settings.token
        if token is not None and not hmac.compare_digest(_given_token(headers), token.encode("ascii")):
            raise RefusedError(
                401, "a token is needed: Authorization: Bearer TOKEN, or Basic with the token as password"
            )

    def _retry_after(self) -> int:
        return max(1, min(60, round(self.service.queue.expected_seconds())))


def _headers(scope: Scope) -> dict[bytes, bytes]:
    """Headers by name; one that comes twice where that could mislead is refused."""
    found: dict[bytes, bytes] = {}
    for name, value in scope["headers"]:
        if name in found and name in (b"host", b"authorization", b"content-type", b"content-length"):
            raise RefusedError(400, "a header is given twice")
        found[name] = value
    return found


def _check_content(headers: dict[bytes, bytes]) -> None:
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if kind != b"application/json":
        raise RefusedError(415, "send JSON, with Content-Type: application/json")
    if headers.get(b"content-encoding", b"identity").strip().lower() != b"identity":
        raise RefusedError(415, "compressed bodies are not taken; send the body as it is")


def _host_name(host: str) -> str:
    """The name or address in a Host header, without the port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def _given_token(headers: dict[bytes, bytes]) -> bytes:
    """The token of a request: of `Bearer`, or the password of `Basic`, which browsers ask for. b"" if there is none."""
    scheme, _, value = headers.get(b"authorization", b"").partition(b" ")
    value = value.strip()
    if scheme.lower() == b"bearer":
        return value
    if scheme.lower() == b"basic":
        try:
            return base64.b64decode(value, validate=True).partition(b":")[2]
        except binascii.Error:
            return b""
    return b""


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancelled(task: asyncio.Future[Any]) -> None:
    """Cancel a task, if it is not done, and wait for its end."""
    if not task.done():
        task.cancel()
        await asyncio.wait({task})
