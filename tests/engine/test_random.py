"""Counter-based random numbers: the published known answers, and dependence on the key alone."""

from __future__ import annotations

import numpy as np
import pytest

from diffscore_fast.engine.random import philox, target_key, uniforms

# Known-answer vectors of the Random123 distribution (kat_vectors: philox4x32 10).
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_philox_known_answers(counter, key, answer):
    out = philox(np.array([counter], dtype=np.uint32), np.array([key], dtype=np.uint32))
    assert tuple(out[0]) == answer


def test_numbers_do_not_depend_on_others_of_the_same_call():
    keys = np.array([5, 9, 5], dtype=np.uint64)
    draws, tokens = np.array([0, 1, 7]), np.array([3, 2, 1])
    together = uniforms(keys, draws, tokens, 1)
    alone = [uniforms(keys[i : i + 1], draws[i : i + 1], tokens[i : i + 1], 1)[0] for i in range(3)]
    assert together.tolist() == alone
    assert together[0] != uniforms(keys, draws, tokens, 2)[0]


def test_numbers_are_uniform():
    count = 200_000
    numbers = uniforms(np.full(count, 77, np.uint64), np.arange(count) // 100, np.arange(count) % 100, 1)
    assert numbers.min() >= 0 and numbers.max() < 1
    counts = np.histogram(numbers, bins=50, range=(0, 1))[0]
    chi_square = ((counts - count / 50) ** 2 / (count / 50)).sum()
    assert chi_square < 49 + 5 * np.sqrt(2 * 49)


def test_key_depends_on_seed_and_tokens():
    ids = np.array([4, 5, 6], dtype=np.int32)
    assert target_key(0, ids) == target_key(0, ids.astype(np.int64))
    assert len({target_key(0, ids), target_key(1, ids), target_key(-1, ids), target_key(0, ids[:2])}) == 4
