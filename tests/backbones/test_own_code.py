"""The engine against log-probabilities that the families' own modelling files gave (`tests/support/own_code.py`)."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from diffscore_fast.backbones.loader import load_model
from tests.support.own_code import CASES, KEPT, VALUES, engine_log_probs, masked_rows

EXPECTED = json.loads(VALUES.read_text())


def test_every_case_has_values():
    assert EXPECTED.keys() == CASES.keys()


@pytest.mark.parametrize("case", CASES)
def test_log_probs_equal_those_of_the_familys_own_code(case, tmp_path):
    save, attention = CASES[case]
    loaded = load_model(save(tmp_path / "model"), dtype=torch.float32)
    found = engine_log_probs(loaded, attention, masked_rows(loaded, KEPT))[:KEPT]
    expected = np.array(EXPECTED[case]["log_probs"])
    assert len(expected) == KEPT and expected.std() > 0.5
    np.testing.assert_allclose(found, expected, atol=2e-5)
