"""From a model folder (config.json, model.safetensors, tokenizer.json) to a backbone and its tokenizer."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from diffscore_fast.backbones.bert import BertBackbone
from diffscore_fast.backbones.bert_families import BERT_FAMILIES, bert_config, build_bert, fill_bert
from diffscore_fast.backbones.config import PACKAGE_SECTION, check_name, find_model, read_config, read_patterns
from diffscore_fast.backbones.dit import DitBackbone
from diffscore_fast.backbones.dit_families import DIT_FAMILIES, build_dit, fill_dit
from diffscore_fast.backbones.int8 import to_int8
from diffscore_fast.backbones.llama import LlamaBackbone
from diffscore_fast.backbones.llama_families import LLAMA_FAMILIES, build_llama, fill_llama
from diffscore_fast.backbones.network import Network
from diffscore_fast.backbones.peft_adapter import PeftAdapter
from diffscore_fast.backbones.spec import BackboneSpec
from diffscore_fast.backbones.tokenizer import read_tokenizer
from diffscore_fast.backbones.transformers_adapter import TransformersAdapter, load_adapter
from diffscore_fast.backbones.weights import (
    check_no_pointer,
    check_stored,
    file_sha256,
    load_weights,
    stored_dtype,
    weight_files,
)
from diffscore_fast.errors import (
    CheckpointError,
    DeviceMemoryError,
    InputError,
    first_line,
    is_out_of_memory,
    memory_named,
)
from diffscore_fast.ops import int8_unavailable
from diffscore_fast.ops.extension import avoid_generated_code
from diffscore_fast.process import is_forked
from diffscore_fast.text.tokenizer import ControlTokens, TextTokenizer

OWN_NETWORKS = {*BERT_FAMILIES, *DIT_FAMILIES, *LLAMA_FAMILIES}  # types that this package reads itself
AnyBackbone = BertBackbone | DitBackbone | LlamaBackbone | TransformersAdapter


def load_model(
    name_or_path: str | Path = "mini",
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    adapter: str | Path | None = None,
) -> LoadedModel:
    """Load a masked language model: embedded, from a folder, or from the local Hugging Face cache.

    BERT, DistilBERT, RoBERTa, ELECTRA generators, MDLM, BD3-LM, LLaDA, Dream, and Llama where config.json states
    patterns under `diffscore_fast`, run on this package's own networks; other types (ModernBERT, say) are run by
    transformers.
    Nothing is downloaded, and code that comes with a checkpoint is never run.

    A model of this package states its own control tokens. Other models use those that their tokenizer.json sets around
    a text and around a pair ([CLS] source [SEP] candidate [SEP], <s> source </s></s> candidate </s>), with its token
    types: the source is the first text of the pair; a candidate without source is a single text. Without a
    post-processor in tokenizer.json there is only [CLS]. LLaDA reads texts end to end, Dream after its bos_token.

    Parameters
    ----------
    name_or_path : str or Path
        "mini"; a folder in transformers' layout; or the name of a model in the cache, "org/name", or
        "org/name@revision" for a branch, tag or commit other than main.
    device : str or torch.device
        Where the weights go.
    dtype : torch.dtype, optional
        Of weights and hidden states. If not given, float32 on a CPU and the checkpoint's own dtype on a GPU (see
        `default_dtype`). On one processor with AVX-512 BF16, bfloat16 was 3.3 times as fast as float32; it moved
        scores by 0.002 nats per token on SummEval and 0.005 on SFRES (root mean square; rank correlation 0.9996).
        torch.int8 is for this package's own networks on a CPU with AVX-512 VNNI: products of the layers and of the
        normaliser in int8, everything else in float32.
    adapter : str or Path, optional
        Folder of a LoRA adapter in PEFT's layout, which is merged into the weights as they are read (networks with
        Llama's layers only).

    Raises
    ------
    InputError
        If the model is not named by a text or path, the device cannot be used here, or int8 cannot be used.
    CheckpointError
        If there is no such model, it is not a masked language model, a file is missing or a Git LFS pointer, a tensor
        is missing, left over or quantised without its scales, two files disagree, or a checksum differs.
    DeviceMemoryError
        If memory runs out.

    Notes
    -----
    torch's default dtype and device have no effect on the network, and torch's random stream is left as it was.
    """
    check_name(name_or_path)
    avoid_generated_code()
    if is_forked():  # weights are converted by OpenMP's threads, which the fork lacks
        torch.set_num_threads(1)
    with memory_named(f"there is no memory to load model {str(name_or_path)!r}; free some, or use a smaller model"):
        return _load(name_or_path, _usable_device(device), dtype, adapter)


def read_spec(name_or_path: str | Path) -> BackboneSpec:
    """What a model is, from config.json and the tokenizer; of this package's own networks no weight is read.

    Raises
    ------
    InputError, CheckpointError
        As `load_model`, but for the weights.
    """
    check_name(name_or_path)
    checkpoint, _ = _read_checkpoint(name_or_path)
    network = _build_network(checkpoint)
    return load_model(name_or_path).backbone.spec if network is None else network.spec


@dataclass(frozen=True)
class LoadedModel:
    """A backbone that is ready to score, with what its signature needs.

    Parameters
    ----------
    backbone : BertBackbone, DitBackbone, LlamaBackbone or TransformersAdapter
    tokenizer : TextTokenizer
    weights_sha256 : str
        Hash of the weights' files.
    fingerprint : str
        Hash of weights and config.json together: heads, patterns and token types change scores, too.
    dtype_name : str
        What the products run in: the dtype of the hidden states, or "int8".
    adapter_sha256 : str, optional
        Hash of the adapter's weights, if one was merged.
    """

    backbone: AnyBackbone
    tokenizer: TextTokenizer
    weights_sha256: str
    fingerprint: str
    dtype_name: str
    adapter_sha256: str | None = None

    @property
    def is_own_network(self) -> bool:
        """Whether the layers are this package's own network; otherwise transformers runs them."""
        return self.backbone.linear_implementation is not None

    @property
    def bert(self) -> BertBackbone:
        """The backbone as a BERT network of this package: the only kind that `training` trains as a whole."""
        if not isinstance(self.backbone, BertBackbone):
            raise CheckpointError(f"model {self.backbone.spec.name!r} is not a BERT network; it cannot be trained")
        return self.backbone


