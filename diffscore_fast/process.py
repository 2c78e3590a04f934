"""About this process: whether it is a fork, and how often it looks for garbage."""

from __future__ import annotations

import gc
import os

# New objects between two looks for cycles of garbage. A hundred rows make as many as Python's own 700; with short rows
# the looks took a third of the time, and rows make no cycles.
OBJECTS_BETWEEN_LOOKS = 100_000

_IMPORTED_IN = os.getpid()


def is_forked() -> bool:
    """Whether this process was forked after the package was imported.

    The threads of OpenMP and of the tokenizer stay with the parent. Code that waits for them would wait for ever, so
    a forked process computes in one thread.
    """
    return os.getpid() != _IMPORTED_IN


def spare_garbage_collector() -> None:
    """Let Python look for cycles of garbage less often; for processes that are this package's own."""
    gc.set_threshold(OBJECTS_BETWEEN_LOOKS, *gc.get_threshold()[1:])
