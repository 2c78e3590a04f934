"""The numbers of a fixed sample, as they were when tests/data/numbers.json was written.

`python -m bench.same_numbers --write` writes that file anew: only together with a change that is meant to move numbers.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from bench.same_numbers import EXPECTED, SMALL, sample

NUMBERS = json.loads(EXPECTED.read_text(encoding="utf-8"))
# In nats per token. Processors add in different orders, so their sums differ by rounding.
TOLERANCE = 1e-5  # of scores and bounds, in float32: means over draws and tokens, in which rounding averages out
# Of profiles and token log-probs, which may rest on a single draw. A log-softmax over 30,522 entries, with logits in
# float32, lies up to 1.3e-5 from float64, and so two processors up to twice that from each other.
TOLERANCE_SINGLE = 3e-5
# Between processors that have units for bfloat16 and others. Both lie about 5e-3 from the float32 score of the sample,
# on either side; 8.8e-3 from each other was measured. Other masks would move the score by 0.1.
TOLERANCE_BFLOAT16 = 2e-2
MIN_TOKENS = 9  # of the texts that are bounded; bounds are in nats per text
NUM_MEANS = 2 * SMALL.rows  # a kind's scores and standard errors; profile and token log-probs follow


@pytest.fixture(scope="module")
def found() -> dict[str, list[float]]:
    return sample(SMALL)


def test_the_sample_has_these_kinds(found):
    assert list(found) == list(NUMBERS)


def tolerances(kind: str, count: int) -> np.ndarray:
    """Of each of the numbers of a kind, float64 [count]."""
    if kind == "bfloat16":
        return np.full(count, TOLERANCE_BFLOAT16)
    if kind.startswith("bounds"):
        return np.full(count, TOLERANCE * MIN_TOKENS)
    return np.where(np.arange(count) < NUM_MEANS, TOLERANCE, TOLERANCE_SINGLE)


@pytest.mark.parametrize("kind", NUMBERS)
def test_numbers_are_those_that_were_written(found, kind):
    expected = np.array(NUMBERS[kind], dtype=np.float64)  # null is NaN
    np.testing.assert_array_equal(np.isnan(found[kind]), np.isnan(expected))
    moved = np.abs(np.array(found[kind]) - expected)
    over = np.flatnonzero(moved > tolerances(kind, len(expected)))
    assert not over.size, f"numbers {over} of {kind} moved by {moved[over]}"
