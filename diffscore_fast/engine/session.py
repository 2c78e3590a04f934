"""What DiffScorer and LikelihoodBounds share: a loaded model behind a runner, and rows in portions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from diffscore_fast import ops
from diffscore_fast.arguments import checked_column, whole_number
from diffscore_fast.backbones.config import EMBEDDED_MODELS, check_name
from diffscore_fast.backbones.loader import load_model
from diffscore_fast.backbones.network import Network
from diffscore_fast.engine.check import check_packing
from diffscore_fast.engine.memory import divide_memory
from diffscore_fast.engine.plan import AttentionPattern
from diffscore_fast.engine.runner import Runner
from diffscore_fast.errors import CheckpointError, InputError
from diffscore_fast.process import is_forked
from diffscore_fast.status import OK
from diffscore_fast.text.checks import check_text
from diffscore_fast.version import __version__

# Of a run over a file: what a killed one loses at most, but for a row that takes longer by itself.
PORTION_SECONDS = 3.0
PACKS_CHUNK = 8  # that a GPU gets before the host waits for them all


class ScoringModel:
    """A model that is ready to score: loaded, and checked once under `attention` for packing that changes no row.

    On a CPU, with the C++ kernels, scores of this package's own networks are the same bit for bit whatever the batch,
    in every type; on a GPU, with other implementations and where transformers runs the model, they are to rounding.

    Any number of threads may use it, and forked children (each computes in one thread). It is pickled as the arguments
    it was made with: the receiving process loads the model anew, and refuses one that has changed.

    Parameters
    ----------
    model : str or Path
        "mini" (inside the package), a folder, or a name in the local Hugging Face cache; see `load_model`.
    attention : Attention, optional
        The model's default pattern if not given.
    device : str or torch.device
    dtype : torch.dtype, optional
        Of weights and hidden states. If not given, float32 on a CPU, whatever the processor, and the checkpoint's own
        type on a GPU. bfloat16 is faster where the processor has units for it; see `load_model` for its price.
    memory : int, optional
        Bytes that scoring may take beside the loaded model, at least 64 MiB: prefix cache, packs and rows in flight
        are sized to it. About 1 GiB for `mini` if not given. It changes no score (on a GPU, beyond rounding).
    token_budget, cache_bytes : int, optional
        Most window tokens evaluated at once (4,096 on a CPU, 16,384 on a GPU), and size of the prefix cache (512
        MiB), in place of what follows from `memory`.
    implementation : str
        "auto", or a name ("cpu", "triton", "flash_attn", "reference"): operations that have it run by it, the others
        by "auto"; the signature says which.
    """

    def __init__(
        self,
        model: str | Path = "mini",
        *,
        attention: AttentionPattern | None = None,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
        memory: int | None = None,
        token_budget: int | None = None,
        cache_bytes: int | None = None,
        implementation: str = "auto",
    ) -> None:
        check_name(model)
        folder = Path(model) if str(model) not in EMBEDDED_MODELS and Path(model).is_dir() else None
        self._arguments: dict[str, Any] = {
            "model": folder.resolve() if folder is not None else model,
            "attention": attention,
            "device": device,
            "dtype": dtype,
            "memory": memory,
            "token_budget": token_budget,
            "cache_bytes": cache_bytes,
            "implementation": implementation,
        }
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise InputError(f"dtype must be a torch.dtype such as torch.bfloat16, not {dtype!r}")
        if is_forked():
            torch.set_num_threads(1)
        loaded = load_model(model, device=device, dtype=dtype)
        backbone = loaded.backbone
        plan = divide_memory(None if memory is None else whole_number("memory", memory), backbone)
        self.spec = loaded.backbone.spec
        attention = attention or AttentionPattern(self.spec.default_pattern)
        self.spec.pattern(attention.name, attention.block_size)
        self._tokenizer = loaded.tokenizer
        self._runner = Runner(
            backbone,
            token_budget=_positive("token_budget", token_budget, plan.token_budget),
            cache_bytes=_positive("cache_bytes", cache_bytes, plan.cache_bytes),
            plan_tokens=plan.plan_tokens,
            implementation=implementation,
        )
        names = self._runner.implementations
        if isinstance(backbone, Network):
            # In 16 bits "cpu" means the faster of what the CPU has: the C++ kernel, or torch's products in tiles.
            has_it = implementation in ops.LINEAR.implementations
            if has_it and (implementation != "cpu" or backbone.dtype == torch.float32):
                backbone.implementation = implementation
            names["linear"] = backbone.linear_implementation
        self._identity = {
            "version": __version__,
            "model": self.spec.name,
            "weights": loaded.fingerprint[:12],
            "tokenizer": loaded.tokenizer.sha256[:12],
            "dtype": str(loaded.backbone.dtype).removeprefix("torch."),
            "implementation": _one_name(names),
        }
        check_packing(self._runner, attention)

    def count_tokens(self, texts: Sequence[Any]) -> np.ndarray:
        """Number of tokens int64 [n] of each text, control tokens apart; 0 for what is not text."""
        texts = checked_column("texts", texts)
        counts = np.zeros(len(texts), dtype=np.int64)
        rows = [row for row, text in enumerate(texts) if check_text("text", text)[0] == OK]
        counts[rows] = [len(item.ids) for item in self._tokenizer.encode([texts[row] for row in rows])]
        return counts

    def __reduce__(self) -> tuple[Any, ...]:
        return _load_again, (type(self), self._arguments, self._identity["weights"])

    def _portion_tokens(self, usual: int) -> int:
        """Window tokens that are planned together: the usual number, or several packs of a GPU's."""
        runner = self._runner
        if runner.backbone.device.type != "cpu":
            usual = max(usual, PACKS_CHUNK * runner.token_budget)
        return min(usual, runner.plan_tokens)

    def _portion_seconds(self, by_time: bool) -> float | None:
        """Seconds that a portion may take; None on a GPU, where other portions give other roundings."""
        return PORTION_SECONDS if by_time and self._runner.backbone.device.type == "cpu" else None

    def _room(self, pattern: str, block_size: int = 0) -> int:
        """Most tokens of a text under a pattern, the tokens that start and end every text taken off."""
        found = self.spec.pattern(pattern, block_size)
        return found.position_limit - int(self.spec.start_id is not None) - len(found.end_ids)


def _positive(name: str, value: int | None, otherwise: int) -> int:
    if value is None:
        return otherwise
    if whole_number(name, value) < 1:
        raise InputError(f"{name} must be at least 1, not {value}")
    return int(value)


def _one_name(names: dict[str, str]) -> str:
    """One implementation where all operations agree, else `operation=name` pairs."""
    if len(set(names.values())) == 1:
        return next(iter(names.values()))
    return ",".join(f"{operation}={name}" for operation, name in names.items())


def _load_again(kind: type[ScoringModel], arguments: dict[str, Any], weights: str) -> ScoringModel:
    """A pickled scorer, loaded anew."""
    made = kind(**arguments)
    if made._identity["weights"] != weights:
        raise CheckpointError(
            f"model {made.spec.name!r} has other weights or another config.json than when the scorer was pickled"
        )
    return made
