"""The surrogate that is fine-tuned on samples."""

from __future__ import annotations

import numpy as np
import torch

from diffscore_fast.backbones.load import load_model
from diffscore_fast.engine.runner import Runner
from diffscore_fast.sampling import sample_token_arrays
from diffscore_fast.surrogates import NetworkSurrogate
from diffscore_fast.training.surrogate import train_surrogate


def test_training_on_samples_moves_the_surrogate_towards_them(model_folder, tmp_path):
    """Left to right, the fine-tuned network likes fresh samples of the block model better than the untrained one."""
    train_surrogate(str(model_folder), 4, tmp_path / "tuned", samples=40, tokens=11, steps=30, seed=0)
    runner = Runner(load_model(model_folder, dtype=torch.float32).backbone)
    fresh = list(sample_token_arrays(runner, 4, count=20, tokens=11, seed=9))
    before, after = (
        np.concatenate(NetworkSurrogate(folder)(fresh)).mean() for folder in (model_folder, tmp_path / "tuned")
    )
    assert after > before
