"""`/v1/completions` as OpenAI's clients send it for log-probs: left to right, every token given those before it.

Clients sum the log-probs of any last part of a prompt, and that sum must be log p(part | what is before it). Values at
block size 1 have this property by the chain rule. Scores under random masks and bounds do not, and are not offered.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Request
from pydantic import Field

from diffscore_fast.backbones.spec import BackboneSpec
from diffscore_fast.bounds.autoregressive import LeftToRight, left_to_right
from diffscore_fast.scoring.scorer import DiffScorer
from diffscore_fast.serving.answers import JSONAnswer, RefusedError
from diffscore_fast.serving.scores import Strict
from diffscore_fast.serving.service import Service
from diffscore_fast.status import OK
from diffscore_fast.text.checks import check_text
from diffscore_fast.text.tokenizer import TextTokenizer

router = APIRouter()
READINGS = 4  # of every token of a prompt: in the prefix, for the best token, for its log-prob and for the token's own

TokenId = Annotated[int, Field(ge=0)]


class CompletionsRequest(Strict):
    """What `local-completions` of lm-evaluation-harness sends, and what other clients add to it."""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    model: str | None = None  # named, and not opened: the service has one model
    max_tokens: int | None = None
    logprobs: Annotated[int, Field(ge=0)] | None = None
    echo: bool = False
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    n: Literal[1] | None = None
    best_of: Literal[1] | None = None
    stream: Literal[False] | None = None
    stop: str | list[str] | None = None
    user: str | None = None


@dataclass(frozen=True)
class ReadingWork:
    """Reads token ids int32 [L] from left to right."""

    scorer: DiffScorer

    def size(self, row: np.ndarray) -> int:
        """About how many tokens the model reads."""
        return READINGS * (len(row) + 1)

    def run(self, rows: list[np.ndarray], progress: Callable[[int], None]) -> list[LeftToRight]:
        """One reading per prompt."""
        return left_to_right(self.scorer.runner, rows, progress)


@router.post("/v1/completions", summary="Log-probs of prompts, left to right, and one more token")
async def completions(request: Request, asked: CompletionsRequest) -> JSONAnswer:
    """Every token's log-prob given those before it, and the most probable token after the prompt."""
    service: Service = request.app.state.service
    _check_model(service)
    _check_asked(asked)
    prompts = _Prompts(service.scorer.spec, service.scorer.tokenizer)
    listed = asked.prompt if isinstance(asked.prompt, list) else [asked.prompt]
    if listed and isinstance(listed[0], int):
        listed = [listed]  # type: ignore[list-item]
    service.check_rows(len(listed))
    read = [prompts.ids(index, item) for index, item in enumerate(listed)]
    results: list[LeftToRight] = await service.compute(
        ReadingWork(service.scorer), [prompts.without_start(ids) for ids in read]
    )
    service.count([OK] * len(results), sum(len(found.log_probs) for found in results))
    choices = [
        prompts.choice(index, ids, found, asked) for index, (ids, found) in enumerate(zip(read, results, strict=True))
    ]
    prompt_tokens, completion_tokens = sum(map(len, read)), len(read) * (asked.max_tokens or 0)
    return JSONAnswer(
        {
            "object": "text_completion",
            "model": service.scorer.spec.name,
            "choices": choices,
            "usage": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": completion_tokens,
                "total_tokens": prompt_tokens + completion_tokens,
            },
        }
    )


def _check_model(service: Service) -> None:
    """Refuse models whose values do not follow the chain rule, with the reason."""
    spec = service.scorer.spec
    if "block" not in spec.patterns or 1 not in spec.patterns["block"].block_sizes:
        raise RefusedError(
            400,
            f"model {spec.name!r} was not trained to predict one token after the other (attention block of size 1): "
            "its values for tokens do not add up to log p(part | what is before it); use /v1/scores or /v1/bounds",
        )
    if spec.start_id is None and spec.logit_shift:
        raise RefusedError(400, f"model {spec.name!r} has no start token, so that it cannot predict a first token")
    if service.dtype == "int8":
        raise RefusedError(400, "a model in int8 gives probabilities that add to 1 only nearly; use another dtype")


