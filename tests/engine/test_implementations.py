"""Every implementation that can run here gives the engine the same numbers; the others say why not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from diffscore_fast import DiffScorer, ops
from diffscore_fast.errors import ImplementationError


@pytest.mark.parametrize("name", ["reference", "cpu", "triton"])
def test_a_scorer_runs_by_the_implementation_that_is_named(mini, name):
    reason = ops.MASKED_LOGPROB.implementations[name].unavailable(mini._runner.backbone.device)
    if reason is not None:
        with pytest.raises(ImplementationError, match="cannot run"):
            DiffScorer("mini", implementation=name)
        return
    named = DiffScorer("mini", implementation=name, dtype=torch.float32)
    options = dict(direction="conditional", draws=1)
    table = named.score(["The cat sat on the mat."], ["A cat sat."], **options)
    assert table.signature.implementation == name
    expected = mini.score(["The cat sat on the mat."], ["A cat sat."], **options)
    np.testing.assert_allclose(table.scores, expected.scores, atol=1e-5)


def test_the_body_takes_what_it_has_in_the_type_of_the_weights():
    """Its products have no C++ path for bfloat16: the signature says what runs instead."""
    texts = ["The cat sat on the mat."], ["A cat sat."]
    half = DiffScorer("mini", implementation="cpu", dtype=torch.bfloat16).score(*texts, draws=1)
    assert half.signature.implementation == "masked_logprob=cpu,prefix_attention=cpu,linear=reference"
    assert half.scores == pytest.approx(DiffScorer("mini").score(*texts, draws=1).scores, abs=0.2)
