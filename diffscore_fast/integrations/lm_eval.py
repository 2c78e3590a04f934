"""Models of diffscore_fast in lm-evaluation-harness 0.4.13: `python -m diffscore_fast.integrations.lm_eval run ...`.

The harness finds models of other packages by import only: this command registers ours as `diffscore`, and then is the
harness's own command.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from diffscore_fast.bounds.autoregressive import LeftToRight, left_to_right
from diffscore_fast.errors import InputError
from diffscore_fast.options import DTYPES
from diffscore_fast.scoring.scorer import DiffScorer

LIKELIHOODS = ("left-to-right", "elbo")
TOKENS_TOGETHER = 1 << 14
DEFAULT_ELBO_DRAWS = 64


@register_model("diffscore")
class DiffScoreLM(TemplateLM):
    """A model for tasks that compare likelihoods.

    Parameters
    ----------
    model : str
        As for `DiffScorer`.
    likelihood : {"left-to-right", "elbo"}
        `left-to-right`: every token given those before it, for models that read blocks of one token. `elbo`: a lower
        bound on log p(continuation | context) from masked tokens; whether the model would have generated the
        continuation is not known then, and never said.
    draws : int
        K of the bound.
    seed : int
        Of its masks.
    dtype : str
    device : str
    options
        Not used: what the harness gives to every model (`batch_size`, ...); a number changes with none of them.

    Raises
    ------
    InputError
        For an unknown option, or a model that does not read from left to right.
    """

    def __init__(
        self,
        model: str = "mini",
        likelihood: Literal["left-to-right", "elbo"] = "left-to-right",
        draws: int = DEFAULT_ELBO_DRAWS,
        seed: int = 0,
        dtype: str = "float32",
        device: str = "cpu",
        **options: Any,
    ) -> None:
        super().__init__()
        unknown = sorted(options.keys() - {"batch_size", "max_batch_size", "trust_remote_code"})
        if unknown:
            raise InputError(
                f"model_args has no option {unknown[0]!r}; it has model, likelihood, draws, seed and dtype"
            )
        if likelihood not in LIKELIHOODS:
            raise InputError(f"likelihood {likelihood!r} is unknown; use {' or '.join(LIKELIHOODS)}")
        if dtype not in DTYPES or dtype == "int8":
            raise InputError(f"dtype {dtype!r} gives no likelihood; use float32, bfloat16 or float16")
        if device.startswith("cuda") and not torch.cuda.is_available():
            device = "cpu"  # the harness asks for a GPU unless the user names a device
        self._scorer = DiffScorer(model, device=device, dtype=getattr(torch, dtype))
        self._likelihood, self._draws, self._seed = likelihood, int(draws), int(seed)
        spec = self._scorer.spec
        if likelihood == "left-to-right":
            if "block" not in spec.patterns or 1 not in spec.patterns["block"].block_sizes:
                raise InputError(f"model {spec.name!r} does not read from left to right; use likelihood=elbo")
            if spec.start_id is None:
                raise InputError(f"model {spec.name!r} has no start token, so that it cannot predict a first token")
            self._room = spec.patterns["block"].position_limit - 2  # without the start token and the token after

    @property
    def eot_token_id(self) -> int:
        """The token before every text."""
        return self._scorer.spec.start_id  # type: ignore[return-value]

    @property
    def tokenizer_name(self) -> str:
        """What the harness's cache of requests is named after."""
        return self._scorer.tokenizer.sha256

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **options: Any) -> list[int]:
        """Token ids of a text, without control tokens."""
        return self._scorer.tokenizer.encode([string], keep_blank=True, spans=False)[0].ids.tolist()

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """log p(continuation | context), and whether the continuation is the most probable one at every token."""
        if self._likelihood == "left-to-right":
            return super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        pairs = [request.args for request in requests]
        found = np.zeros(len(pairs))
        for given in (True, False):  # a text alone is marginal
            rows = [row for row, (context, _) in enumerate(pairs) if bool(context.strip()) == given]
            contexts = [pairs[row][0] for row in rows] if given else None
            found[rows] = self._elbo(contexts, [pairs[row][1] for row in rows])
        return [(float(value), False) for value in found]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """log p(text) of whole texts. From left to right a long text is read in windows, as the harness cuts them."""
        texts = [request.args[0] for request in requests]
        if self._likelihood == "elbo":
            return self._elbo(None, texts).tolist()
        parts: list[tuple[tuple[str, str], list[int], list[int]]] = []
        owners: list[int] = []
        for row, text in enumerate(texts):
            windows = get_rolling_token_windows(self.tok_encode(text), self.eot_token_id, self._room, 1)
            for context, target in map(make_disjoint_window, windows):
                parts.append((("", ""), context, target))
                owners.append(row)
        values = [value for value, _ in self._loglikelihood_tokens(parts)]
        return np.bincount(owners, weights=values, minlength=len(texts)).tolist()

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Refused: this package scores texts, and writes none."""
        raise NotImplementedError("diffscore_fast scores texts and writes none; choose tasks of loglikelihood type")

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **options: Any
    ) -> list[tuple[float, bool]]:
        found = []
        for (pair, _, target), read in zip(requests, self._read(requests), strict=True):
            own = slice(len(read.log_probs) - len(target), len(read.log_probs))
            value = float(read.log_probs[own].sum())
            if not np.isfinite(value):
                raise InputError(f"the model gives no probability to the continuation {pair[1][:80]!r}")
            found.append((value, bool((read.best[own] == target).all())))
        return found

    def _read(self, requests: list[tuple[tuple[str, str], list[int], list[int]]]) -> Iterator[LeftToRight]:
        """The texts from left to right, some at a time; of a long context the beginning is left out."""
        waiting: list[np.ndarray] = []
        for pair, context, target in requests:
            if len(target) > self._room:
                raise InputError(
                    f"the continuation {pair[1][:80]!r} has {len(target)} tokens, the model takes {self._room}"
                )
            before = context[1:] if context[:1] == [self.eot_token_id] else context
            ids = np.array([*before, *target], dtype=np.int32)
            waiting.append(ids[max(len(ids) - self._room, 0) :])
            if sum(map(len, waiting)) >= TOKENS_TOGETHER:
                yield from left_to_right(self._scorer.runner, waiting)
                waiting = []
        if waiting:
            yield from left_to_right(self._scorer.runner, waiting)

    def _elbo(self, contexts: list[str] | None, texts: list[str]) -> np.ndarray:
        table = self._scorer.score(
            contexts,
            texts,
            direction="marginal" if contexts is None else "conditional",
            estimator="elbo",
            draws=self._draws,
            mask_ratios="stratified",
            seed=self._seed,
        )
        for text, status, message in zip(texts, table.status, table.messages, strict=True):
            if status != "ok":
                raise InputError(f"no likelihood for {text[:80]!r}: {message}")
        return table.nats


def main() -> None:
    """The harness's command, with the model `diffscore`."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
