"""What DiffScorer and LikelihoodBounds share: a loaded model behind a runner, and rows in portions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch

from diffscore_fast.backbones.load import load_model
from diffscore_fast.engine.check import check_packing
from diffscore_fast.engine.memory import MemoryPlan, divide_memory
from diffscore_fast.engine.runner import Runner
from diffscore_fast.engine.windows import Attention
from diffscore_fast.version import __version__

ROWS_AT_ONCE = 4096
Row = TypeVar("Row")


class ScoringModel:
    """A model, checked under the attention it will be used with.

    Parameters
    ----------
    model : str or Path
        "mini" (inside the package), or a folder with config.json, model.safetensors and tokenizer.json.
    attention : Attention, optional
        The model's default pattern if not given.
    device : str or torch.device
    dtype : torch.dtype, optional
        bfloat16 where the processor multiplies it natively, else float32.
    memory : int, optional
        Bytes that scoring may take beside the loaded model, at least 64 MiB: prefix cache, packs and rows in flight
        are sized to it. About 1 GiB for `mini` if not given. It changes no score.
    token_budget, cache_bytes : int, optional
        Most window tokens evaluated at once (4,096 on a CPU), and size of the prefix cache (512 MiB), in place of
        what follows from `memory`.
    implementation : str
        Implementation of the operations: "auto", or one by name.
    """

    def __init__(self, model: str | Path = "mini", *, attention: Attention | None = None,
                 device: str | torch.device = "cpu", dtype: torch.dtype | None = None,
                 memory: int | None = None, token_budget: int | None = None, cache_bytes: int | None = None,
                 implementation: str = "auto") -> None:  # fmt: skip
        loaded = load_model(model, device=device, dtype=dtype)
        backbone = loaded.backbone
        plan = MemoryPlan() if memory is None else divide_memory(memory, backbone)
        self.spec = loaded.backbone.spec
        attention = attention or Attention(self.spec.default_pattern)
        self.spec.pattern(attention.name, attention.block_size)
        self._tokenizer = loaded.tokenizer
        self._runner = Runner(
            backbone, token_budget=token_budget or plan.token_budget, cache_bytes=cache_bytes or plan.cache_bytes,
            plan_tokens=plan.plan_tokens, implementation=implementation,
        )  # fmt: skip
        self._identity = {
            "version": __version__, "model": self.spec.name, "weights": loaded.fingerprint[:12],
            "tokenizer": loaded.tokenizer.sha256[:12], "dtype": str(loaded.backbone.dtype).removeprefix("torch."),
            "implementation": self._runner.implementations,
        }  # fmt: skip
        check_packing(self._runner, attention)

    def _room(self, pattern: str, block_size: int = 0) -> int:
        """Most tokens of a text under a pattern, the start token taken off."""
        return self.spec.pattern(pattern, block_size).position_limit - int(self.spec.start_id is not None)


def portions(rows: Iterable[Row], size_of: Callable[[Row], int], most: int) -> Iterator[list[Row]]:
    """Cut a stream into lists of about `most` in size; it bounds memory, and what a killed run loses."""
    portion: list[Row] = []
    size = 0
    for row in rows:
        portion.append(row)
        size += size_of(row)
        if size >= most or len(portion) >= ROWS_AT_ONCE:
            yield portion
            portion, size = [], 0
    if portion:
        yield portion


def token_estimate(text: Any) -> int:
    """Tokens of a value that may be text, before it is tokenised: four characters each, near enough for memory."""
    return len(text) // 4 + 1 if isinstance(text, str) else 0
