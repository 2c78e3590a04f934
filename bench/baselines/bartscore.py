"""BARTScore (arXiv 2106.11520): mean log-probability of the candidate under a sequence-to-sequence model."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import BartConfig, BartForConditionalGeneration

PAD, START, END = 1, 2, 2  # BART's own ids: decoders start with the end token
MAX_TOKENS = 1024
TUNED_BATCH_TOKENS = 8192  # padded source tokens per batch


def bart_like(size: str, vocab_size: int) -> BartForConditionalGeneration:
    """A randomly initialised BART; speed does not depend on the weights.

    `size` "equal": the embedded model's width and vocabulary, with a feed-forward width that gives the same number of
    parameters. "large": BART-large's shape.
    """
    shape = {
        "equal": {"d_model": 768, "layers": 2, "heads": 12, "ffn": 2304, "vocab_size": vocab_size},
        "large": {"d_model": 1024, "layers": 12, "heads": 16, "ffn": 4096, "vocab_size": 50265},
    }[size]
    torch.manual_seed(0)
    return BartForConditionalGeneration(
        BartConfig(
            vocab_size=shape["vocab_size"],
            d_model=shape["d_model"],
            encoder_layers=shape["layers"],
            decoder_layers=shape["layers"],
            encoder_attention_heads=shape["heads"],
            decoder_attention_heads=shape["heads"],
            encoder_ffn_dim=shape["ffn"],
            decoder_ffn_dim=shape["ffn"],
            max_position_embeddings=MAX_TOKENS,
        )
    ).eval()


class BartScore:
    """As published: rows in order, batches of 4, logits of every position, log-softmax.

    Tuned: rows sorted by length, batches of many tokens, logits of the candidates' real tokens only.
    The input is token ids, so that every method reads the same number of tokens.
    """

    def __init__(self, model: BartForConditionalGeneration, *, tuned: bool, batch: int = 4) -> None:
        self._model, self._tuned, self._batch = model, tuned, batch

    @torch.inference_mode()
    def score(self, sources: list[np.ndarray], candidates: list[np.ndarray]) -> np.ndarray:
        """Mean log-probability in nats per token, float64 [n]."""
        sources = [np.concatenate([[0], item[: MAX_TOKENS - 2], [END]]) for item in sources]
        candidates = [np.concatenate([[0], item[: MAX_TOKENS - 2], [END]]) for item in candidates]
        scores = np.zeros(len(sources))
        for chosen in self._batches(sources, candidates):
            source = _padded([sources[i] for i in chosen])
            target = _padded([candidates[i] for i in chosen])
            decoder = torch.cat([torch.full((len(chosen), 1), START), target[:, :-1]], dim=1)
            known = target != PAD
            inputs = {"input_ids": source, "attention_mask": (source != PAD).long(), "decoder_input_ids": decoder}
            per_token = self._needed(inputs, target, known) if self._tuned else self._all(inputs, target)
            scores[chosen] = (per_token.masked_fill(~known, 0.0).sum(1) / known.sum(1)).double().numpy()
        return scores

    def _batches(self, sources: list[np.ndarray], candidates: list[np.ndarray]) -> list[list[int]]:
        if not self._tuned:
            return [list(range(at, min(at + self._batch, len(sources)))) for at in range(0, len(sources), self._batch)]
        order = sorted(range(len(sources)), key=lambda i: (-len(sources[i]), -len(candidates[i])))
        batches: list[list[int]] = [[]]
        for row in order:
            if batches[-1] and len(sources[batches[-1][0]]) * (len(batches[-1]) + 1) > TUNED_BATCH_TOKENS:
                batches.append([])
            batches[-1].append(row)
        return batches

    def _all(self, inputs: dict[str, Tensor], target: Tensor) -> Tensor:
        log_probs = self._model(**inputs).logits.float().log_softmax(dim=-1)
        return log_probs.gather(2, target[:, :, None]).squeeze(2)

    def _needed(self, inputs: dict[str, Tensor], target: Tensor, known: Tensor) -> Tensor:
        hidden = self._model.model(**inputs).last_hidden_state
        logits = self._model.lm_head(hidden[known]) + self._model.final_logits_bias
        values = -functional.cross_entropy(logits.float(), target[known], reduction="none")
        return torch.zeros(known.shape).masked_scatter(known, values)


def _padded(rows: list[np.ndarray]) -> Tensor:
    tensors = [torch.from_numpy(row.astype(np.int64)) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=PAD)
