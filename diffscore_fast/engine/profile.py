"""Where a run's time goes: named stages, timed only while a profile is open.

`with profile_run() as profile:` opens one; `with stage("plan"):` names the work inside the block. Stages nest: the time
of a stage inside another (`attention` inside `windows`) counts for the inner one only, so that all stages and `other`
add up to the whole.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import TypeVar

import torch

STAGES = ("read", "tokenise", "plan", "prefix", "windows", "attention", "head", "reduce", "write")
_Item = TypeVar("_Item")


class RunProfile:
    """Times of one run, filled while `profile_run` is open.

    On a GPU, every stage waits for the device before it starts and ends: the shares are right, and the run is slower.

    Parameters
    ----------
    wall_seconds : float
        From opening to closing.
    calls : dict of str to int, seconds : dict of str to float
        By stage; the time of a stage inside another counts for the inner one only.
    """

    def __init__(self) -> None:
        self.wall_seconds = 0.0
        self.calls = dict.fromkeys(STAGES, 0)
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self._spans: list[tuple[str, float, float]] = []
        self._inside: list[float] = []  # seconds of stages nested in each open one
        self._started = time.perf_counter()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time the work inside the block under a name of STAGES."""
        begin = self._now()
        self._inside.append(0.0)
        try:
            yield
        finally:
            taken = self._now() - begin
            self.calls[name] += 1
            self.seconds[name] += taken - self._inside.pop()
            if self._inside:
                self._inside[-1] += taken
            self._spans.append((name, begin - self._started, taken))

    @property
    def other_seconds(self) -> float:
        """Wall time outside every stage."""
        return self.wall_seconds - sum(self.seconds.values())

    def rows(self) -> list[tuple[str, int, float]]:
        """(stage, calls, seconds) of the stages that ran, and ("other", 0, seconds)."""
        ran = [(name, self.calls[name], self.seconds[name]) for name in STAGES if self.calls[name]]
        return [*ran, ("other", 0, self.other_seconds)]

    def write_trace(self, path: str | Path) -> None:
        """Write a Chrome trace (chrome://tracing, ui.perfetto.dev): stages as complete events, in microseconds.

        Its `otherData` holds the table: seconds by stage, and in all.
        """
        events = [
            {"name": name, "ph": "X", "ts": 1e6 * begin, "dur": 1e6 * taken, "pid": 0, "tid": 0}
            for name, begin, taken in self._spans
        ]
        seconds = {name: taken for name, _, taken in self.rows()}
        trace = {"traceEvents": events, "otherData": {"seconds": seconds, "wall_seconds": self.wall_seconds}}
        Path(path).write_text(json.dumps(trace), encoding="utf-8")

    def close(self) -> None:
        """Stop the clock."""
        self.wall_seconds = self._now() - self._started

    def _now(self) -> float:
        if torch.cuda.is_initialized():
            for device in range(torch.cuda.device_count()):
                if torch.cuda.memory_reserved(device):  # other devices are not used by this process
                    torch.cuda.synchronize(device)
        return time.perf_counter()


_listening: ContextVar[RunProfile | None] = ContextVar("_listening", default=None)


@contextmanager
def profile_run() -> Iterator[RunProfile]:
    """Time the stages of everything scored inside the `with` block.

    Examples
    --------
    >>> with profile_run() as profile:
    ...     with stage("plan"):
    ...         pass
    >>> profile.calls["plan"]
    1
    """
    profile = RunProfile()
    token = _listening.set(profile)
    try:
        yield profile
    finally:
        _listening.reset(token)
        profile.close()


def stage(name: str) -> AbstractContextManager[None]:
    """Time the work inside the block for the open profile; no effect if none is open."""
    profile = _listening.get()
    return nullcontext() if profile is None else profile.stage(name)


def staged(name: str, items: Iterable[_Item]) -> Iterator[_Item]:
    """The items of an iterable; the time that each takes to be made counts for the stage.

    Of a profile that is open when the first item is asked for.
    """
    iterator, end = iter(items), object()
    if _listening.get() is None:  # saves half a microsecond per item
        yield from iterator
        return
    while True:
        with stage(name):
            item = next(iterator, end)
        if item is end:
            return
        yield item  # type: ignore[misc]