def default_dtype(device: str | torch.device, files: list[Path]) -> torch.dtype:
    """float32 on a CPU, whatever the processor; on a GPU the dtype of most weights in the checkpoint's files.

    Where a GPU does not multiply bfloat16, float32 is used in its place.
    """
    if torch.device(device).type == "cpu":
        return torch.float32
    own = stored_dtype(files)
    if own == torch.bfloat16 and torch.device(device).type == "cuda":
        with torch.cuda.device(device):  # torch asks the current one
            return own if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    return own


def multiplies_bfloat16() -> bool:
    """Whether this processor has units for products of bfloat16 (AVX-512 BF16 or AMX)."""
    capabilities = torch.backends.cpu.get_cpu_capability()
    return "AVX512" in capabilities and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


@dataclass(frozen=True)
class _Checkpoint:
    """A model folder whose config.json and tokenizer have been read; its weights have not."""

    folder: Path
    name: str
    config: dict
    files: list[Path]  # of the weights
    mask_id: int
    control: ControlTokens


def _read_checkpoint(name_or_path: str | Path) -> tuple[_Checkpoint, TextTokenizer]:
    folder, name = find_model(name_or_path)
    config = read_config(folder)
    tokenizer, control = read_tokenizer(folder, config)
    _check_rows(folder, tokenizer, config.get("vocab_size"))
    files = _weight_files(folder, config)
    if config["model_type"] in LLAMA_FAMILIES:  # some leave it to the tokenizer
        config = {**config, "mask_token_id": tokenizer.mask_id}
    return _Checkpoint(folder, name, config, files, tokenizer.mask_id, control), tokenizer


def _load(
    name_or_path: str | Path, device: torch.device, dtype: torch.dtype | None, adapter: str | Path | None
) -> LoadedModel:
    checkpoint, tokenizer = _read_checkpoint(name_or_path)
    added = None if adapter is None else PeftAdapter(Path(adapter), str(name_or_path))
    folder, name, config, files = checkpoint.folder, checkpoint.name, checkpoint.config, checkpoint.files
    dtype = dtype or default_dtype(device, files)
    if dtype == torch.int8:
        _check_int8(name, config, device)
    full = f"{device} has no room for the weights of {name!r} in {dtype}; use a smaller model or dtype"
    with memory_named(full):
        backbone = _read_network(checkpoint, device, torch.float32 if dtype == torch.int8 else dtype, added)
        if dtype == torch.int8 and isinstance(backbone, Network):
            to_int8(backbone)
    _check_rows(folder, tokenizer, backbone.spec.vocab_size)
    weights_sha256 = _joint_sha256(files)
    if config.get(PACKAGE_SECTION, {}).get("weights_sha256", weights_sha256) != weights_sha256:
        raise CheckpointError(f"{folder}: the weights' SHA-256 differs from config.json's; damaged or replaced")
    hashed = None if added is None else added.sha256
    canonical = json.dumps(config, sort_keys=True)
    fingerprint = hashlib.sha256(f"{weights_sha256}{canonical}".encode()).hexdigest()
    return LoadedModel(backbone, tokenizer, weights_sha256, fingerprint, str(dtype).removeprefix("torch."), hashed)


