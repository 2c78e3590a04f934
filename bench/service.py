"""Load on `diffscore serve`: throughput against scoring offline, latencies, and an overload; every score is checked.

Each row is another text, so that no answer comes from another row's work. A score that differs from the offline one in
any bit, an answer that is missing, and a row that comes back twice are counted. Client and service share the machine.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import httpx
import numpy as np

from bench.records import RESULTS, append_record
from diffscore_fast import DiffScorer

EXAMPLE = Path(__file__).parent.parent / "examples" / "summaries.jsonl"
SOURCE_WORDS, CANDIDATE_WORDS = 60, 20
OPTIONS: dict[str, Any] = {"draws": 4}


@dataclass
class Load:
    """What clients saw.

    Parameters
    ----------
    seconds : list of float
        From sending a request to its answer, for those with scores.
    statuses : Counter
        Answers by HTTP status.
    wrong, lost : int
        Scores that differ from the offline ones, and requests without an answer.
    """

    seconds: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    wrong: int = 0
    lost: int = 0

    def summary(self) -> dict[str, Any]:
        """The numbers of a record."""
        p50, p99 = np.quantile(self.seconds, [0.5, 0.99]) if self.seconds else (np.nan, np.nan)
        return {
            "statuses": dict(self.statuses),
            "wrong": self.wrong,
            "lost": self.lost,
            "p50_seconds": round(float(p50), 3),
            "p99_seconds": round(float(p99), 3),
        }


def make_rows(count: int) -> list[dict[str, str]]:
    """Rows of an article's words and a summary's, none like another."""
    examples = [json.loads(line) for line in EXAMPLE.read_text(encoding="utf-8").splitlines()]
    rows = []
    for number in range(count):
        example = examples[number % len(examples)]
        source, candidate = example["source"].split(), example["candidate"].split()
        shift = number // len(examples)
        rows.append(
            {
                "source": " ".join(source[shift : shift + SOURCE_WORDS]),
                "candidate": " ".join([*candidate[:CANDIDATE_WORDS], str(number)]),
            }
        )
    return rows


@contextmanager
def service(*options: str) -> Iterator[str]:
    """The address of a service with one thread; it must end by itself after SIGTERM."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "diffscore_fast.cli.main", "serve", "--port", str(port), *options]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    address = f"http://127.0.0.1:{port}"
    try:
        while True:
            try:
                httpx.get(f"{address}/ready")
                break
            except httpx.TransportError:
                assert process.poll() is None, "the service ended at its start"
                time.sleep(0.1)
        yield address
    finally:
        process.terminate()
        assert process.wait(120) == 0, "the service did not drain"


async def ask(client: httpx.AsyncClient, rows: list[dict[str, str]], expected: np.ndarray, load: Load) -> None:
    """One request, checked."""
    started = time.perf_counter()
    try:
        answer = await client.post("/v1/scores", json={"rows": rows, "options": OPTIONS})
    except httpx.HTTPError:
        load.lost += 1
        return
    load.statuses[answer.status_code] += 1
    if answer.status_code == 200:
        load.seconds.append(time.perf_counter() - started)
        scores = [row["score"] for row in answer.json()["results"]]
        load.wrong += len(scores) != len(expected) or scores != expected.tolist()


async def closed_loop(address: str, requests: list[tuple[list[dict[str, str]], np.ndarray]], clients: int) -> Load:
    """Each client sends its next request when it has the answer to the last."""
    load, waiting = Load(), iter(requests)

    async def work(client: httpx.AsyncClient) -> None:
        for rows, expected in waiting:
            await ask(client, rows, expected, load)

    async with httpx.AsyncClient(base_url=address, timeout=120, limits=httpx.Limits(max_connections=clients)) as client:
        await asyncio.gather(*(work(client) for _ in range(clients)))
    return load


async def open_loop(
    address: str, requests: list[tuple[list[dict[str, str]], np.ndarray]], rate: float, seconds: float
) -> tuple[Load, int]:
    """Requests at a fixed rate, whatever the answers; the load, and how many were sent."""
    load = Load()
    tasks: list[asyncio.Future[None]] = []
    endless = itertools.cycle(requests)
    async with httpx.AsyncClient(base_url=address, timeout=120, limits=httpx.Limits(max_connections=None)) as client:
        started = time.perf_counter()
        while (now := time.perf_counter() - started) < seconds:
            while len(tasks) < now * rate:
                tasks.append(asyncio.ensure_future(ask(client, *next(endless), load)))
            await asyncio.sleep(0.005)
        await asyncio.gather(*tasks)
    return load, len(tasks)


@click.command()
@click.option("--rows", "count", default=600, show_default=True)
@click.option("--rows-per-request", default=4, show_default=True)
@click.option("--clients", default=32, show_default=True)
@click.option("--overload-seconds", default=60.0, show_default=True, help="0: no overload.")
@click.option("--rate", type=float, help="Rows per second of the overload; default: twice what was measured.")
def main(count: int, rows_per_request: int, clients: int, overload_seconds: float, rate: float | None) -> None:
    """Measure, and append a record to results/service.jsonl."""
    import torch

    torch.set_num_threads(1)
    rows = make_rows(count)
    scorer = DiffScorer("mini")
    sources, candidates = [row["source"] for row in rows], [row["candidate"] for row in rows]
    scorer.score(sources[:32], candidates[:32], **OPTIONS)

    def offline() -> tuple[np.ndarray, float]:
        scorer.clear_cache()
        started = time.perf_counter()
        scores = scorer.score(sources, candidates, **OPTIONS).scores
        return scores, count / (time.perf_counter() - started)

    expected, before = offline()
    requests = [
        (rows[first : first + rows_per_request], expected[first : first + rows_per_request])
        for first in range(0, count, rows_per_request)
    ]
    found: dict[str, Any] = {"rows": count, "rows_per_request": rows_per_request, "clients": clients, **OPTIONS}
    with service() as address:
        other = make_rows(count + clients)[count:]
        asyncio.run(closed_loop(address, [([row], np.zeros(1)) for row in other], clients))  # a start, not counted
        started = time.perf_counter()
        load = asyncio.run(closed_loop(address, requests, clients))
        online = count / (time.perf_counter() - started)
    _, after = offline()
    found |= {
        "offline_rows_per_second": [round(before, 1), round(after, 1)],  # before and after: the machine's speed varies
        "service_rows_per_second": round(online, 1),
        "share": round(online / max(before, after), 3),
        **load.summary(),
    }
    if overload_seconds:
        rate = rate or 2 * online
        with service("--max-requests", str(clients)) as address:
            over, sent = asyncio.run(open_loop(address, requests, rate / rows_per_request, overload_seconds))
        assert sum(over.statuses.values()) + over.lost == sent
        found["overload"] = {
            "rows_per_second": round(rate, 1),
            "sent": sent,
            "seconds": overload_seconds,
            **over.summary(),
        }
    click.echo(json.dumps(found))
    append_record(RESULTS / "service.jsonl", **found)


if __name__ == "__main__":
    main()
