"""Where a model's folder is, and what its config.json states."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from diffscore_fast.backbones.bert_families import BERT_FAMILIES
from diffscore_fast.backbones.dit_families import DIT_FAMILIES
from diffscore_fast.backbones.llama_families import LLAMA_FAMILIES, LlamaFamily
from diffscore_fast.backbones.small import SMALL, small_folder
from diffscore_fast.backbones.spec import PatternName, PatternSpec
from diffscore_fast.backbones.weights import check_no_pointer
from diffscore_fast.errors import CheckpointError, InputError
from diffscore_fast.text.tokenizer import ControlTokens

EMBEDDED_MODELS = {"mini": Path(__file__).parent / "mini"}
PACKAGE_SECTION = "diffscore_fast"  # our part of config.json: patterns, default pattern, control tokens, checksum
NO_CONTROL = ControlTokens(None)
TUPLES = ("separator_ids", "end_ids", "block_sizes")  # fields of a pattern that are lists in JSON
# Other kinds of checkpoints, by the end of the architecture's name.
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

# Text diffusion models that are refused, by the beginning of the architecture's name.
REFUSED = {
    "SEDD": "is conditioned on the noise level sigma, which a text with masks does not have",
    "DiffusionGemma": "replaces tokens by random ones (uniform noise) and has no mask token",
    "LLaDAMoE": "is a mixture of experts, which no network here has",
    "LLaDA2Moe": "is a mixture of experts, which no network here has",
    "SDARMoe": "is a mixture of experts, which no network here has",
    "Fast_dLLM": "predicts a block's first token from the block before it, which the pattern `block` here does not do",
}


def find_model(name_or_path: str | Path) -> tuple[Path, str]:
    """A model's folder, and its name in signatures.

    Raises
    ------
    CheckpointError
        If it is no embedded model, no folder, and not in the local Hugging Face cache.
    """
    name = str(name_or_path)
    if name in EMBEDDED_MODELS:
        return EMBEDDED_MODELS[name], name
    if name == SMALL and (folder := small_folder()).is_dir():
        return folder, name
    folder = Path(name_or_path)
    if folder.is_dir():
        return folder, folder.resolve().name
    if name == SMALL:
        raise CheckpointError("model 'small' has not been made on this machine; `diffscore get small` does it, once")
    repository, _, revision = name.partition("@")
    cached = cached_folder(repository, revision or None)
    if cached is None:
        known = ", ".join([*EMBEDDED_MODELS, SMALL])
        raise CheckpointError(
            f"no model {name!r}: neither an embedded model ({known}) nor a folder, nor in the "
            f"local Hugging Face cache; nothing is downloaded here, `hf download {repository}` would"
        )
    return cached, repository


def cached_folder(repository: str, revision: str | None = None) -> Path | None:
    """The folder of a repository in the local Hugging Face cache; None if it is not there. Nothing is downloaded."""
    try:
        return Path(snapshot_download(repository, revision=revision, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return None


def stated_licence(folder: Path) -> str | None:
    """The licence that the model card (README.md) names in its header; None if there is none."""
    try:
        lines = (folder / "README.md").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    if not lines or lines[0].strip() != "---":
        return None
    header = itertools.takewhile(lambda line: line.strip() != "---", lines[1:])
    named = [line.partition(":")[2].strip() for line in header if line.startswith("license:")]
    return named[0] or None if named else None


def check_name(model: Any) -> None:
    """Check that a value can name a model.

    Raises
    ------
    InputError
        If it is neither a text nor a path, or is empty.
    """
    if not isinstance(model, str | Path) or not str(model).strip():
        raise InputError(f"model must be a folder or a name such as {next(iter(EMBEDDED_MODELS))!r}, not {model!r}")


def read_config(folder: Path) -> dict:
    """The folder's config.json.

    Raises
    ------
    CheckpointError
        If it cannot be read, or does not describe a masked language model.
    """
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
    _check_masked(path, config, architectures)
    return config


def read_patterns(config: dict, control: ControlTokens = NO_CONTROL) -> tuple[dict[str, PatternSpec], PatternName]:
    """The attention patterns that config.json states, and the default one.

    A model that this package did not train states none: it has only `full`, with its control tokens around texts.

    Raises
    ------
    CheckpointError
        If a pattern is malformed, or asks for more than the model has.
    """
    own, limit = config.get(PACKAGE_SECTION, {}), config["max_position_embeddings"]
    default, types = own.get("default_pattern", "full"), config.get("type_vocab_size", 1)
    elsewhere = {
        "separator_ids": control.separator_ids,
        "end_ids": control.end_ids,
        "window_type": control.second_type if types > control.second_type else 0,
    }
    try:
        patterns = {
            name: PatternSpec(**{"position_limit": limit, **item, **{key: tuple(item.get(key, ())) for key in TUPLES}})
            for name, item in own.get("patterns", {"full": elsewhere}).items()
        }
        fits = all(
            item.position_limit <= limit
            and max(item.prefix_type, item.window_type) < types
            and item.prefix_mask in ("bidirectional", "causal" if name != "full" else "")
            and item.default_block_size in (0, *item.block_sizes)
            and all(isinstance(size, int) and size > 0 for size in item.block_sizes)
            for name, item in patterns.items()
        )
    except (AttributeError, TypeError) as error:
        raise CheckpointError(f"config.json: patterns are not of the right form: {error}") from None
    if default == "block" and not (default in patterns and patterns[default].default_block_size):
        raise CheckpointError("config.json: the default pattern 'block' needs a default_block_size")
    if not fits or default not in patterns:
        raise CheckpointError(
            "config.json: a pattern uses positions or token types that the model lacks, or a "
            "prefix_mask that is not 'bidirectional' or (not for 'full') 'causal', or block sizes that are no whole "
            "numbers above 0 or lack the default, or the "
            f"default pattern {default!r} is none of {', '.join(patterns)}"
        )
    return patterns, default


def _check_masked(path: Path, config: dict, architectures: list[str]) -> None:
    """Refuse a config.json that does not describe a masked language model, and name what it does describe."""
    kind = config["model_type"]
    family = BERT_FAMILIES.get(kind) or LLAMA_FAMILIES.get(kind) or DIT_FAMILIES.get(kind)
    known = family.architectures if family else tuple(item for item in architectures if item.endswith("ForMaskedLM"))
    needs_section = isinstance(family, LlamaFamily) and family.states_patterns
    is_causal = needs_section and "patterns" not in config.get(PACKAGE_SECTION, {})
    for architecture in architectures:
        for beginning, reason in REFUSED.items():
            if architecture.startswith(beginning):
                raise CheckpointError(f"{path}: {architecture} {reason}; it cannot be scored")
    is_other = bool(architectures) and not set(architectures) & set(known)
    if not (is_causal or is_other or config.get("is_decoder")):
        return
    kind = next(
        (kind for end, kind in OTHER_KINDS.items() if architectures and architectures[0].endswith(end)),
        "a decoder" if config.get("is_decoder") or is_causal else "not known here",
    )
    expected = ", ".join(known) or "an architecture that ends in ForMaskedLM"
    if needs_section:
        expected = f"with its patterns stated under {PACKAGE_SECTION!r}"
    raise CheckpointError(
        f"{path}: {', '.join(architectures) or config['model_type']} is {kind}; a masked language model "
        f"({expected}) is needed"
    )
