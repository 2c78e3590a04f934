"""Every implementation that can run here gives the engine the same numbers; the others say why not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from diffscore_fast import DiffScorer, ops
from diffscore_fast.errors import ImplementationError


@pytest.mark.parametrize("name", ["reference", "cpu", "triton"])
def test_a_scorer_runs_by_the_named_implementation(mini, name):
    reason = ops.MASKED_LOGPROB.implementations[name].unavailable(mini.backbone.device)
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


def test_the_body_runs_by_its_own_implementation_in_the_dtype_of_the_weights():
    """ "cpu" is the C++ kernel in every dtype, which the signature states."""
    texts = ["The cat sat on the mat."], ["A cat sat."]
    half = DiffScorer("mini", implementation="cpu", dtype=torch.bfloat16).score(*texts, draws=1)
    assert half.signature.implementation == "cpu"
    assert half.scores == pytest.approx(DiffScorer("mini", dtype=torch.float32).score(*texts, draws=1).scores, abs=0.2)


@pytest.fixture
def flash_attention_by_reference(monkeypatch):
    """The reference under the name `flash_attn`: this tests which implementation is chosen, not its numbers."""
    slots = ops.PREFIX_ATTENTION.implementations
    monkeypatch.setitem(slots, "flash_attn", replace(slots["reference"], name="flash_attn"))


def test_operations_without_the_named_implementation_run_by_auto(flash_attention_by_reference):
    texts = ["The cat sat on the mat."], ["A cat sat."]
    named = DiffScorer("mini", implementation="flash_attn", dtype=torch.float32).score(*texts, draws=1)
    chosen = dict(part.split("=") for part in named.signature.implementation.split(","))
    assert chosen["prefix_attention"] == "flash_attn"
    assert chosen["masked_logprob"] == ops.MASKED_LOGPROB.resolve(torch.device("cpu")).name
    expected = DiffScorer("mini", dtype=torch.float32).score(*texts, draws=1)
    assert named.scores == pytest.approx(expected.scores, abs=1e-5)


def test_a_name_that_no_operation_has_is_refused():
    with pytest.raises(ImplementationError, match=r"'flashattn'; known are: auto, cpu, flash_attn, reference, triton"):
        DiffScorer("mini", implementation="flashattn")