def _check_asked(asked: CompletionsRequest) -> None:
    if asked.max_tokens not in (0, 1):
        raise RefusedError(400, "this service scores, and generates at most one token; send max_tokens 0 or 1")
    if asked.max_tokens and asked.temperature not in (None, 0, 0.0):
        raise RefusedError(400, "the token is the most probable one; send temperature 0")
    if (asked.logprobs or 0) > 1:
        raise RefusedError(400, "top_logprobs hold the most probable token and the prompt's own; send logprobs 1")


class _Prompts:
    """From prompts to token ids, and back to what OpenAI's clients read."""

    def __init__(self, spec: BackboneSpec, tokenizer: TextTokenizer) -> None:
        self._spec, self._tokenizer = spec, tokenizer
        self._room = spec.patterns["block"].position_limit - int(spec.start_id is not None) - 1

    def ids(self, index: int, prompt: Any) -> np.ndarray:
        """Token ids int32 of a prompt, which may begin with the start token."""
        if isinstance(prompt, str):
            status, message = check_text(f"prompt {index}", prompt)
            if status != OK:
                raise RefusedError(400, message)
            ids = self._tokenizer.encode([prompt], keep_blank=True)[0].ids
        else:
            if any(token >= self._spec.vocab_size or token in self._hidden for token in prompt):
                raise RefusedError(
                    400, f"prompt {index} has a token id that is no token of a text; use the tokenizer of /info's model"
                )
            ids = np.array(prompt, dtype=np.int32)
        size = len(self.without_start(ids))
        if size > self._room:
            raise RefusedError(400, f"prompt {index} has {size} tokens, and the model takes {self._room}, and one more")
        if size == 0 and self._spec.start_id is None:
            raise RefusedError(400, f"prompt {index} is empty")
        return ids

    @property
    def _hidden(self) -> set[int]:
        return {self._spec.mask_id, *self._spec.excluded_ids}

    def without_start(self, ids: np.ndarray) -> np.ndarray:
        """The tokens that have a log-prob: the model reads the start token before every text."""
        return ids[1:] if len(ids) and ids[0] == self._spec.start_id else ids

    def choice(self, index: int, ids: np.ndarray, found: LeftToRight, asked: CompletionsRequest) -> dict[str, Any]:
        """A prompt's entry of the answer."""
        if not np.isfinite(found.log_probs).all() or not np.isfinite(found.best_log_probs).all():
            raise RefusedError(400, f"prompt {index} has a token of probability 0, or the model returned no number")
        skipped = len(ids) - len(found.log_probs)
        shown = ids if asked.echo else ids[:0]
        values: list[float | None] = [None] * skipped + found.log_probs.tolist() if asked.echo else []
        best = ([(-1, math.nan)] * skipped if asked.echo else []) + list(
            zip(found.best.tolist(), found.best_log_probs.tolist(), strict=True)
        )
        if not asked.echo:
            best = best[-1:]
        if asked.max_tokens:
            shown = np.append(shown, found.best[-1])
            values.append(float(found.best_log_probs[-1]))
        pieces = [self._piece(token) for token in shown.tolist()]
        logprobs = None
        if asked.logprobs is not None:
            starts = np.cumsum([0, *map(len, pieces)])[:-1].tolist() if pieces else []
            logprobs = {"tokens": pieces, "token_logprobs": values, "text_offset": starts, "top_logprobs": None}
            if asked.logprobs:
                logprobs["top_logprobs"] = [
                    None if value is None else {piece: value, self._piece(top): top_value}
                    for piece, value, (top, top_value) in zip(pieces, values, best, strict=False)
                ]
        return {"index": index, "text": "".join(pieces), "logprobs": logprobs, "finish_reason": "length"}

    def _piece(self, token: int) -> str:
        """The text of a token; a control token's name."""
        return self._tokenizer.decode(np.array([token])) or self._tokenizer.token_name(token)
