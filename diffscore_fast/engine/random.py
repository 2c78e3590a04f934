"""Counter-based random numbers: each depends on (seed, target tokens or item, draw, token) only.

Philox 4x32-10: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import hashlib

import numpy as np

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
NUMBERS_CHUNK = 1 << 16  # ten rounds take about 150 bytes per number


def philox(counters: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Ten rounds of Philox 4x32: uint32 counters [N, 4] and keys [N, 2] to uint32 numbers [N, 4]."""
    c0, c1, c2, c3 = (counters[:, i].astype(np.uint64) for i in range(4))
    k0, k1 = (keys[:, i].astype(np.uint64) for i in range(2))
    for _ in range(10):
        product0, product1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (product1 >> _HALF) ^ c1 ^ k0, product1 & _LOW, (product0 >> _HALF) ^ c3 ^ k1, product0 & _LOW
        k0, k1 = (k0 + np.uint64(_WEYL[0])) & _LOW, (k1 + np.uint64(_WEYL[1])) & _LOW
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


def uniforms(keys: np.ndarray, draws: np.ndarray, tokens: np.ndarray, stream: int) -> np.ndarray:
    """Uniform float64 numbers in [0, 1), one for each (key, draw, token); 53 random bits each.

    Parameters
    ----------
    keys : uint64 [N]
        From `target_key` or `item_key`.
    draws, tokens : integer [N]
        Index of the draw, and of the token in its target (0 for numbers that belong to the whole draw).
    stream : int
        Separates uses that must not share numbers.
    """
    numbers = np.empty(len(keys))
    for start in range(0, len(keys), NUMBERS_CHUNK):
        chosen = slice(start, start + NUMBERS_CHUNK)
        counters = np.zeros((len(keys[chosen]), 4), dtype=np.uint32)
        counters[:, 0], counters[:, 1], counters[:, 2] = tokens[chosen], draws[chosen], stream
        halves = np.stack([keys[chosen] & _LOW, keys[chosen] >> _HALF], axis=1).astype(np.uint32)
        words = philox(counters, halves).astype(np.uint64)
        numbers[chosen] = (((words[:, 0] << _HALF) | words[:, 1]) >> np.uint64(11)) * 2.0**-53
    return numbers


def item_key(seed: int, item: str, stream: int = 0) -> int:
    """64-bit key of all targets of an item under a seed: they share masks. Each `stream` has keys of its own."""
    digest = hashlib.blake2b(seed.to_bytes(16, "little", signed=True), digest_size=8, person=b"item")
    digest.update(stream.to_bytes(4, "little") + item.encode("utf-8"))
    return int.from_bytes(digest.digest(), "little")


def target_key(seed: int, target_ids: np.ndarray) -> int:
    """64-bit key of a target under a seed. It does not depend on the context: directions and systems share masks."""
    digest = hashlib.blake2b(seed.to_bytes(16, "little", signed=True), digest_size=8)
    digest.update(np.ascontiguousarray(target_ids, dtype="<i4").tobytes())
    return int.from_bytes(digest.digest(), "little")
