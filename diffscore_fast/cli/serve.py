"""`diffscore serve`: its options, and the start of the service."""

from __future__ import annotations

from typing import Any

import click

from diffscore_fast.cli.options import group, model_options
from diffscore_fast.errors import DependencyError
from diffscore_fast.serving.settings import TOKEN_VARIABLE, Limits, Settings, read_token


def _option(name: str, help_text: str, **settings: Any) -> Any:
    return click.option(name, help=help_text, show_default=settings.get("default") is not None, **settings)


serve_options = group(
    _option("--host", "Address to listen on; one that is not loopback needs a token.", default=Settings.host),
    _option("--port", "Port to listen on.", type=click.IntRange(1, 65535), default=Settings.port),
    _option(
        "--token-file",
        f"File whose first line is the token that requests must carry. Or set {TOKEN_VARIABLE}.",
        metavar="FILE",
    ),
    _option(
        "--allowed-host",
        "A name that the Host header may give, besides localhost and addresses; may be repeated.",
        multiple=True,
        metavar="NAME",
    ),
    _option("--batch-tokens", "About how many tokens the model reads for a batch.", default=Settings.batch_tokens),
    _option("--max-wait", "Seconds that a request waits for others to be scored with.", default=Settings.max_wait),
    _option("--max-body", "Bytes of a request's body.", default=Limits.body_bytes),
    _option("--max-rows", "Rows of a request.", default=Limits.rows),
    _option(
        "--max-tokens", "About how many tokens the model may read for a request, draws counted.", default=Limits.tokens
    ),
    _option("--max-requests", "Requests at work at once; further ones get 429.", default=Limits.requests),
    _option("--timeout", "Seconds for a request; then it gets 503.", default=Limits.seconds),
    model_options,
)


def run_serve(model: str, options: dict[str, Any]) -> None:
    """Load the model, and serve until a signal.

    Raises
    ------
    DependencyError
        If the extra `serve` is not installed.
    InputError
        For settings that cannot be used.
    """
    settings = Settings(
        host=options["host"],
        port=options["port"],
        token=read_token(options["token_file"]),
        allowed_hosts=options["allowed_host"],
        batch_tokens=options["batch_tokens"],
        max_wait=options["max_wait"],
        limits=Limits(
            body_bytes=options["max_body"],
            rows=options["max_rows"],
            tokens=options["max_tokens"],
            requests=options["max_requests"],
            seconds=options["timeout"],
        ),
    )
    from diffscore_fast.cli.model import model_arguments
    from diffscore_fast.scoring.scorer import DiffScorer

    try:
        from diffscore_fast.serving.server import serve
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in (
            "fastapi",
            "uvicorn",
            "prometheus_client",
            "pydantic",
            "starlette",
        ):
            raise
        raise DependencyError("the service needs FastAPI and others: pip install 'diffscore_fast[serve]'") from None
    serve(DiffScorer(model, **model_arguments(options)), settings)
