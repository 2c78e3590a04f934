"""A model folder (config.json, model.safetensors, tokenizer.json) to a backbone and its tokenizer."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from diffscore_fast.backbones.bert import BertBackbone
from diffscore_fast.backbones.bert_families import FAMILIES, bert_config, build_bert, load_state
from diffscore_fast.backbones.llama import LlamaBackbone
from diffscore_fast.backbones.llama_families import LLAMA_FAMILIES, Family, build_llama, fill_llama
from diffscore_fast.backbones.spec import PatternName, PatternSpec
from diffscore_fast.backbones.weights import (
    check_no_pointer,
    check_stored,
    file_sha256,
    load_weights,
    stored_dtype,
    weight_files,
)
from diffscore_fast.backbones.whole import TransformersBackbone, load_whole
from diffscore_fast.errors import CheckpointError, DeviceMemoryError, InputError, is_out_of_memory, memory_named
from diffscore_fast.ops.extension import avoid_generated_code
from diffscore_fast.text.normaliser import content_as_configured
from diffscore_fast.text.tokenizer import ControlTokens, TextTokenizer

EMBEDDED_MODELS = {"mini": Path(__file__).parent / "mini"}
PACKAGE_SECTION = "diffscore_fast"  # our part of config.json: patterns, default pattern, control tokens, checksum
NO_CONTROL = ControlTokens(None)
TUPLES = ("separator_ids", "end_ids", "block_sizes")  # of a pattern, lists in JSON
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
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

    backbone: BertBackbone | LlamaBackbone | TransformersBackbone
    tokenizer: TextTokenizer
    weights_sha256: str
    fingerprint: str

    @property
    def bert(self) -> BertBackbone:
        """The backbone as a BERT network of this package, which alone can be trained."""
        if not isinstance(self.backbone, BertBackbone):
            raise CheckpointError(f"model {self.backbone.spec.name!r} is no BERT network; it cannot be trained")
        return self.backbone


def load_model(name_or_path: str | Path = "mini", *, device: str | torch.device = "cpu",
               dtype: torch.dtype | None = None) -> LoadedModel:  # fmt: skip
    """Load a masked language model: embedded, from a folder, or from the local Hugging Face cache.

    BERT, DistilBERT, RoBERTa, ELECTRA generators, LLaDA, Dream, and Llama where config.json states patterns under
    `diffscore_fast`, run on this package's own networks; other types (ModernBERT, say) are run by transformers.
    Nothing is downloaded, and code that comes with a checkpoint is never run.

    A model of this package states its own control tokens. Others use those that their tokenizer.json sets around a
    text and a pair ([CLS] source [SEP] candidate [SEP], <s> source </s></s> candidate </s>), with its token types:
    the source is the first text of the pair; a candidate without source is a single text. Without a post-processor
    in tokenizer.json there is [CLS] alone. LLaDA reads texts end to end, Dream after its bos_token.

    Parameters
    ----------
    name_or_path : str or Path
        "mini"; a folder in transformers' layout; or the name of a model in the cache, "org/name", or
        "org/name@revision" for a branch, tag or commit other than main.
    device : str or torch.device
        Where the weights go.
    dtype : torch.dtype, optional
        Type of weights and hidden states. If not given, float32 on a CPU and the checkpoint's own type on a GPU (see
        `default_dtype`). On one processor with AVX-512 BF16, bfloat16 was 1.9 times as fast as float32; it moved
        scores by 0.002 nats per token on SummEval and 0.004 on SFRES (root mean square; rank correlation 0.9999).

    Raises
    ------
    InputError
        If the model is not named by a text or path, or the device cannot be used here.
    CheckpointError
        If there is no such model, it is no masked language model, a file is missing or a Git LFS pointer, a tensor is
        missing, left over or quantised without its scales, two files disagree, or a checksum differs.
    DeviceMemoryError
        If memory runs out.

    Notes
    -----
    torch's default type and device do not reach the network, and torch's random stream is left as it was.
    """
    check_name(name_or_path)
    avoid_generated_code()
    with memory_named(f"there is no memory to load model {str(name_or_path)!r}; free some, or use a smaller model"):
        return _load(name_or_path, _usable_device(device), dtype)


def _load(name_or_path: str | Path, device: torch.device, dtype: torch.dtype | None) -> LoadedModel:
    folder, name = find_model(name_or_path)
    config = read_config(folder)
    tokenizer, control = read_tokenizer(folder, config)
    _check_rows(folder, tokenizer, config.get("vocab_size"))
    files = _weight_files(folder, config)
    dtype = dtype or default_dtype(device, files)
    full = f"{device} has no room for the weights of {name!r} in {dtype}; use a smaller model or type"
    with memory_named(full):
        backbone = _read_backbone(folder, files, name, config, tokenizer.mask_id, control, device, dtype)
    _check_rows(folder, tokenizer, backbone.spec.vocab_size)
    hashes = [file_sha256(path) for path in files]
    weights_sha256 = hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()
    if config.get(PACKAGE_SECTION, {}).get("weights_sha256", weights_sha256) != weights_sha256:
        raise CheckpointError(f"{folder}: the weights' SHA-256 differs from config.json's; damaged or replaced")
    canonical = json.dumps(config, sort_keys=True)
    fingerprint = hashlib.sha256(f"{weights_sha256}{canonical}".encode()).hexdigest()
    return LoadedModel(backbone, tokenizer, weights_sha256, fingerprint)


def check_name(model: Any) -> None:
    """Refuse what names no model.

    Raises
    ------
    InputError
        If it is neither a text nor a path, or is empty.
    """
    if not isinstance(model, str | Path) or not str(model).strip():
        raise InputError(f"model must be a folder or a name such as {next(iter(EMBEDDED_MODELS))!r}, not {model!r}")


def _weight_files(folder: Path, config: dict) -> list[Path]:
    """The safetensors files that the network is read from."""
    if config["model_type"] in LLAMA_FAMILIES or config["model_type"] in FAMILIES:
        files = weight_files(folder)
    else:
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"{folder}: no safetensors file; a model folder needs its weights in that format")
    for path in files:
        check_no_pointer(path)
    return files


def _read_backbone(
    folder: Path, files: list[Path], name: str, config: dict, mask_id: int, control: ControlTokens,
    device: torch.device, dtype: torch.dtype,
) -> BertBackbone | LlamaBackbone | TransformersBackbone:  # fmt: skip
    """The network with its weights on the device."""
    if config["model_type"] in LLAMA_FAMILIES:
        where = f"{folder}/config.json"
        stated = read_patterns(config) if LLAMA_FAMILIES[config["model_type"]].states_patterns else ()
        llama = build_llama(name, config, control.start_id, where, *stated)
        fill_llama(llama, files, device, dtype)
        return llama
    if config["model_type"] in FAMILIES:
        named = bert_config(config, f"{folder}/config.json")
        patterns, default_pattern = read_patterns(named, control)
        with torch.device("meta"):  # no random numbers are drawn, and torch's default type is not asked
            bert = build_bert(name, named, patterns, default_pattern, mask_id, control.start_id)
        weights = {name: item for path in files for name, item in load_weights(path).items()}
        where = str(folder if len(files) > 1 else files[0])
        load_state(bert, weights, where, tied=config.get("tie_word_embeddings") not in (False,))
        return bert.eval().requires_grad_(False).to(device=device, dtype=dtype)
    check_stored(files)
    return load_whole(folder, name, config, mask_id, control).to(device, dtype)


def _check_rows(folder: Path, tokenizer: TextTokenizer, rows: Any) -> None:
    """The network must have a row for every token; `rows` is None or odd where config.json is."""
    if isinstance(rows, int) and tokenizer.vocab_size > rows:
        raise CheckpointError(f"{folder}: tokenizer.json has {tokenizer.vocab_size} tokens, the model only {rows}")


def _usable_device(device: str | torch.device) -> torch.device:
    try:
        found = torch.device(device)
        float(torch.ones(1, device=found).sum())  # a GPU that this torch has no kernels for fails here
    except Exception as error:  # torch raises what the backend happens to raise
        if is_out_of_memory(error):
            raise DeviceMemoryError(f"device {str(device)!r} has no memory left: {error}") from error
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(f"device {str(device)!r} cannot be used here: {reason}; `diffscore info` lists what there "
                         "is") from None  # fmt: skip
    return found


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
    check_no_pointer(path)
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
    if not isinstance(architectures, list) or not all(isinstance(item, str) for item in architectures):
        raise CheckpointError(f"{path}: architectures must be a list of names, not {architectures!r}")
    family = FAMILIES.get(config["model_type"]) or LLAMA_FAMILIES.get(config["model_type"])
    known = family.architectures if family else tuple(item for item in architectures if item.endswith("ForMaskedLM"))
    needs_section = isinstance(family, Family) and family.states_patterns
    untrained = needs_section and "patterns" not in config.get(PACKAGE_SECTION, {})
    if untrained or architectures and not set(architectures) & set(known) or config.get("is_decoder"):
        kind = next((kind for end, kind in OTHER_KINDS.items() if architectures and architectures[0].endswith(end)),
                    "a decoder" if config.get("is_decoder") or untrained else "not known here")  # fmt: skip
        expected = ", ".join(known) or "an architecture that ends in ForMaskedLM"
        if needs_section:
            expected = f"with its patterns stated under {PACKAGE_SECTION!r}"
        raise CheckpointError(
            f"{path}: {', '.join(architectures) or config['model_type']} is {kind}; a masked language model "
            f"({expected}) is needed"
        )
    return config


def read_tokenizer(folder: Path, config: dict) -> tuple[TextTokenizer, ControlTokens]:
    """The folder's tokenizer, and the control tokens that stand around texts."""
    own, family = config.get(PACKAGE_SECTION, {}), LLAMA_FAMILIES.get(config["model_type"])
    path, content = folder / "tokenizer.json", None
    for name in TOKENIZER_FILES:
        check_no_pointer(folder / name)
    if path.is_file() and "patterns" not in own:
        content = content_as_configured(folder, config["model_type"])
    elif not path.is_file():
        content = _converted_tokenizer(folder, family.tokenizer if family else "AutoTokenizer")
    if family is not None:
        return _plain_tokenizer(folder, config, content)
    mask_token = own.get("mask_token") or _named_token(folder, "mask_token") or "[MASK]"
    tokenizer = TextTokenizer(path, mask_token, None, content)
    if "patterns" in own or not tokenizer.has_post_processor:
        tokenizer = TextTokenizer(path, mask_token, own.get("start_token", "[CLS]"), content)
        return tokenizer, ControlTokens(tokenizer.start_id)
    return tokenizer, tokenizer.control_tokens()


