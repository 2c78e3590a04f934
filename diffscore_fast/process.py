"""Which process this is: threads do not survive a fork, and those who count on them must know."""

from __future__ import annotations

import os

_IMPORTED_IN = os.getpid()


def is_forked() -> bool:
    """Whether this process was forked after the package was imported.

    OpenMP's and the tokenizer's threads stayed with the parent, and whoever waits for them waits for ever: such a
    process computes in one thread.
    """
    return os.getpid() != _IMPORTED_IN
