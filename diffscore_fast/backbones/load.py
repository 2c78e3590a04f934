"""A model folder (config.json, model.safetensors, tokenizer.json) to a backbone and its tokenizer."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from diffscore_fast.backbones.bert import BertBackbone
from diffscore_fast.backbones.bert_families import FAMILIES, bert_config, build_bert, load_state
from diffscore_fast.backbones.spec import PatternName, PatternSpec
from diffscore_fast.backbones.weights import file_sha256, load_weights
from diffscore_fast.backbones.whole import TransformersBackbone, load_whole
from diffscore_fast.errors import CheckpointError, InputError
from diffscore_fast.text.tokenizer import ControlTokens, TextTokenizer

EMBEDDED_MODELS = {"mini": Path(__file__).parent / "mini"}
PACKAGE_SECTION = "diffscore_fast"  # our part of config.json: patterns, default pattern, control tokens, checksum
NO_CONTROL = ControlTokens(None)
# What a tokenizer may be kept in instead of tokenizer.json.
VOCABULARY_FILES = ("vocab.txt", "vocab.json", "*.model")
# What else a checkpoint may be, by the end of its architecture's name.
OTHER_KINDS = {
    "ForCausalLM": "a causal language model",
    "LMHeadModel": "a causal language model",
    "ForConditionalGeneration": "a sequence-to-sequence model",
    "ForSequenceClassification": "a sequence classifier",
    "ForTokenClassification": "a token classifier",
    "ForQuestionAnswering": "a question-answering model",
    "ForMultipleChoice": "a multiple-choice model",
    "ForPreTraining": "a pre-training model without a masked-LM head",
    "Model": "an encoder without a masked-LM head",
}


@dataclass(frozen=True)
class LoadedModel:
    """A backbone ready to score, with what its signature needs.

    `fingerprint` is a hash of weights and config.json together: heads, patterns and token types change scores, too.
    """

    backbone: BertBackbone | TransformersBackbone
    tokenizer: TextTokenizer
    weights_sha256: str
    fingerprint: str

    @property
    def bert(self) -> BertBackbone:
        """The backbone as a network of this package, which alone can be trained."""
        if not isinstance(self.backbone, BertBackbone):
            raise CheckpointError(f"model {self.backbone.spec.name!r} is run by transformers; it cannot be trained")
        return self.backbone


def load_model(name_or_path: str | Path = "mini", *, device: str | torch.device = "cpu",
               dtype: torch.dtype | None = None) -> LoadedModel:  # fmt: skip
    """Load a masked language model: embedded, from a folder, or from the local Hugging Face cache.

    BERT, DistilBERT, RoBERTa and ELECTRA generators run on this package's own network; other types (ModernBERT, say)
    are run by transformers. Nothing is downloaded, and code that comes with a checkpoint is never run.

    A model of this package states its own control tokens. Others use those that their tokenizer.json sets around a
    text and a pair ([CLS] source [SEP] candidate [SEP], <s> source </s></s> candidate </s>), with its token types:
    the source is the first text of the pair; a candidate without source is a single text. Without a post-processor
    in tokenizer.json there is [CLS] alone.

    Parameters
    ----------
    name_or_path : str or Path
        "mini"; a folder in transformers' layout; or the name of a model in the cache, "org/name", or
        "org/name@revision" for a branch, tag or commit other than main.
    device : str or torch.device
        Where the weights go.
    dtype : torch.dtype, optional
        Type of weights and hidden states; `default_dtype(device)` if not given.

    Raises
    ------
    InputError
        If the device cannot be used here.
    CheckpointError
        If there is no such model, it is no masked language model, a file is missing, a tensor is missing or left over,
        or a checksum differs.
    """
    _check_device(device)
    folder, name = find_model(name_or_path)
    config = read_config(folder)
    tokenizer, control = read_tokenizer(folder, config)
    rows = config.get("vocab_size")
    if isinstance(rows, int) and tokenizer.vocab_size > rows:
        raise CheckpointError(
            f"{folder}: tokenizer.json has {tokenizer.vocab_size} tokens, config.json's vocab_size is only {rows}"
        )
    backbone: BertBackbone | TransformersBackbone
    if config["model_type"] in FAMILIES:
        named = bert_config(config, f"{folder}/config.json")
        patterns, default_pattern = read_patterns(named, control)
        backbone = build_bert(name, named, patterns, default_pattern, tokenizer.mask_id, control.start_id)
        weights_path = folder / "model.safetensors"
        load_state(backbone, load_weights(weights_path), str(weights_path))
        backbone.eval().requires_grad_(False)
        weight_files = [weights_path]
    else:
        weight_files = sorted(folder.glob("*.safetensors"))
        if not weight_files:
            raise CheckpointError(f"{folder}: no safetensors file; a model folder needs its weights in that format")
        backbone = load_whole(folder, name, config, tokenizer.mask_id, control)
    hashes = [file_sha256(path) for path in weight_files]
    weights_sha256 = hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()
    if config.get(PACKAGE_SECTION, {}).get("weights_sha256", weights_sha256) != weights_sha256:
        raise CheckpointError(f"{folder}: the weights' SHA-256 differs from config.json's; damaged or replaced")
    backbone.to(device=device, dtype=dtype or default_dtype(device))
    canonical = json.dumps(config, sort_keys=True)
    fingerprint = hashlib.sha256(f"{weights_sha256}{canonical}".encode()).hexdigest()
    return LoadedModel(backbone, tokenizer, weights_sha256, fingerprint)


def _check_device(device: str | torch.device) -> None:
    try:
        torch.empty(0, device=device)
    except Exception as error:  # torch raises what the backend happens to raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(f"device {str(device)!r} cannot be used here: {reason}; `diffscore info` lists what there "
                         "is") from None  # fmt: skip


def find_model(name_or_path: str | Path) -> tuple[Path, str]:
    """A model's folder, and the name it goes by in signatures."""
    name = str(name_or_path)
    if name in EMBEDDED_MODELS:
        return EMBEDDED_MODELS[name], name
    folder = Path(name_or_path)
    if folder.is_dir():
        return folder, folder.resolve().name
    repository, _, revision = name.partition("@")
    try:
        cached = snapshot_download(repository, revision=revision or None, local_files_only=True)
    except (HFValidationError, LocalEntryNotFoundError):
        raise CheckpointError(
            f"no model {name!r}: neither an embedded model ({', '.join(EMBEDDED_MODELS)}) nor a folder, nor in the "
            f"local Hugging Face cache; nothing is downloaded here, `hf download {repository}` would"
        ) from None
    return Path(cached), repository