def _plain_tokenizer(folder: Path, config: dict, content: str | None) -> tuple[TextTokenizer, ControlTokens]:
    """The tokenizer of a model that reads texts end to end, without control tokens between them.

    All added tokens count as control tokens, which no text may spell, whatever the file calls them.
    """
    mask = config.get("mask_token_id")
    if not isinstance(mask, int):
        raise CheckpointError(f"{folder}/config.json: needs mask_token_id, the token of a masked position")
    try:
        stored = json.loads((folder / "tokenizer.json").read_text("utf-8") if content is None else content)
        tokens = {token["content"]: token["id"] for token in stored["added_tokens"]}
        stored["added_tokens"] = [{**token, "special": True} for token in stored["added_tokens"]]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder}/tokenizer.json: not a readable tokenizer ({error!r})") from None
    named = _named_token(folder, "mask_token")
    if named is not None and tokens.get(named, mask) != mask:
        raise CheckpointError(f"{folder}: tokenizer_config.json masks with {named!r}, token {tokens[named]}; "
                              f"config.json with token {mask}")  # fmt: skip
    start = None
    if LLAMA_FAMILIES[config["model_type"]].logit_shift:  # the first token needs something before it to predict it
        start = config.get(PACKAGE_SECTION, {}).get("start_token") or _named_token(folder, "bos_token")
        if start is None or not _is_stored(folder, start):
            raise CheckpointError(f"{folder}: tokenizer_config.json names no bos_token that the vocabulary has, to set "
                                  f"before a text (it names {start!r})")  # fmt: skip
    tokenizer = TextTokenizer(folder / "tokenizer.json", mask, start, json.dumps(stored))
    return tokenizer, ControlTokens(tokenizer.start_id)


