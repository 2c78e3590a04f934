"""Autoregressive surrogates for the tangent upper bound: functions from token arrays to per-token log-probabilities."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from diffscore_fast.bounds.autoregressive import autoregressive_log_probs
from diffscore_fast.engine.plan import AttentionPattern, Sequences
from diffscore_fast.engine.session import ScoringModel
from diffscore_fast.errors import InputError


class NetworkSurrogate(ScoringModel):
    """Another model of the package at block size 1, such as one fine-tuned on samples from the block model
    (`python -m diffscore_fast.training surrogate`).

    Parameters
    ----------
    model : str or Path
        A model folder with the tokenizer of the model that is bounded; token ids are taken as they come.
    options
        As for `ScoringModel`.
    """

    def __init__(self, model: str | Path, **options: Any) -> None:
        super().__init__(model, attention=AttentionPattern("block", 1), **options)
        del self._arguments["attention"]
        self.name = f"NetworkSurrogate({self._identity['weights']})"

    def __call__(self, ids: list[np.ndarray]) -> list[np.ndarray]:
        """Log-probability of every token given those before it; one float64 array a text."""
        if max(int(item.max()) for item in ids) >= self.spec.vocab_size:
            raise InputError(
                f"surrogate {self.spec.name!r} has {self.spec.vocab_size} tokens, fewer than the texts use"
            )
        longest, room = max(len(item) for item in ids), self._room("block", 1)
        if longest > room:
            raise InputError(f"surrogate {self.spec.name!r} takes {room} tokens, a text has {longest}")
        sequences = Sequences.build([np.zeros(0, np.int32)], np.zeros(len(ids), np.int64), ids)
        return np.split(autoregressive_log_probs(self._runner, sequences), sequences.target_offsets[1:-1])


class CausalSurrogate:
    """A Hugging Face causal language model with the same token ids.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Called with `input_ids` [1, L + 1]; its logits at place i predict token i + 1.
    start_id : int
        Token put before each text, so that its first token is predicted, too.
    name : str
        What signatures call it.
    """

    def __init__(self, model: Any, start_id: int, name: str) -> None:
        self._model, self._start_id = model.eval(), start_id
        self.name = f"CausalSurrogate({name})"

    @torch.inference_mode()
    def __call__(self, ids: list[np.ndarray]) -> list[np.ndarray]:
        """Log-probability of every token given those before it; one float64 array a text."""
        out = []
        for item in ids:
            line = torch.tensor([[self._start_id, *item.tolist()]], device=self._model.device)
            logits = self._model(input_ids=line).logits[0, :-1].float()
            log_probs = logits.log_softmax(dim=1).gather(1, line[0, 1:, None]).squeeze(1)
            out.append(log_probs.double().cpu().numpy())
        return out
