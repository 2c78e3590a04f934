"""`diffscore serve` as a process: sockets, signals, and what it refuses at the start."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
from typing import Any

import httpx
import pytest

from tests.support.service import served

ROW = {"source": "The cat sat on the mat. " * 40, "candidate": "A cat sat. " * 40}


def test_sigterm_answers_what_was_asked_and_ends_with_0(mini):
    with served("--max-wait", "1") as (process, address):
        answers: list[Any] = []

        def ask() -> None:
            body = {"rows": [ROW] * 3, "options": {"draws": 8}}
            answers.append(httpx.post(f"{address}/v1/scores", json=body, timeout=60))

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        while "diffscore_requests_at_work 3.0" not in httpx.get(f"{address}/metrics").text:
            assert not answers, "the requests were answered before the signal"
        process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join(60)
        assert process.wait(60) == 0
        expected = mini.score([ROW["source"]], [ROW["candidate"]], draws=8).scores[0]
        for answer in answers:
            assert [row["score"] for row in answer.json()["results"]] == pytest.approx([expected] * 3, abs=1e-5)
        assert len(answers) == 3
        log = process.stderr.read().decode()
        assert "cat" not in log and '"event": "ended"' in log


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--host", "0.0.0.0"], "set a token"),
        (["--token-file", "/absent"], "cannot read the token file"),
        (["--max-rows", "0"], "must be above 0"),
        (["--model", "no/such-model"], "no/such-model"),
    ],
)
def test_what_cannot_be_served_is_refused_at_the_start(options, words):
    command = [sys.executable, "-m", "diffscore_fast.cli.main", "serve", *options]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert found.returncode == 2
    assert words in found.stderr


def test_a_port_that_is_taken_is_an_error():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        command = [sys.executable, "-m", "diffscore_fast.cli.main", "serve", "--port", str(taken.getsockname()[1])]
        found = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert found.returncode == 2
    assert "address already in use" in found.stderr.lower()
