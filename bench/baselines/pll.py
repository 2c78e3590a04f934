"""Pseudo-log-likelihood (Salazar and others, arXiv 1910.14659): each token is masked alone, in a pass of its own."""

from __future__ import annotations

import numpy as np
import torch
from transformers import BertForMaskedLM


class PseudoLogLikelihood:
    """Mean log-probability of a candidate's tokens, each masked alone; only masked rows are projected.

    Parameters
    ----------
    model : BertForMaskedLM
    start_id, mask_id : int
    batch : int
        Masked copies in one forward pass.
    """

    def __init__(self, model: BertForMaskedLM, start_id: int, mask_id: int, batch: int) -> None:
        self._model, self._start_id, self._mask_id, self._batch = model, start_id, mask_id, batch

    @torch.inference_mode()
    def score(self, sources: list[np.ndarray], candidates: list[np.ndarray]) -> np.ndarray:
        """Mean log-probability in nats per token of token ids, float64 [n]."""
        scores = []
        for source, candidate in zip(sources, candidates, strict=True):
            line = torch.from_numpy(np.concatenate([[self._start_id], source, candidate]).astype(np.int64))
            values = []
            for places in torch.arange(1 + len(source), len(line)).split(self._batch):
                rows = torch.arange(len(places))
                noisy = line.repeat(len(places), 1)
                noisy[rows, places] = self._mask_id
                hidden = self._model.bert(input_ids=noisy).last_hidden_state[rows, places]
                log_probs = self._model.cls(hidden).float().log_softmax(dim=-1)
                values += log_probs[rows, line[places]].tolist()
            scores.append(np.mean(values))
        return np.array(scores)
