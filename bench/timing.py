"""Timing on a shared machine: in every round each call takes one turn; ratios are medians over rounds."""

from __future__ import annotations

import ctypes
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch


def interleaved(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each call in each round. Each takes one turn per round, so that a slow minute hits all."""
    for function in calls.values():
        function()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, function in calls.items():
            begin = time.perf_counter()
            function()
            seconds[name].append(time.perf_counter() - begin)
    return seconds


def ratio(seconds: dict[str, list[float]], slow: str, fast: str) -> float:
    """Median over rounds of how many times longer `slow` took than `fast`."""
    return statistics.median(a / b for a, b in zip(seconds[slow], seconds[fast], strict=True))


def spread(values: list[float]) -> float:
    """Distance between the quartiles."""
    low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else (0.0, 0.0, 0.0)
    return high - low


def matrix_rate(dtype: torch.dtype, size: int = 2048, rounds: int = 5) -> float:
    """Operations per second of torch's linear on large square matrices.

    Not of torch.mm: in bfloat16, on a processor without support for it, torch.mm is many times slower than linear.
    """
    left, right = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    seconds = interleaved({"product": lambda: torch.nn.functional.linear(left, right)}, rounds)["product"]
    return 2.0 * size**3 / statistics.median(seconds)


def exponential_rate(rounds: int = 20) -> float:
    """Exponentials per second of torch, all threads, on float32 numbers that fit in the cache."""
    values = torch.randn(1 << 16) * 3.0 - 5.0
    out = torch.empty_like(values)

    def repeat() -> None:
        for _ in range(50):
            torch.exp(values, out=out)

    seconds = interleaved({"exp": repeat}, rounds)["exp"]
    return 50 * len(values) / statistics.median(seconds)


def peak_extra_bytes(function: Callable[[], object]) -> int:
    """How far the resident set rises above its start while `function` runs (Linux)."""
    function()  # threads exist from here on
    return timed_with_peak(function)[1]


def timed_with_peak(function: Callable[[], object]) -> tuple[float, int]:
    """Seconds of a call, and how far the resident set rises above its start meanwhile (Linux)."""

    def status(field: str) -> int:
        text = Path("/proc/self/status").read_text()
        return int(re.search(rf"{field}:\s+(\d+) kB", text)[1]) * 1024  # type: ignore[index]

    ctypes.CDLL(None).malloc_trim(0)  # freed memory that the allocator keeps would hide the rise
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before, begin = status("VmRSS"), time.perf_counter()
    function()
    seconds = time.perf_counter() - begin
    return seconds, status("VmHWM") - before
