"""A model folder's tokenizer, and the control tokens that stand around texts."""

from __future__ import annotations

import json
from pathlib import Path

from diffscore_fast.backbones.config import PACKAGE_SECTION, cached_folder
from diffscore_fast.backbones.dit_families import DIT_FAMILIES, START_TOKEN, TOKENIZER, mask_id
from diffscore_fast.backbones.llama_families import LLAMA_FAMILIES
from diffscore_fast.backbones.weights import check_no_pointer
from diffscore_fast.errors import CheckpointError, first_line, is_out_of_memory
from diffscore_fast.text.normaliser import content_as_configured
from diffscore_fast.text.tokenizer import ControlTokens, TextTokenizer

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
# Files that may hold a tokenizer where there is no tokenizer.json.
VOCABULARY_FILES = ("vocab.txt", "vocab.json", "*.model")


def read_tokenizer(folder: Path, config: dict) -> tuple[TextTokenizer, ControlTokens]:
    """The folder's tokenizer, and the control tokens that stand around texts.

    Raises
    ------
    CheckpointError
        If there is no tokenizer, it cannot be read, or it lacks the mask token or the start token.
    """
    if config["model_type"] in DIT_FAMILIES:
        return _gpt2_tokenizer(folder, config)
    own, family = config.get(PACKAGE_SECTION, {}), LLAMA_FAMILIES.get(config["model_type"])
    path, content = folder / "tokenizer.json", None  # content: what is read in place of the file
    for name in TOKENIZER_FILES:
        check_no_pointer(folder / name)
    if path.is_file() and "patterns" not in own:
        content = content_as_configured(folder, config["model_type"])
    elif not path.is_file():
        content = _converted_tokenizer(folder, family.tokenizer if family else "AutoTokenizer")
    if family is not None:
        return _end_to_end_tokenizer(folder, config, content)
    mask_token = own.get("mask_token") or _named_token(folder, "mask_token") or "[MASK]"
    tokenizer = TextTokenizer(path, mask_token, None, content)
    if "patterns" in own or not tokenizer.has_post_processor:
        tokenizer = TextTokenizer(path, mask_token, own.get("start_token", "[CLS]"), content)
        return tokenizer, ControlTokens(tokenizer.start_id)
    return tokenizer, tokenizer.control_tokens()


def _gpt2_tokenizer(folder: Path, config: dict) -> tuple[TextTokenizer, ControlTokens]:
    """GPT-2's tokenizer, from the folder or the local cache, with a mask token after its last one.

    A line starts with the end-of-text token, and texts are read end to end.
    """
    if not any(found for name in ("tokenizer.json", *VOCABULARY_FILES) for found in folder.glob(name)):
        folder = _cached_tokenizer(folder)
    path, mask = folder / "tokenizer.json", mask_id(config)
    check_no_pointer(path)
    try:
        stored = json.loads(
            path.read_text("utf-8") if path.is_file() else _converted_tokenizer(folder, "GPT2Tokenizer")
        )
        tokens = [token for token in stored["added_tokens"] if token["id"] != mask]
        named = {token["content"] for token in tokens}
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: not a readable tokenizer ({error!r})") from None
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = {"id": mask, "content": "<|mask|>", **flags}
    if added["content"] in named:
        raise CheckpointError(f"{path}: has a token {added['content']!r} already, which is not the model's, {mask}")
    stored["added_tokens"] = [{**token, "special": True} for token in (*tokens, added)]
    tokenizer = TextTokenizer(path, mask, START_TOKEN, json.dumps(stored))
    return tokenizer, ControlTokens(tokenizer.start_id)


def _cached_tokenizer(folder: Path) -> Path:
    """The folder of GPT-2's tokenizer in the local Hugging Face cache."""
    for name in (TOKENIZER, TOKENIZER.partition("/")[2]):
        found = cached_folder(name)
        if found is not None:
            return found
    raise CheckpointError(
        f"{folder}/tokenizer.json: no such file; this model reads GPT-2's tokens: put that tokenizer.json there, or "
        f"run `hf download {TOKENIZER} tokenizer.json`"
    )


def _end_to_end_tokenizer(folder: Path, config: dict, content: str | None) -> tuple[TextTokenizer, ControlTokens]:
    """The tokenizer of a model that reads texts end to end, without control tokens between them.

    All added tokens count as control tokens, whatever the file calls them: no text is encoded to one.
    """
    try:
        stored = json.loads((folder / "tokenizer.json").read_text("utf-8") if content is None else content)
        tokens = {token["content"]: token["id"] for token in stored["added_tokens"]}
        stored["added_tokens"] = [{**token, "special": True} for token in stored["added_tokens"]]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder}/tokenizer.json: not a readable tokenizer ({error!r})") from None
    named = _named_token(folder, "mask_token")
    mask = config.get("mask_token_id", tokens.get(LLAMA_FAMILIES[config["model_type"]].mask_token))
    if not isinstance(mask, int):
        raise CheckpointError(f"{folder}/config.json: needs mask_token_id, the token of a masked position")
    if named is not None and tokens.get(named, mask) != mask:
        raise CheckpointError(
            f"{folder}: tokenizer_config.json masks with {named!r}, token {tokens[named]}; "
            f"config.json with token {mask}"
        )
    start = None
    if LLAMA_FAMILIES[config["model_type"]].logit_shift:  # the first token needs something before it to predict it
        start = config.get(PACKAGE_SECTION, {}).get("start_token") or _named_token(folder, "bos_token")
        if start is None or not _is_stored(folder, start):
            raise CheckpointError(
                f"{folder}: tokenizer_config.json names no bos_token of the vocabulary to set before a text; "
                f"it names {start!r}"
            )
    tokenizer = TextTokenizer(folder / "tokenizer.json", mask, start, json.dumps(stored))
    return tokenizer, ControlTokens(tokenizer.start_id)


def _is_stored(folder: Path, token: str) -> bool:
    """Whether a file of the folder lists a token. (A conversion adds tokens that are named but not stored.)"""
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
    """A tokenizer in another format (vocab.txt, vocab.json with merges.txt), read by a class of transformers.

    Returns the content of the tokenizer.json that it amounts to.
    """
    path = folder / "tokenizer.json"
    # Without a vocabulary transformers makes a tokenizer that knows only its control tokens.
    vocabularies = [found for name in (*VOCABULARY_FILES, "merges.txt") for found in sorted(folder.glob(name))]
    for found in vocabularies:
        check_no_pointer(found)
    if not vocabularies:
        raise CheckpointError(f"{path}: no such file; a model folder needs tokenizer.json")
    try:
        import transformers
    except ImportError:
        raise CheckpointError(
            f"{path}: no such file; to convert {', '.join(VOCABULARY_FILES)}, "
            "`pip install 'diffscore_fast[transformers]'`"
        ) from None
    try:
        reader = getattr(transformers, kind)
        tokenizer = reader.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        return tokenizer.backend_tokenizer.to_str()
    except Exception as error:  # each of its parts raises types of its own
        if is_out_of_memory(error):
            raise
        raise CheckpointError(
            f"{path}: no such file, and transformers converts no tokenizer from the folder ({first_line(error)})"
        ) from None
