"""Lower-casing and accents: where tokenizer_config.json and tokenizer.json disagree, what transformers does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, normalizers

from diffscore_fast.errors import CheckpointError

# Classes of transformers that set BERT's normaliser by tokenizer_config.json, whatever tokenizer.json says; model types
# whose tokenizer is one of them where no class is named.
BERT_CLASSES = ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer")
BERT_TYPES = ("bert", "distilbert", "electra")
# tokenizer_config.json's names and those of BERT's normaliser, with what transformers takes for a name that is absent.
SETTINGS = {
    "do_lower_case": ("lowercase", True),
    "strip_accents": ("strip_accents", None),
    "tokenize_chinese_chars": ("handle_chinese_chars", True),
}
PROBE = "\u00c0\u00c9 \u00fc B\u4e2dc"  # letters that every setting changes


def content_as_configured(folder: Path, model_type: str) -> str | None:
    """What tokenizer.json would say with the settings of tokenizer_config.json; None where the file holds as it is.

    They count for the classes of transformers that heed them, where tokenizer_config.json names such a class or states
    a setting; those that it does not state have transformers' defaults then.

    Raises
    ------
    CheckpointError
        If a stated setting differs and the file's normaliser is not BERT's, so that it cannot be set; or if a setting
        is neither true, false nor null.
    """
    path = folder / "tokenizer.json"
    try:
        stated = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
        content = path.read_text("utf-8")
        stored = json.loads(content)["normalizer"]
        tokenizer = Tokenizer.from_str(content)
    except Exception:  # no such file, or a damaged one: the code that needs it raises
        return None
    if not isinstance(stated, dict):
        return None
    kind, states_some = stated.get("tokenizer_class"), bool(set(SETTINGS) & set(stated))
    heeds_them = str(kind).removesuffix("Fast") in BERT_CLASSES if kind else states_some and model_type in BERT_TYPES
    if not heeds_them:
        return None
    is_bert = isinstance(stored, dict) and stored.get("type") == "BertNormalizer"
    wanted: dict[str, Any] = {}
    for name, (field, default) in SETTINGS.items():
        wanted[field] = stated.get(name, default)
        if not isinstance(wanted[field], bool | None) or (wanted[field] is None and name != "strip_accents"):
            raise CheckpointError(
                f"{folder}/tokenizer_config.json: {name} must be true or false, not {wanted[field]!r}"
            )
    if is_bert:
        if all(stored.get(field) == value for field, value in wanted.items()):
            return None
        return json.dumps({**json.loads(content), "normalizer": {**stored, **wanted}}, ensure_ascii=False)
    found = PROBE if tokenizer.normalizer is None else tokenizer.normalizer.normalize_str(PROBE)
    if states_some and found != normalizers.BertNormalizer(**wanted).normalize_str(PROBE):
        settings = ", ".join(f"{name} = {stated[name]!r}" for name in SETTINGS if name in stated)
        raise CheckpointError(
            f"{folder}: tokenizer_config.json has {settings}, and the normaliser of tokenizer.json "
            "does something else; make the two files agree"
        )
    return None
