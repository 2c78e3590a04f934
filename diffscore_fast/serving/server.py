"""Running the application: sockets, signals, and the end after the last answer."""

from __future__ import annotations

import signal
import socket
import threading
from typing import Any

import uvicorn

from diffscore_fast.errors import InputError
from diffscore_fast.scoring.scorer import DiffScorer
from diffscore_fast.serving.app import create_app
from diffscore_fast.serving.settings import Settings
from diffscore_fast.serving.telemetry import make_logger


def serve(scorer: DiffScorer, settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT, then answer what has been asked, and return. A second signal ends at once."""
    listener = _listener(settings.host, settings.port)
    server = uvicorn.Server(
        uvicorn.Config(
            create_app(scorer, settings),
            log_config=None,
            access_log=False,  # it would hold what a client writes into the path
            log_level="warning",
            server_header=False,
            proxy_headers=False,
            ws="none",
            timeout_graceful_shutdown=int(settings.limits.seconds) + 1,
        )
    )
    logger = make_logger()

    def end(number: int, frame: Any) -> None:
        server.force_exit = server.should_exit
        server.should_exit = True

    # In another thread, uvicorn leaves signals alone, so that a drained service ends with exit code 0.
    thread = threading.Thread(target=server.run, args=([listener],), name="server")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    thread.start()
    logger.info("serving", extra={"fields": {"host": settings.host, "port": settings.port}})
    thread.join()
    logger.info("ended")


def _listener(host: str, port: int) -> socket.socket:
    """A bound socket: an address that cannot be had is an error here, not in the server's thread.

    Raises
    ------
    InputError
        With the system's reason.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise InputError(f"cannot listen on {host}, port {port}: {error.strerror}") from None
    return listener
