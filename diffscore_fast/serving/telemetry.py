"""What the service tells about itself: metrics for Prometheus, and a log without texts."""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from diffscore_fast.serving.batching import Batch

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_PACKAGE = Path(__file__).parent.parent.parent


class Metrics:
    """Counters and histograms of one service, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "diffscore_requests", "Requests by path and HTTP status.", ("path", "status"), registry=self.registry
        )
        self.latency = Histogram(
            "diffscore_request_seconds",
            "Time from a request to its answer.",
            ("path",),
            buckets=SECONDS,
            registry=self.registry,
        )
        self.at_work = Gauge("diffscore_requests_at_work", "Requests that are being answered.", registry=self.registry)
        self.abandoned = Counter(
            "diffscore_requests_abandoned", "Requests whose client left before the answer.", registry=self.registry
        )
        self.rows = Counter("diffscore_rows", "Rows answered, by their status.", ("status",), registry=self.registry)
        self.tokens = Counter("diffscore_tokens", "Scored tokens of the rows answered.", registry=self.registry)
        self.evaluated = Counter(
            "diffscore_evaluated_tokens", "Tokens that the model read in windows.", registry=self.registry
        )
        self.batch_seconds = Histogram(
            "diffscore_batch_seconds", "Time to compute a batch.", buckets=SECONDS, registry=self.registry
        )
        self.batch_rows = Histogram(
            "diffscore_batch_rows",
            "Rows of a batch.",
            buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096),
            registry=self.registry,
        )
        self.batch_requests = Histogram(
            "diffscore_batch_requests",
            "Requests that met in a batch.",
            buckets=(1, 2, 4, 8, 16, 32, 64, 128),
            registry=self.registry,
        )
        self.queued_requests = Gauge(
            "diffscore_queue_requests", "Requests with rows that wait.", registry=self.registry
        )
        self.queued_tokens = Gauge(
            "diffscore_queue_tokens", "About how many tokens the model has to read for them.", registry=self.registry
        )

    def observe(self, batch: Batch) -> None:
        """Count a batch."""
        self.evaluated.inc(batch.tokens)
        self.batch_seconds.observe(batch.seconds)
        self.batch_rows.observe(batch.rows)
        self.batch_requests.observe(batch.requests)


def make_logger() -> logging.Logger:
    """The log of the service: one JSON object per line, on standard error."""
    logger = logging.getLogger("diffscore_fast.serving")
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_Lines())
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    return logger


class _Lines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created))
        fields = getattr(record, "fields", {})
        return json.dumps({"time": stamp, "level": record.levelname.lower(), "event": record.getMessage(), **fields})


def where(error: BaseException) -> dict[str, object]:
    """Type and place of an error. Its message may hold a text of a request, and is left out."""
    places = []
    for frame in traceback.extract_tb(error.__traceback__)[-6:]:
        path = Path(frame.filename)
        name = path.relative_to(_PACKAGE) if path.is_relative_to(_PACKAGE) else path.name
        places.append(f"{name}:{frame.lineno} {frame.name}")
    return {"error": type(error).__name__, "at": places}