def read_config(folder: Path) -> dict:
    """The folder's config.json, checked to name a masked language model."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; a model folder needs config.json") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON ({error})") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise CheckpointError(f"{path}: a JSON {type(config).__name__}, not an object with a model_type")
    if not isinstance(config.get(PACKAGE_SECTION, {}), dict):
        raise CheckpointError(f"{path}: {PACKAGE_SECTION!r} must be an object")
    architectures = config.get("architectures") or []
    family = FAMILIES.get(config["model_type"])
    known = family.architectures if family else tuple(item for item in architectures if item.endswith("ForMaskedLM"))
    if architectures and not set(architectures) & set(known) or config.get("is_decoder"):
        kind = next((kind for end, kind in OTHER_KINDS.items() if architectures and architectures[0].endswith(end)),
                    "a decoder" if config.get("is_decoder") else "not known here")  # fmt: skip
        raise CheckpointError(
            f"{path}: {', '.join(architectures) or config['model_type']} is {kind}; a masked language model "
            f"({', '.join(known) or 'an architecture that ends in ForMaskedLM'}) is needed"
        )
    return config


def read_tokenizer(folder: Path, config: dict) -> tuple[TextTokenizer, ControlTokens]:
    """The folder's tokenizer, and the control tokens that stand around texts."""
    own = config.get(PACKAGE_SECTION, {})
    path, content = folder / "tokenizer.json", None
    if not path.is_file():
        content = _converted_tokenizer(folder)
    mask_token = own.get("mask_token") or _named_mask_token(folder)
    tokenizer = TextTokenizer(path, mask_token, None, content)
    if "patterns" in own or not tokenizer.has_post_processor:
        tokenizer = TextTokenizer(path, mask_token, own.get("start_token", "[CLS]"), content)
        return tokenizer, ControlTokens(tokenizer.start_id)
    return tokenizer, tokenizer.control_tokens()


def read_patterns(config: dict, control: ControlTokens = NO_CONTROL) -> tuple[dict[str, PatternSpec], PatternName]:
    """The attention patterns that config.json states, and the default one.

    A model from elsewhere states none: it was trained with `full` alone, on texts between its control tokens.
    """
    own, limit = config.get(PACKAGE_SECTION, {}), config["max_position_embeddings"]
    default = own.get("default_pattern", "full")
    elsewhere = {
        "separator_ids": control.separator_ids, "end_ids": control.end_ids,
        "window_type": control.second_type if config["type_vocab_size"] > control.second_type else 0,
    }  # fmt: skip
    try:
        patterns = {
            name: PatternSpec(**{"position_limit": limit, **item, "block_sizes": tuple(item.get("block_sizes", ()))})
            for name, item in own.get("patterns", {"full": elsewhere}).items()
        }
        fits = all(
            item.position_limit <= limit and max(item.prefix_type, item.window_type) < config["type_vocab_size"]
            for item in patterns.values()
        )
    except (AttributeError, TypeError) as error:
        raise CheckpointError(f"config.json: patterns are not as they should be: {error}") from None
    if not fits or default not in patterns:
        raise CheckpointError("config.json: a pattern uses positions or token types that the model lacks, or the "
                              f"default pattern {default!r} is none of {', '.join(patterns)}")  # fmt: skip
    return patterns, default


def default_dtype(device: str | torch.device) -> torch.dtype:
    """bfloat16 where the processor multiplies it natively, else float32."""
    if torch.device(device).type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    capabilities = torch.backends.cpu.get_cpu_capability()
    native = "AVX512" in capabilities and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return torch.bfloat16 if native else torch.float32


def _named_mask_token(folder: Path) -> str:
    """The mask token that the folder's tokenizer_config.json or special_tokens_map.json names; else BERT's."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        try:
            token = json.loads((folder / name).read_text(encoding="utf-8")).get("mask_token")
        except (OSError, ValueError, AttributeError):
            continue
        if token:
            return token["content"] if isinstance(token, dict) else str(token)
    return "[MASK]"


def _converted_tokenizer(folder: Path) -> str:
    """A tokenizer in another format (vocab.txt, vocab.json with merges.txt), as transformers converts it."""
    path = folder / "tokenizer.json"
    # Without a vocabulary transformers makes a tokenizer that knows its control tokens alone.
    if not any(any(folder.glob(name)) for name in VOCABULARY_FILES):
        raise CheckpointError(f"{path}: no such file; a model folder needs tokenizer.json")
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise CheckpointError(
            f"{path}: no such file; `pip install 'diffscore_fast[transformers]'` to have {', '.join(VOCABULARY_FILES)} "
            "converted"
        ) from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        return tokenizer.backend_tokenizer.to_str()
    except Exception as error:  # it raises what its parts happen to raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"{path}: no such file, and transformers converts no tokenizer from the folder ({reason})"
        ) from None
