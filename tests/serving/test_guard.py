"""Who may ask, how much may be sent, how many may ask at once, and what happens to those who leave."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import threading
from typing import Any

import pytest
from httpx import AsyncClient

from diffscore_fast.errors import InputError
from diffscore_fast.serving.guard import Guard
from diffscore_fast.serving.settings import Limits, Settings, is_loopback, read_token
from diffscore_fast.serving.telemetry import make_logger
from tests.support.service import JSON, get, post, running

TOKEN = "correct horse".replace(" ", "-") + "-battery"
BODY = {"rows": [{"source": "The cat sat on the mat.", "candidate": "A cat sat."}], "options": {"draws": 1}}


def basic(password: str) -> str:
    return "Basic " + base64.b64encode(f"anyone:{password}".encode()).decode()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org", "10.0.0.1"])
def test_an_address_that_others_reach_needs_a_token(host):
    assert not is_loopback(host)
    with pytest.raises(InputError, match="--token-file"):
        Settings(host=host)
    Settings(host=host, token=TOKEN)


@pytest.mark.parametrize("path", ["/info", "/metrics", "/openapi.json", "/nothing"])
def test_a_token_is_asked_for_everywhere_but_by_probes(mini, path):
    settings = Settings(token=TOKEN)
    for given in (
        {},
        {"authorization": f"Bearer {TOKEN}x"},
        {"authorization": "Bearer "},
        {"authorization": basic("x")},
    ):
        answer = get(mini, path, settings, **given)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"].startswith("Basic")
    for right in (f"Bearer {TOKEN}", basic(TOKEN)):
        assert get(mini, path, settings, authorization=right).status_code == (404 if path == "/nothing" else 200)
    assert get(mini, "/health", settings).status_code == get(mini, "/ready", settings).status_code == 200
    assert post(mini, "/v1/scores", BODY, settings).status_code == 401


@pytest.mark.parametrize("given", ["Basic !!!", "Basic", "Bearer", "Bearer \xff\xfe", "Digest x"])
def test_a_damaged_token_is_refused(mini, given):
    async def use(client: AsyncClient, app: Guard) -> int:
        return (await client.get("/info", headers=[(b"authorization", given.encode("latin-1"))])).status_code

    assert running(mini, Settings(token=TOKEN), use) == 401


def test_the_token_is_read_from_a_file_or_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("DIFFSCORE_TOKEN", raising=False)
    assert read_token(None) is None
    monkeypatch.setenv("DIFFSCORE_TOKEN", TOKEN)
    assert read_token(None) == TOKEN
    path = tmp_path / "token"
    path.write_text("another-token-of-a-file\nsecond line\n")
    assert read_token(str(path)) == "another-token-of-a-file"
    for wrong in ("short", "", "with a space in the token", "nicht-ascii-ä-aber-lang"):
        path.write_text(wrong)
        with pytest.raises(InputError, match="16 printable"):
            read_token(str(path))
    with pytest.raises(InputError, match="cannot read"):
        read_token(str(tmp_path / "absent"))
    assert TOKEN not in repr(Settings(token=TOKEN))


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8000", 200),
        ("127.0.0.1", 200),
        ("[::1]:8000", 200),
        ("score.example.org", 200),
        ("attacker.example", 400),
        ("localhost.attacker.example", 400),
        ("", 400),
    ],
)
def test_a_name_that_could_be_pointed_here_is_refused(mini, host, status):
    assert get(mini, "/health", Settings(allowed_hosts=("score.example.org",)), host=host).status_code == status


def test_only_plain_json_is_taken(mini):
    for headers, status in (
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"content-type": "application/json; charset=utf-8"}, 200),
        ({"content-encoding": "gzip"}, 415),
        ({"content-encoding": "br"}, 415),
    ):
        assert post(mini, "/v1/scores", BODY, **headers).status_code == status


def test_answers_forbid_foreign_parts_and_other_origins(mini):
    answer = post(mini, "/v1/scores", BODY, origin="https://attacker.example")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert not any(name.startswith("access-control") for name in answer.headers)


def test_the_body_is_counted_while_it_arrives(mini):
    """A body in parts declares no length; what comes after the limit is not read."""
    sent = []

    async def parts():
        for number in range(100):
            sent.append(number)
            yield b" " * 1000

    async def use(client: AsyncClient, app: Guard) -> int:
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/scores",
            "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        }
        source, answers = parts(), []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": await anext(source), "more_body": True}

        async def send(message: Any) -> None:
            answers.append(message)

        await app(scope, receive, send)
        return answers[0]["status"]

    assert running(mini, Settings(limits=Limits(body_bytes=4500)), use) == 413
    assert len(sent) == 5
    assert post(mini, "/v1/scores", b" " * 5000, Settings(limits=Limits(body_bytes=4500))).status_code == 413


def blocked(scorer: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Makes the scorer wait in its first batch; (it has begun, let it go on)."""
    began, go_on = threading.Event(), threading.Event()
    score_batches = type(scorer).score_batches

    def wait(self: Any, *arguments: Any, **options: Any) -> Any:
        began.set()
        assert go_on.wait(30)
        return score_batches(self, *arguments, **options)

    monkeypatch.setattr(type(scorer), "score_batches", wait)
    return began, go_on


