"""Any masked language model of transformers, run by transformers, with only the pattern `full`."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from diffscore_fast.backbones.spec import BackboneSpec, PatternSpec
from diffscore_fast.errors import CheckpointError, first_line, is_out_of_memory
from diffscore_fast.ops.transfer import to_device
from diffscore_fast.text.tokenizer import ControlTokens

HEAD_TOLERANCE = 1e-3  # nats per token, float32: transform and linear map against the network's own logits


def load_adapter(folder: Path, name: str, config: dict, mask_id: int, control: ControlTokens) -> TransformersAdapter:
    """A model folder as transformers reads it, in float32 on the CPU.

    Code that comes with a checkpoint is never run.

    Raises
    ------
    CheckpointError
        If transformers is not installed or knows no such masked language model, or if tensors are missing.
    """
    network = _read_network(folder, config.get("model_type"))
    return TransformersAdapter(network, _spec(network, folder, name, config, mask_id, control))


class TransformersAdapter:
    """An `OpaqueBackbone`: a network of transformers whose head is some transform, then one linear map.

    The encoder runs on windows of one length at a time, so that nothing is padded and no mask is needed. The head's
    transform and the vocabulary projection run only on the wanted rows.

    Parameters
    ----------
    network : nn.Module
        From `AutoModelForMaskedLM`. It is changed: its encoder and its output layer return their inputs afterwards, so
        that a call of the network runs only the head's transform.
    spec : BackboneSpec

    Raises
    ------
    CheckpointError
        If the head has another form.
    """

    def __init__(self, network: Any, spec: BackboneSpec) -> None:
        self.spec = spec
        encoder, decoder = network.base_model, network.get_output_embeddings()
        if encoder is network or not isinstance(decoder, nn.Linear):
            raise CheckpointError(
                f"{spec.name}: {type(network).__name__} has no encoder and linear output layer that can be used apart"
            )
        self._network, self._encode = network, encoder.forward
        self._takes_types = (
            "token_type_ids" in signature(encoder.forward).parameters
            and getattr(network.config, "type_vocab_size", 0) > 1
        )
        self._decoder = decoder
        probe = (torch.arange(8, device=decoder.weight.device) * 7919 % spec.vocab_size)[None]
        with torch.inference_mode():
            expected = network(input_ids=probe).logits[0].float().log_softmax(-1)
            encoder.forward = _return_embeds
            output: Any = decoder
            output.forward = lambda states: states
            states = self.head_transform(self._encode(input_ids=probe)[0][0])
            found = nn.functional.linear(states, decoder.weight, decoder.bias)
        if found.shape != expected.shape or (found.log_softmax(-1) - expected).abs().max() > HEAD_TOLERANCE:
            raise CheckpointError(
                f"{spec.name}: the head of {type(network).__name__} does more than a transform and one linear map; "
                "its log-probabilities cannot be taken at single rows"
            )

    @property
    def vocabulary_weight(self) -> Tensor:
        return self._decoder.weight

    @property
    def vocabulary_bias(self) -> Tensor | None:
        return self._decoder.bias

    @property
    def vocabulary_codes(self) -> None:
        """Another library's layers are never int8."""

    @property
    def device(self) -> torch.device:
        return self._decoder.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self._decoder.weight.dtype

    @property
    def linear_implementation(self) -> None:
        """None: transformers multiplies the weights."""
        return None

    def choose_linear(self, implementation: str) -> None:
        """No effect: `ops.linear` is not used."""

    def to(self, device: str | torch.device, dtype: torch.dtype) -> TransformersAdapter:
        """Move and convert the weights in place.

        Buffers keep their dtype, as they do when transformers loads in a dtype: among them are the frequencies of
        rotary positions, for which 16 bits are too few.
        """
        self._network.to(device=device)
        for parameter in self._network.parameters():
            parameter.data = parameter.data.to(dtype)
        return self

    def window_states(self, tokens: Tensor, types: Tensor, offsets: np.ndarray, wanted: Tensor) -> Tensor:
        lengths = np.diff(offsets)
        hidden = torch.empty((len(tokens), self.spec.hidden_size), dtype=self.dtype, device=self.device)
        for length in np.unique(lengths):
            rows = offsets[:-1][lengths == length][:, None] + np.arange(length)
            chosen = to_device(rows, self.device)
            inputs = {"input_ids": tokens[chosen]}
            if self._takes_types:
                inputs["token_type_ids"] = types[chosen]
            hidden[chosen] = self._encode(**inputs)[0]
        return hidden[wanted]

    def head_transform(self, hidden: Tensor) -> Tensor:
        return self._network(inputs_embeds=hidden[None]).logits[0]  # without encoder and output layer, see __init__


