"""What the benches need from a `DiffScorer` beyond scores: token ids, an empty cache, the network, the runner."""

from __future__ import annotations

import numpy as np

from diffscore_fast import DiffScorer
from diffscore_fast.backbones.bert import BertBackbone
from diffscore_fast.engine.runner import Runner


def tokenize(scorer: DiffScorer, texts: list[str]) -> list[np.ndarray]:
    """Token ids int32 [L] of each text, without control tokens."""
    return [item.ids for item in scorer._tokenizer.encode(texts)]


def clear_cache(scorer: DiffScorer) -> None:
    """Forget all cached prefixes."""
    scorer._runner._cache.forget()


def runner_of(scorer: DiffScorer) -> Runner:
    return scorer._runner


def bert_of(scorer: DiffScorer) -> BertBackbone:
    """The network of a scorer whose model is a BERT."""
    backbone = scorer._runner.backbone
    assert isinstance(backbone, BertBackbone)
    return backbone
