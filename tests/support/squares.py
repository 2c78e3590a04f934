"""Work for a pool that needs no model: squares of numbers, by workers that can be told to end."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Kind:
    loops: str = "avx2"

    def differences(self, other: Kind) -> str:
        return f"loops {self.loops}, not {other.loops}"


@dataclass(frozen=True)
class Squares:
    """A number's square; other items are orders.

    Parameters
    ----------
    folder : Path
        Where workers leave traces.
    loops : tuple of str
        By slot.
    dies_at_start : bool
    """

    folder: Path
    loops: tuple[str, ...] = ("avx2",)
    dies_at_start: bool = False

    def start(self, slot: int) -> Step:
        if self.dies_at_start:
            os.kill(os.getpid(), signal.SIGKILL)
        return Step(self.folder, Kind(self.loops[slot % len(self.loops)]))


class Step:
    about = "squares"

    def __init__(self, folder: Path, kind: Kind) -> None:
        self.folder, self.kind = folder, kind

    def __call__(self, item: Any) -> Any:
        if isinstance(item, int):
            time.sleep(0.002 * (item % 3))  # results come out of order
            return item * item
        order, value = item
        if order == "threads":
            return os.environ["OMP_NUM_THREADS"]
        if order == "fail":
            raise ValueError(f"no square of {value}")
        if order == "large":
            return b"x" * value
        if order == "die":  # as many times as there are no traces yet
            traces = len(list(self.folder.glob("died-*")))
            if traces < value:
                (self.folder / f"died-{traces}").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return "survived"
        assert order == "sleep"
        (self.folder / f"sleeping-{os.getpid()}").touch()
        time.sleep(value)
        return None
