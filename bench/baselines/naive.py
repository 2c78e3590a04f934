"""The published DiffScore procedure as its users run it, on the embedded model's weights in transformers."""

from __future__ import annotations

import numpy as np
import torch
from transformers import BertConfig, BertForMaskedLM

from diffscore_fast.backbones.bert import BertBackbone, BertLayer
from diffscore_fast.backbones.bert_families import state_in_bert_layout


def in_transformers(backbone: BertBackbone) -> BertForMaskedLM:
    """The same network in transformers, with the loaded weights (a file may store them in eight bits)."""
    spec, layer = backbone.spec, backbone.layers[0]
    assert isinstance(layer, BertLayer)
    model = BertForMaskedLM(
        BertConfig(
            vocab_size=spec.vocab_size,
            hidden_size=spec.hidden_size,
            num_hidden_layers=spec.num_layers,
            num_attention_heads=spec.num_heads,
            intermediate_size=layer.up.out_features,  # type: ignore[union-attr]
            max_position_embeddings=backbone.position_embedding.num_embeddings,
            type_vocab_size=backbone.type_embedding.num_embeddings,
            layer_norm_eps=backbone.embedding_norm.eps,
        )
    )
    lacking = model.load_state_dict(state_in_bert_layout(backbone), strict=False)
    assert not lacking.unexpected_keys and all("decoder" in name for name in lacking.missing_keys)  # tied copies
    return model.to(dtype=backbone.dtype).eval()  # type: ignore[call-arg]


class Naive:
    """One candidate at a time: small batches of draws, the full sequence, every position projected, log-softmax.

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
        """S(candidate | source) in nats per token, float64 [n], for token ids and masks bool [K, L] per row."""
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
