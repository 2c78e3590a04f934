"""Hash of the C++ sources: compiled into the extension, and compared with it wherever the sources lie beside it."""

from __future__ import annotations

import hashlib
from pathlib import Path

SUFFIXES = (".cpp", ".h", ".inc")


def fingerprint() -> str:
    """SHA-256 over the names and contents of this folder's sources, as hexadecimal digits."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.iterdir()):
        if path.suffix in SUFFIXES:
            content = path.read_bytes()
            digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()