def test_requests_beyond_the_limit_are_told_when_to_come_back(mini, monkeypatch):
    began, go_on = blocked(mini, monkeypatch)

    async def use(client: AsyncClient, app: Guard) -> tuple[Any, Any]:
        first = [asyncio.ensure_future(client.post("/v1/scores", json=BODY)) for _ in range(2)]
        await asyncio.to_thread(began.wait, 30)
        refused = await client.post("/v1/scores", json=BODY)
        probe = await client.get("/health")  # probes are not counted
        go_on.set()
        return refused, [*await asyncio.gather(*first), await client.post("/v1/scores", json=BODY), probe]

    refused, taken = running(mini, Settings(limits=Limits(requests=2)), use)
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert [answer.status_code for answer in taken] == [200] * 4


def test_a_request_that_takes_too_long_is_ended_and_its_work_freed(mini, monkeypatch):
    began, go_on = blocked(mini, monkeypatch)

    async def use(client: AsyncClient, app: Guard) -> Any:
        first = asyncio.ensure_future(client.post("/v1/scores", json=BODY))
        await asyncio.to_thread(began.wait, 30)
        second = await client.post("/v1/scores", json=BODY)  # waits behind it
        waiting = app.service.queue.waiting_requests
        go_on.set()
        return await first, second, waiting

    first, second, waiting = running(mini, Settings(limits=Limits(seconds=0.3)), use)
    assert first.status_code == second.status_code == 503
    assert "retry-after" in second.headers
    assert waiting == 0


def test_a_client_that_leaves_frees_its_work(mini, monkeypatch):
    began, go_on = blocked(mini, monkeypatch)

    async def use(client: AsyncClient, app: Guard) -> tuple[int, int, str]:
        first = asyncio.ensure_future(client.post("/v1/scores", json=BODY))
        await asyncio.to_thread(began.wait, 30)
        messages = [{"type": "http.request", "body": json.dumps(BODY).encode(), "more_body": False}]
        left = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            raise AssertionError("nobody reads this answer")

        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/scores", "headers": headers, "query_string": b""}
        second = asyncio.ensure_future(app(scope, receive, send))
        while not app.service.queue.waiting_requests:
            await asyncio.sleep(0.01)
        left.set()
        await second
        waiting = app.service.queue.waiting_requests
        go_on.set()
        await first
        return first.result().status_code, waiting, (await client.get("/metrics")).text

    status, waiting, metrics = running(mini, Settings(), use)
    assert (status, waiting) == (200, 0)
    assert "diffscore_requests_abandoned_total 1.0" in metrics


def test_the_log_holds_no_text_of_a_request(mini, monkeypatch):
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(make_logger().handlers[0].format(record))  # type: ignore[method-assign]
    make_logger().addHandler(handler)
    monkeypatch.setattr(type(mini), "score_batches", lambda *_: 1 / 0 if _ else None)
    try:
        body = {"rows": [{"source": "confidential", "candidate": "secret"}]}
        assert post(mini, "/v1/scores", body).status_code == 500
        assert get(mini, "/v1/confidential?secret=confidential").status_code == 404
        assert post(mini, "/v1/scores", {"rows": "confidential"}).status_code == 422
    finally:
        make_logger().removeHandler(handler)
    text = "\n".join(lines)
    assert "ZeroDivisionError" in text and "serving/works.py" in text
    assert "confidential" not in text and "secret" not in text


def test_json_answers_need_no_encoding_that_a_request_could_break(mini):
    assert post(mini, "/v1/scores", b'{"rows": [{"candidate": "\\ud800"}]}').status_code == 200
    assert JSON["content-type"] == post(mini, "/v1/scores", BODY).headers["content-type"]
