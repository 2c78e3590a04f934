"""The numbers of a fixed sample, as they were when tests/data/numbers.json was written.

`python -m bench.same_numbers --write` writes that file anew: only together with a change that is meant to move numbers.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from bench.same_numbers import EXPECTED, SMALL, sample

NUMBERS = json.loads(EXPECTED.read_text(encoding="utf-8"))
TOLERANCE = 1e-5  # nats per token, in float32
TOLERANCE_BFLOAT16 = 5e-3
MIN_TOKENS = 9  # of the texts that are bounded; bounds are in nats per text


@pytest.fixture(scope="module")
def found() -> dict[str, list[float]]:
    return sample(SMALL)


def test_the_sample_has_these_kinds(found):
    assert list(found) == list(NUMBERS)


@pytest.mark.parametrize("kind", NUMBERS)
def test_numbers_are_those_that_were_written(found, kind):
    expected = np.array(NUMBERS[kind], dtype=np.float64)  # null is NaN
    tolerance = TOLERANCE_BFLOAT16 if kind == "bfloat16" else TOLERANCE
    tokens = MIN_TOKENS if kind.startswith("bounds") else 1
    np.testing.assert_allclose(found[kind], expected, rtol=0, atol=tolerance * tokens)
