"""Every implementation that can run here gives the engine the same numbers; the others say why not."""

from __future__ import annotations

import numpy as np
import pytest

from diffscore_fast import DiffScorer, ops
from diffscore_fast.errors import ImplementationError


@pytest.mark.parametrize("name", ["reference", "cpu", "triton"])
def test_a_scorer_runs_by_the_implementation_that_is_named(mini, name):
    reason = ops.MASKED_LOGPROB.implementations[name].unavailable(mini._runner.backbone.device)
    if reason is not None:
        with pytest.raises(ImplementationError, match="cannot run"):
            DiffScorer("mini", implementation=name)
        return
    named = DiffScorer("mini", implementation=name)
    options = dict(direction="conditional", draws=1)
    table = named.score(["The cat sat on the mat."], ["A cat sat."], **options)
    assert table.signature.implementation == name
    expected = mini.score(["The cat sat on the mat."], ["A cat sat."], **options)
    np.testing.assert_allclose(table.scores, expected.scores, atol=1e-5)