def _read_network(folder: Path, kind: Any) -> Any:
    """The network with its weights; `kind` is its `model_type`."""
    try:
        import transformers
    except ImportError:
        raise CheckpointError(
            f"{folder}: models of type {kind!r} are run by transformers, which is not installed; "
            "`pip install 'diffscore_fast[transformers]'`"
        ) from None
    try:
        with _quiet(transformers), _defaults_of_torch():
            network, report = transformers.AutoModelForMaskedLM.from_pretrained(
                folder,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                dtype=torch.float32,
                output_loading_info=True,
            )
    except Exception as error:  # each of its parts raises types of its own
        if is_out_of_memory(error):
            raise
        raise CheckpointError(
            f"{folder}: transformers loads no masked language model of type {kind!r} from it: {first_line(error)}"
        ) from None
    missing = sorted(report["missing_keys"]) + sorted(str(item) for item in report["mismatched_keys"])
    if missing:
        raise CheckpointError(
            f"{folder}: tensors of {type(network).__name__} are missing or of another shape: {', '.join(missing[:4])}"
        )
    return network.eval().requires_grad_(False)


def _spec(network: Any, folder: Path, name: str, config: dict, mask_id: int, control: ControlTokens) -> BackboneSpec:
    read, decoder = network.config, network.get_output_embeddings()
    types, heads = getattr(read, "type_vocab_size", 0), getattr(read, "num_attention_heads", 1)
    pattern = PatternSpec(
        _position_limit(network, folder),
        separator_ids=control.separator_ids,
        end_ids=control.end_ids,
        window_type=control.second_type if types > control.second_type else 0,
    )
    return BackboneSpec(
        family=str(config.get("model_type")),
        name=name,
        num_layers=getattr(read, "num_hidden_layers", 1),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=read.hidden_size // heads,
        hidden_size=read.hidden_size,
        vocab_size=read.vocab_size if decoder is None else decoder.weight.shape[0],
        mask_id=mask_id,
        start_id=control.start_id,
        patterns={"full": pattern},
    )


def _return_embeds(input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None, **_: Any) -> Any:
    """In place of an encoder's forward pass: it returns what it is given, so that only the head runs."""
    from transformers.modeling_outputs import BaseModelOutput

    return BaseModelOutput(last_hidden_state=inputs_embeds)


def _position_limit(network: Any, folder: Path) -> int:
    limit = getattr(network.config, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 1:
        raise CheckpointError(
            f"{folder}/config.json: states no max_position_embeddings, so the maximum length is unknown"
        )
    # A position table that begins with rows up to the padding id's, as RoBERTa's does, has fewer usable ones.
    tables = [item for name, item in network.named_modules() if name.endswith("position_embeddings")]
    return limit - max(
        (item.padding_idx + 1 for item in tables if getattr(item, "padding_idx", None) is not None), default=0
    )


@contextmanager
def _defaults_of_torch() -> Iterator[None]:
    """torch's original defaults while transformers builds a network; all random streams as before afterwards.

    Tables that a network computes are made in the default dtype and on the default device, and parameters get random
    numbers before weights are read.
    """
    dtype, streams = torch.get_default_dtype(), (torch.get_rng_state(), np.random.get_state(), random.getstate())
    try:
        torch.set_default_dtype(torch.float32)
        with torch.device("cpu"), torch.inference_mode(False):
            yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_rng_state(streams[0])
        np.random.set_state(streams[1])
        random.setstate(streams[2])


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """No progress bar and no report on the terminal while a checkpoint is read; faults are raised as errors."""
    settings = transformers.utils.logging
    level, bars = settings.get_verbosity(), settings.is_progress_bar_enabled()
    settings.set_verbosity_error()
    settings.disable_progress_bar()
    try:
        yield
    finally:
        settings.set_verbosity(level)
        if bars:
            settings.enable_progress_bar()
