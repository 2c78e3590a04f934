"""The load test counts what is wrong, lost and refused."""

from __future__ import annotations

import asyncio
import json

import httpx
import numpy as np

from bench.service import Load, ask, make_rows, open_loop


def test_rows_are_all_different():
    rows = make_rows(200)
    assert len({(row["source"], row["candidate"]) for row in rows}) == 200


def load_of(handler) -> Load:
    load = Load()

    async def run() -> None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(handler), base_url="http://localhost") as client:
            await ask(client, make_rows(2), np.array([-1.5, -2.5]), load)

    asyncio.run(run())
    return load


def answer(*scores: float | None) -> httpx.Response:
    return httpx.Response(200, content=json.dumps({"results": [{"score": score} for score in scores]}))


def test_scores_are_compared_bit_for_bit_and_counted():
    assert load_of(lambda request: answer(-1.5, -2.5)).wrong == 0
    assert load_of(lambda request: answer(-1.5, float(np.nextafter(-2.5, 0)))).wrong == 1
    assert load_of(lambda request: answer(-1.5)).wrong == 1
    assert load_of(lambda request: answer(-1.5, -2.5, -2.5)).wrong == 1
    assert load_of(lambda request: answer(-2.5, -1.5)).wrong == 1
    assert load_of(lambda request: answer(None, None)).wrong == 1


def test_refused_and_lost_requests_are_counted_apart():
    refused = load_of(lambda request: httpx.Response(429))
    assert (refused.statuses[429], refused.wrong, refused.lost, refused.seconds) == (1, 0, 0, [])

    def fails(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadError("closed")

    assert load_of(fails).lost == 1


def test_an_open_loop_sends_at_its_rate_and_accounts_for_every_request():
    load, sent = asyncio.run(open_loop("http://127.0.0.1:9", [(make_rows(1), np.zeros(1))], rate=50, seconds=0.3))
    assert 1 <= sent <= 16
    assert load.lost == sent
