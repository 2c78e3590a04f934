"""Whole rows on a GPU, through tokenizer, packs and kernels, against the CPU's scores."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from bench.gpu_cases import example_columns
from bench.tiny_model import tiny_model
from diffscore_fast import DiffScorer
from tests.support.gpu import DEVICE, DTYPES, INTERPRETED, SIZES, needs_gpu

pytestmark = needs_gpu
# Nats per token between a GPU's score and the CPU's float32 score; 16-bit types round hidden states.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str | Path:
    # In the interpreter the embedded model would take hours.
    return tiny_model(tmp_path_factory.mktemp("tiny")) if INTERPRETED else "mini"


@pytest.fixture(scope="module")
def columns() -> list[list[str]]:
    """Sources and candidates."""
    return example_columns(SIZES)


@pytest.fixture(scope="module")
def scores_of_cpu(model: str | Path, columns: list[list[str]]) -> np.ndarray:
    scorer = DiffScorer(model, dtype=torch.float32, implementation="reference")
    return scorer.score(*columns, draws=SIZES.draws).scores


@pytest.mark.parametrize("dtype", [torch.float32] if INTERPRETED else DTYPES, ids=str)
@pytest.mark.parametrize("pack", SIZES.packs)
def test_scores_are_those_of_the_cpu(model, columns, scores_of_cpu, pack, dtype):
    scorer = DiffScorer(model, device=DEVICE, dtype=dtype, token_budget=pack, implementation="triton")
    scores = scorer.score(*columns, draws=SIZES.draws).scores
    np.testing.assert_allclose(scores, scores_of_cpu, rtol=0, atol=TOLERANCE[dtype])