def _is_stored(folder: Path, token: str) -> bool:
    """Whether a file of the folder lists a token; a conversion invents those that are named and missing."""
    listing = json.dumps(token, ensure_ascii=False)
    for name in ("tokenizer.json", "vocab.json", "added_tokens.json"):
        path = folder / name
        if path.is_file() and listing in path.read_text("utf-8", errors="replace"):
            return True
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
        return token in {item["content"] for item in config["added_tokens_decoder"].values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def read_patterns(config: dict, control: ControlTokens = NO_CONTROL) -> tuple[dict[str, PatternSpec], PatternName]:
    """The attention patterns that config.json states, and the default one.

    A model from elsewhere states none: it was trained with `full` alone, on texts between its control tokens.
    """
    own, limit = config.get(PACKAGE_SECTION, {}), config["max_position_embeddings"]
    default, types = own.get("default_pattern", "full"), config.get("type_vocab_size", 1)
    elsewhere = {
        "separator_ids": control.separator_ids, "end_ids": control.end_ids,
        "window_type": control.second_type if types > control.second_type else 0,
    }  # fmt: skip
    try:
        patterns = {
            name: PatternSpec(**{"position_limit": limit, **item, **{key: tuple(item.get(key, ())) for key in TUPLES}})
            for name, item in own.get("patterns", {"full": elsewhere}).items()
        }
        fits = all(
            item.position_limit <= limit
            and max(item.prefix_type, item.window_type) < types
            and item.prefix_mask in ("bidirectional", "causal" if name == "prefix" else "")
            for name, item in patterns.items()
        )
    except (AttributeError, TypeError) as error:
        raise CheckpointError(f"config.json: patterns are not as they should be: {error}") from None
    if not fits or default not in patterns:
        raise CheckpointError("config.json: a pattern uses positions or token types that the model lacks, or a "
                              "prefix_mask that is not 'bidirectional' or (for 'prefix' alone) 'causal', or the "
                              f"default pattern {default!r} is none of {', '.join(patterns)}")  # fmt: skip
    return patterns, default


def default_dtype(device: str | torch.device, files: list[Path]) -> torch.dtype:
    """float32 on a CPU, whatever the processor; on a GPU the type of most weights in the checkpoint's files.

    Where a GPU does not multiply bfloat16, float32 stands in for it.
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


def _named_token(folder: Path, role: str) -> str | None:
    """The token that the folder's tokenizer_config.json or special_tokens_map.json names for a role."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        try:
            token = json.loads((folder / name).read_text(encoding="utf-8")).get(role)
        except (OSError, ValueError, AttributeError):
            continue
        if token:
            return token["content"] if isinstance(token, dict) else str(token)
    return None


def _converted_tokenizer(folder: Path, kind: str) -> str:
    """A tokenizer in another format (vocab.txt, vocab.json with merges.txt), as that class of transformers reads it."""
    path = folder / "tokenizer.json"
    # Without a vocabulary transformers makes a tokenizer that knows its control tokens alone.
    vocabularies = [found for name in (*VOCABULARY_FILES, "merges.txt") for found in sorted(folder.glob(name))]
    for found in vocabularies:
        check_no_pointer(found)
    if not vocabularies:
        raise CheckpointError(f"{path}: no such file; a model folder needs tokenizer.json")
    try:
        import transformers
    except ImportError:
        raise CheckpointError(
            f"{path}: no such file; `pip install 'diffscore_fast[transformers]'` to have {', '.join(VOCABULARY_FILES)} "
            "converted"
        ) from None
    try:
        reader = getattr(transformers, kind)
        tokenizer = reader.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        return tokenizer.backend_tokenizer.to_str()
    except Exception as error:  # it raises what its parts happen to raise
        if is_out_of_memory(error):
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"{path}: no such file, and transformers converts no tokenizer from the folder ({reason})"
        ) from None
