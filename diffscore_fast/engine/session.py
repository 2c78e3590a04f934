"""What DiffScorer and LikelihoodBounds share: a loaded model, the runner that evaluates it, and the size of chunks."""

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
from diffscore_fast.backbones.spec import OpaqueBackbone, SplitBackbone
from diffscore_fast.engine.check import check_packing
from diffscore_fast.engine.memory import divide_memory
from diffscore_fast.engine.plan import AttentionPattern
from diffscore_fast.engine.runner import Runner
from diffscore_fast.errors import CheckpointError, InputError
from diffscore_fast.options import DEFAULT_BLOCK_SIZE, DTYPES, DTypeName
from diffscore_fast.status import OK
from diffscore_fast.text.checks import check_text
from diffscore_fast.text.tokenizer import TextTokenizer
from diffscore_fast.version import __version__

CHUNK_SECONDS = 3.0  # of a run over a file: a killed run loses this much work (or one row that takes longer)
NO_INT8 = "bounds need probabilities that add to 1, which a model in int8 does not give; use another dtype"
PACKS_CHUNK = 8  # packs that a GPU gets before the host waits for all of them


class ScoringModel:
    """A model that is ready to score: loaded, and checked once under `attention` that packing changes no row's score.

    On a CPU with the C++ kernels, scores of this package's own networks are the same bit for bit whatever the batch, in
    every dtype. On a GPU, with other implementations, and where transformers runs the model, they are the same up to
    rounding.

    Any number of threads may use it, and so may forked children (each computes in one thread). It is pickled as the
    arguments that it was made with: the receiving process loads the model again, and refuses one that has changed.

    Parameters
    ----------
    model : str or Path
        "mini" (inside the package), a folder, or a name in the local Hugging Face cache; see `load_model`.
    attention : AttentionPattern, optional
        The model's default pattern if not given.
    device : str or torch.device
    dtype : torch.dtype or {"float32", "bfloat16", "float16", "int8"}, optional
        Of weights and hidden states. If not given, float32 on a CPU, whatever the processor, and the checkpoint's own
        dtype on a GPU. bfloat16 and int8 are faster where the processor has units for them; see `load_model` for
        their price.
    memory : int, optional
        Bytes that scoring may take beside the loaded model, at least 64 MiB: prefix cache, packs and rows in flight
        are sized to fit. About 1 GiB for `mini` if not given. It changes no score (on a GPU, beyond rounding).
    token_budget, cache_bytes : int, optional
        Maximum number of window tokens evaluated at once (4,096 on a CPU, 16,384 on a GPU), and size of the prefix
        cache (512 MiB), in place of what follows from `memory`.
    adapter : str or Path, optional
        Folder of a LoRA adapter in PEFT's layout, merged into the weights before anything else; see `load_model`.
    implementation : str
        "auto", or a name ("cpu", "triton", "flash_attn", "reference"): operations that have it run by it, the others
        by "auto"; the signature states which.

    Raises
    ------
    InputError
        If an argument cannot be used.
    CheckpointError
        If the model cannot be loaded, or fails the check.
    ImplementationError
        If no operation has the implementation, or it cannot run here.
    UnsupportedPatternError
        If the model was not trained with `attention`.
    DeviceMemoryError
        If memory runs out.
    """

    _takes_int8 = False  # whether its numbers may come from probabilities that add to 1 only nearly

    def __init__(
        self,
        model: str | Path = "mini",
        *,
        attention: AttentionPattern | None = None,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | DTypeName | None = None,
        memory: int | None = None,
        token_budget: int | None = None,
        cache_bytes: int | None = None,
        adapter: str | Path | None = None,
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
            "adapter": None if adapter is None else Path(adapter).resolve(),
            "implementation": implementation,
        }
        kind = getattr(torch, dtype) if dtype in DTYPES else dtype
        if kind is not None and not isinstance(kind, torch.dtype):
            raise InputError(f"dtype must be a torch.dtype such as torch.bfloat16, or its name, not {dtype!r}")
        if kind == torch.int8 and not self._takes_int8:
            raise InputError(NO_INT8)
        loaded = load_model(model, device=device, dtype=kind, adapter=adapter)
        backbone = loaded.backbone
        plan = divide_memory(None if memory is None else whole_number("memory", memory), backbone)
        self.spec = loaded.backbone.spec
        default = self.spec.default_pattern
        attention = attention or AttentionPattern(default, self.spec.patterns[default].default_block_size)
        if attention.name == "block" and not attention.block_size and "block" in self.spec.patterns:
            attention = AttentionPattern("block", self.spec.block_size_near(DEFAULT_BLOCK_SIZE))
        self.spec.pattern(attention.name, attention.block_size)
        self.default_attention = attention
        self._tokenizer = loaded.tokenizer
        self._runner = Runner(
            backbone,
            token_budget=_positive("token_budget", token_budget, plan.token_budget),
            cache_bytes=_positive("cache_bytes", cache_bytes, plan.cache_bytes),
            plan_tokens=plan.plan_tokens,
            implementation=implementation,
        )
        if implementation in ops.LINEAR.implementations:
            backbone.choose_linear(implementation)
        self._identity: dict[str, Any] = {
            "version": __version__,
            "model": self.spec.name,
            "weights": loaded.fingerprint[:12],
            "adapter": None if loaded.adapter_sha256 is None else loaded.adapter_sha256[:12],
            "tokenizer": loaded.tokenizer.sha256[:12],
            "dtype": loaded.dtype_name,
            "implementation": _one_name(self._runner.implementations),
        }
        check_packing(self._runner, attention)

    def _share(self, model: ScoringModel, attention: AttentionPattern) -> None:
        """Take another product's loaded model, and check it under `attention`."""
        if model._identity["dtype"] == "int8" and not self._takes_int8:
            raise InputError(NO_INT8)
        self.spec, self._tokenizer, self._runner = model.spec, model._tokenizer, model._runner
        self._identity = model._identity
        self.spec.pattern(attention.name, attention.block_size)
        check_packing(self._runner, attention)

    def tokenize(self, texts: Sequence[Any]) -> list[np.ndarray]:
        """Token ids of each text as it is scored, without the control tokens that a pattern sets around it.

        Parameters
        ----------
        texts : sequence of str
            A value that is not text (None, a number) or not valid text has no tokens.

        Returns
        -------
        list of int32 [number of tokens]

        Raises
        ------
        InputError
            If `texts` is a single text, or not a sequence.

        Examples
        --------
        >>> from diffscore_fast import DiffScorer
        >>> [len(ids) for ids in DiffScorer("mini").tokenize(["The cat sat.", None])]
        [4, 0]
        """
        texts = checked_column("texts", texts)
        found = [np.zeros(0, dtype=np.int32) for _ in texts]
        rows = [row for row, text in enumerate(texts) if check_text("text", text)[0] == OK]
        for row, item in zip(rows, self._tokenizer.encode([texts[row] for row in rows]), strict=True):
            found[row] = item.ids
        return found

    def count_tokens(self, texts: Sequence[Any]) -> np.ndarray:
        """Number of tokens int64 [n] of each text, without control tokens; 0 for what is not text."""
        return np.array([len(ids) for ids in self.tokenize(texts)], dtype=np.int64)

    def clear_cache(self) -> None:
        """Drop the cached keys and values of all prefixes; the next call computes them again.

        It changes no score. A benchmark calls it so that every repetition does the same work.
        """
        self._runner.clear_cache()

    @property
    def runner(self) -> Runner:
        """The engine that evaluates this model: benchmarks count its work. Scoring does not need it."""
        return self._runner

    @property
    def backbone(self) -> SplitBackbone | OpaqueBackbone:
        """The loaded network."""
        return self._runner.backbone

    @property
    def tokenizer(self) -> TextTokenizer:
        """The model's tokenizer, which also gives the character span of each token."""
        return self._tokenizer

    def __reduce__(self) -> tuple[Any, ...]:
        return _load_again, (type(self), self._arguments, self._weights)

    @property
    def _weights(self) -> tuple[str | None, ...]:
        """Hashes of the weights, and of the adapter that is merged into them."""
        return self._identity["weights"], self._identity["adapter"]

    def _chunk_tokens(self, usual: int) -> int:
        """Window tokens of a chunk of rows: the usual number, or several packs on a GPU."""
        runner = self._runner
        if runner.backbone.device.type != "cpu":
            usual = max(usual, PACKS_CHUNK * runner.token_budget)
        return min(usual, runner.plan_tokens)

    def _chunk_seconds(self, by_time: bool) -> float | None:
        """Seconds that a chunk of rows may take; None on a GPU, where other chunks would round otherwise."""
        return CHUNK_SECONDS if by_time and self._runner.backbone.device.type == "cpu" else None

    def _room(self, pattern: str, block_size: int = 0) -> int:
        """Maximum number of tokens of a text under a pattern, without the tokens that start and end every text."""
        found = self.spec.pattern(pattern, block_size)
        return found.position_limit - int(self.spec.start_id is not None) - len(found.end_ids)


def _positive(name: str, value: int | None, otherwise: int) -> int:
    if value is None:
        return otherwise
    if whole_number(name, value) < 1:
        raise InputError(f"{name} must be at least 1, not {value}")
    return int(value)


def _one_name(names: dict[str, str]) -> str:
    """The name of the implementation where all operations have the same one, otherwise `operation=name` pairs."""
    if len(set(names.values())) == 1:
        return next(iter(names.values()))
    return ",".join(f"{operation}={name}" for operation, name in names.items())


def _load_again(kind: type[ScoringModel], arguments: dict[str, Any], weights: tuple[str | None, ...]) -> ScoringModel:
    """A pickled scorer, loaded again."""
    made = kind(**arguments)
    if made._weights != weights:
        raise CheckpointError(
            f"model {made.spec.name!r} has other weights or another config.json than when the scorer was pickled"
        )
    return made
