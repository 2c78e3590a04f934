"""Timing that a shared machine does not spoil: rounds over all rivals in turn, medians of ratios."""

from __future__ import annotations

import ctypes
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch


def interleaved(rivals: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each rival in each round. All take one turn a round, so that a slow minute meets them all."""
    for function in rivals.values():
        function()
    seconds: dict[str, list[float]] = {name: [] for name in rivals}
    for _ in range(rounds):
        for name, function in rivals.items():
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
    """Operations a second of torch's linear on large square matrices.

    Not of torch.mm: in bfloat16, without a processor's own support, that is many times slower than linear.
    """
    left, right = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    seconds = interleaved({"product": lambda: torch.nn.functional.linear(left, right)}, rounds)["product"]
    return 2.0 * size**3 / statistics.median(seconds)


def exponential_rate(rounds: int = 20) -> float:
    """Exponentials a second of torch on float32 numbers that stay in cache, all threads."""
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
