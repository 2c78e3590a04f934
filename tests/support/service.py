"""Services for tests: in this process without sockets, and as a process."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from diffscore_fast.scoring.scorer import DiffScorer
from diffscore_fast.serving.app import create_app
from diffscore_fast.serving.guard import Guard
from diffscore_fast.serving.settings import Settings

JSON = {"content-type": "application/json"}
DEFAULT = Settings()


def running(scorer: DiffScorer, settings: Settings, use: Callable[[httpx.AsyncClient, Guard], Awaitable[Any]]) -> Any:
    """What `use` returns, with a client of a service that runs meanwhile."""

    async def run() -> Any:
        app = create_app(scorer, settings)
        transport = httpx.ASGITransport(app)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            try:
                return await use(client, app)
            finally:
                await asyncio.to_thread(app.service.queue.close)

    return asyncio.run(run())


def post(scorer: DiffScorer, path: str, body: Any, settings: Settings = DEFAULT, **headers: str) -> httpx.Response:
    """The answer to one request."""

    async def use(client: httpx.AsyncClient, app: Guard) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body)
        return await client.post(path, content=content, headers={**JSON, **headers})

    return running(scorer, settings, use)


def get(scorer: DiffScorer, path: str, settings: Settings = DEFAULT, **headers: str) -> httpx.Response:
    """The answer to one request."""

    async def use(client: httpx.AsyncClient, app: Guard) -> httpx.Response:
        return await client.get(path, headers=headers)

    return running(scorer, settings, use)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def served(*options: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """The process of a service, and its address."""
    port = free_port()
    command = [sys.executable, "-m", "diffscore_fast.cli.main", "serve", "--port", str(port), *options]
    environment = {key: value for key, value in os.environ.items() if key != "DIFFSCORE_TOKEN"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, env=environment)
    try:
        for _ in range(600):
            try:
                httpx.get(f"http://127.0.0.1:{port}/ready")
                break
            except httpx.TransportError:
                assert process.poll() is None, process.stderr.read().decode()
                time.sleep(0.1)
        yield process, f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.communicate()
