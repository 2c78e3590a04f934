"""Whether this process is a fork: threads do not survive one."""

from __future__ import annotations

import os

_IMPORTED_IN = os.getpid()


def is_forked() -> bool:
    """Whether this process was forked after the package was imported.

    The threads of OpenMP and of the tokenizer stay with the parent. Code that waits for them would wait for ever, so
    a forked process computes in one thread.
    """
    return os.getpid() != _IMPORTED_IN