def _check_int8(name: str, config: dict, device: torch.device) -> None:
    """Refuse int8 where it has no loops, or no network of this package."""
    if (reason := int8_unavailable(device)) is not None:
        raise InputError(f"dtype int8 cannot be used here: {reason}")
    if config["model_type"] not in OWN_NETWORKS:
        raise InputError(f"dtype int8 cannot be used with {name!r}, which transformers runs; use another dtype")


def _read_network(
    checkpoint: _Checkpoint, device: torch.device, dtype: torch.dtype, adapter: PeftAdapter | None
) -> AnyBackbone:
    """The network with its weights on the device, by the reader of its family."""
    config, files = checkpoint.config, checkpoint.files
    network = _build_network(checkpoint)
    if adapter is not None and not isinstance(network, LlamaBackbone):
        raise InputError(
            f"an adapter cannot be merged into {checkpoint.name!r}: only into networks with Llama's layers"
        )
    if network is None:
        check_stored(files)
        other = load_adapter(checkpoint.folder, checkpoint.name, config, checkpoint.mask_id, checkpoint.control)
        return other.to(device, dtype)
    if isinstance(network, LlamaBackbone):
        fill_llama(network, files, device, dtype, adapter)
        return network
    if isinstance(network, DitBackbone):
        fill_dit(network, config, files, device, dtype)
        return network
    weights = {name: item for path in files for name, item in load_weights(path).items()}
    where = str(checkpoint.folder if len(files) > 1 else files[0])
    fill_bert(network, weights, where, tied=config.get("tie_word_embeddings") not in (False,))
    return network.eval().requires_grad_(False).to(device=device, dtype=dtype)


def _build_network(checkpoint: _Checkpoint) -> BertBackbone | DitBackbone | LlamaBackbone | None:
    """The network without weights, on the device `meta`; None if transformers runs it."""
    name, config, control = checkpoint.name, checkpoint.config, checkpoint.control
    kind, where = config["model_type"], f"{checkpoint.folder}/config.json"
    if kind in LLAMA_FAMILIES:
        stated = read_patterns(config) if LLAMA_FAMILIES[kind].states_patterns else ()
        return build_llama(name, config, control.start_id, where, *stated)
    if kind in DIT_FAMILIES:
        return build_dit(name, config, control.start_id, where)
    if kind not in BERT_FAMILIES:
        return None
    config = bert_config(config, where)
    patterns, default_pattern = read_patterns(config, control)
    with torch.device("meta"):  # no random numbers are drawn, and torch's default dtype has no effect
        return build_bert(name, config, patterns, default_pattern, checkpoint.mask_id, control.start_id)


def _weight_files(folder: Path, config: dict) -> list[Path]:
    """The safetensors files that the network is read from."""
    if config["model_type"] in OWN_NETWORKS:
        files = weight_files(folder)
    else:
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"{folder}: no safetensors file; a model folder needs its weights in that format")
    for path in files:
        check_no_pointer(path)
    return files


def _joint_sha256(files: list[Path]) -> str:
    """The hash of one file, or the hash of the hashes of several."""
    hashes = [file_sha256(path) for path in files]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()


def _check_rows(folder: Path, tokenizer: TextTokenizer, rows: Any) -> None:
    """The network must have a row for every token; `rows` may be missing from config.json, and is then not checked."""
    if isinstance(rows, int) and tokenizer.vocab_size > rows:
        raise CheckpointError(f"{folder}: tokenizer.json has {tokenizer.vocab_size} tokens, the model only {rows}")


def _usable_device(device: str | torch.device) -> torch.device:
    try:
        found = torch.device(device)
        float(torch.ones(1, device=found).sum())  # a GPU that this torch has no kernels for fails here
    except Exception as error:  # each backend raises types of its own
        if is_out_of_memory(error):
            raise DeviceMemoryError(f"device {str(device)!r} has no memory left: {error}") from error
        raise InputError(
            f"device {str(device)!r} cannot be used here: {first_line(error)}; `diffscore info` lists what there is"
        ) from None
    return found
