"""An autoregressive surrogate: the network at block size 1, fine-tuned on samples from the block model."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch

from diffscore_fast.backbones.config import EMBEDDED_MODELS
from diffscore_fast.backbones.loader import load_model
from diffscore_fast.bounds.sampling import sample_token_arrays
from diffscore_fast.engine.runner import Runner
from diffscore_fast.training.corpus import Corpus
from diffscore_fast.training.examples import Mixture
from diffscore_fast.training.optimiser import Schedule
from diffscore_fast.training.trainer import Settings, Trainer


def train_surrogate(
    model: str, block_size: int, out: Path, *, samples: int, tokens: int, steps: int, seed: int, rate: float = 5e-5
) -> None:
    """Sample texts from the block model, learn them left to right, and write a model folder.

    Parameters
    ----------
    model : str
        The block model: an embedded one by name, or a folder.
    block_size : int
    out : Path
        The model folder to write, for `NetworkSurrogate`.
    samples, tokens : int
        Texts to sample, and tokens of each.
    steps : int
        Training steps.
    seed : int
    rate : float
        Learning rate of the body; the head's is twice it.
    """
    folder = EMBEDDED_MODELS.get(model, Path(model))
    backbone = load_model(folder, dtype=torch.float32).bert
    texts = sample_token_arrays(Runner(backbone), block_size, count=samples, tokens=tokens, seed=seed)
    # Every text is an article of one paragraph of one sentence.
    offsets, single = np.arange(samples + 1) * tokens, np.arange(samples + 1)
    corpus = Corpus(texts.ravel().astype(np.uint16), offsets, single, single, 0, samples)
    settings = Settings(
        seed=seed,
        mixture=Mixture(patterns={"block": 1.0}, block_sizes={1: 1.0}, run_lengths=(tokens, tokens)),
        schedule=Schedule(head=2 * rate, body=rate, embeddings=rate, head_steps=0, warmup_steps=max(1, steps // 5)),
    )
    with tempfile.TemporaryDirectory() as scratch:
        trainer = Trainer(backbone, folder, corpus, corpus, Path(scratch), settings)
        for _ in range(steps):
            trainer.step()
        trainer.save()
        shutil.copytree(Path(scratch) / "checkpoint" / "model", out, dirs_exist_ok=True)
