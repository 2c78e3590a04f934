"""The published DiffScore procedure as its users run it, on the embedded model's weights in transformers."""

from __future__ import annotations

import numpy as np
import torch
from transformers import BertForMaskedLM

from diffscore_fast.backbones.load import EMBEDDED_MODELS


def load_embedded(dtype: torch.dtype = torch.float32) -> BertForMaskedLM:
    """The embedded model in transformers."""
    return BertForMaskedLM.from_pretrained(EMBEDDED_MODELS["mini"], dtype=dtype).eval()


class Naive:
    """Candidate by candidate: draws in small batches, the full sequence, every position projected, log-softmax.

    Parameters
    ----------
    model : BertForMaskedLM
    start_id, mask_id : int
    batch : int
        Draws in one forward pass.
    """

    def __init__(self, model: BertForMaskedLM, start_id: int, mask_id: int, batch: int) -> None:
        self._model, self._start_id, self._mask_id, self._batch = model, start_id, mask_id, batch

    @torch.inference_mode()
    def score(self, sources: list[np.ndarray], candidates: list[np.ndarray], masks: list[np.ndarray]) -> np.ndarray:
        """S(candidate | source) for token ids and masks bool [K, L] a row; float64 [n]."""
        scores = []
        for source, candidate, masked in zip(sources, candidates, masks, strict=True):
            line = torch.from_numpy(np.concatenate([[self._start_id], source, candidate]).astype(np.int64))
            first, flags = 1 + len(source), torch.from_numpy(masked)
            draws = []
            for draw in flags.split(self._batch):
                noisy = line.repeat(len(draw), 1)
                noisy[:, first:][draw] = self._mask_id
                log_probs = self._model(input_ids=noisy).logits.float().log_softmax(dim=-1)
                of_target = log_probs[:, first:].gather(2, line[first:].expand(len(draw), -1)[:, :, None]).squeeze(2)
                draws += (of_target.masked_fill(~draw, 0.0).sum(1) / draw.sum(1)).tolist()
            scores.append(np.mean(draws))
        return np.array(scores)
