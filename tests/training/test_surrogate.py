"""The surrogate that is fine-tuned on samples."""

from __future__ import annotations

import numpy as np
import torch

from diffscore_fast.backbones.loader import load_model
from diffscore_fast.bounds.sampling import sample_token_arrays
from diffscore_fast.bounds.surrogates import NetworkSurrogate
from diffscore_fast.engine.runner import Runner
from diffscore_fast.training.surrogate import train_surrogate


def test_training_on_samples_moves_the_surrogate_towards_them(model_folder, tmp_path):
    """Left to right, the fine-tuned network likes the samples it learnt better than the untrained one."""
    options = dict(samples=10, tokens=11, seed=0)
    train_surrogate(str(model_folder), 4, tmp_path / "tuned", steps=80, rate=2e-3, **options)
    runner = Runner(load_model(model_folder, dtype=torch.float32).backbone)
    samples = list(sample_token_arrays(runner, 4, count=10, tokens=11, seed=0))
    before, after = (
        np.concatenate(NetworkSurrogate(folder)(samples)).mean() for folder in (model_folder, tmp_path / "tuned")
    )
    assert after > before
