"""Surrogates for the upper bound that are other models: functions from token arrays to log-probabilities per token.

Two ready ones, and what `LikelihoodBounds` needs to use any such function.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from diffscore_fast.bounds.autoregressive import autoregressive_log_probs
from diffscore_fast.engine.plan import AttentionPattern, Sequences
from diffscore_fast.engine.session import ScoringModel
from diffscore_fast.errors import InputError


class NetworkSurrogate(ScoringModel):
    """Another block model at block size 1, such as one fine-tuned on samples from the model that is bounded.

    `python -m diffscore_fast.training surrogate` makes such a model.

    Parameters
    ----------
    model : str or Path
        A model folder. It must have the tokenizer of the model that is bounded: token ids are used unchanged.
    options
        As for `ScoringModel`.
    """

    def __init__(self, model: str | Path, **options: Any) -> None:
        super().__init__(model, attention=AttentionPattern("block", 1), **options)
        del self._arguments["attention"]
        self.name = f"NetworkSurrogate({self._identity['weights']})"

    def __call__(self, ids: list[np.ndarray]) -> list[np.ndarray]:
        """Log-probability of every token given the tokens before it; one float64 array per text."""
        if max(int(item.max()) for item in ids) >= self.spec.vocab_size:
            raise InputError(
                f"surrogate {self.spec.name!r} has {self.spec.vocab_size} tokens, fewer than the texts use"
            )
        max_length, room = max(len(item) for item in ids), self._room("block", 1)
        if max_length > room:
            raise InputError(f"surrogate {self.spec.name!r} takes {room} tokens, a text has {max_length}")
        sequences = Sequences.build([np.zeros(0, np.int32)], np.zeros(len(ids), np.int64), ids)
        return np.split(autoregressive_log_probs(self._runner, sequences), sequences.target_offsets[1:-1])


class CausalSurrogate:
    """A causal language model of Hugging Face transformers with the same token ids.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Called with `input_ids` [1, L + 1]; its logits at place i predict token i + 1.
    start_id : int
        Token that is put before each text, so that its first token is predicted as well.
    name : str
        Its name in signatures.
    """

    def __init__(self, model: Any, start_id: int, name: str) -> None:
        self._model, self._start_id = model.eval(), start_id
        self.name = f"CausalSurrogate({name})"

    @torch.inference_mode()
    def __call__(self, ids: list[np.ndarray]) -> list[np.ndarray]:
        """Log-probability of every token given the tokens before it; one float64 array per text."""
        out = []
        for item in ids:
            line = torch.tensor([[self._start_id, *item.tolist()]], device=self._model.device)
            logits = self._model(input_ids=line).logits[0, :-1].float()
            log_probs = logits.log_softmax(dim=1).gather(1, line[0, 1:, None]).squeeze(1)
            out.append(log_probs.double().cpu().numpy())
        return out


def surrogate_name(surrogate: Callable[..., Any]) -> str:
    """The name of a user's function in signatures: its attribute `name`, or its module and qualified name.

    Raises
    ------
    InputError
        If it has neither. Two lambdas, or two objects of one class, would share one name.
    """
    if isinstance(name := getattr(surrogate, "name", None), str):
        return name
    qualified = getattr(surrogate, "__qualname__", "<object>")
    if "<" in qualified:
        raise InputError(
            "the surrogate is a lambda, a local function or an object, which has no name for the signature; give it "
            "an attribute `name` that says what it computes, or define the function at the top of a module"
        )
    return f"{surrogate.__module__}.{qualified}"


def surrogate_log_probs(surrogate: Callable[[list[np.ndarray]], list[np.ndarray]], ids: list[np.ndarray]) -> np.ndarray:
    """Log-probabilities of all tokens from a user's function, float64 [tokens of all texts].

    Raises
    ------
    InputError
        If it returns arrays of other shapes, NaN, or a value above 0.
    """
    if not ids:
        return np.zeros(0)
    answers = [np.asarray(item, dtype=np.float64) for item in surrogate(ids)]
    if [item.shape for item in answers] != [item.shape for item in ids]:
        raise InputError("the surrogate must return one array per text, with the log-probability of each token")
    flat = np.concatenate(answers)
    if np.isnan(flat).any() or (flat > 0).any():
        raise InputError("the surrogate returned NaN or a number above 0, which is not a log-probability")
    return flat
