"""`diffscore serve` as a process: sockets, signals, and what it refuses at the start."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

ROW = {"source": "The cat sat on the mat. " * 40, "candidate": "A cat sat. " * 40}


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
