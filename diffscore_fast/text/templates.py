"""Templates: the words around the context and the scored text, for both directions."""

from __future__ import annotations

import hashlib
import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffscore_fast.errors import InputError
from diffscore_fast.status import OK
from diffscore_fast.text.checks import check_text

SOURCE, CANDIDATE = "{source}", "{candidate}"


@dataclass(frozen=True)
class Template:
    """What a model reads around the two texts.

    `{source}` and `{candidate}` stand for the texts; every other brace is itself, and so is every brace and control
    token inside a text. The parts are tokenised one by one and laid end to end: no token straddles a border, and a text
    has the same tokens, hence the same masks, in every template. A template should put a line break, not a space,
    before a text: byte-level tokenizers would join the space to the text's first word.

    Parameters
    ----------
    name : str
        What messages call it; the signature follows from the texts alone.
    forward : str
        Holds `{source}`, then ends with `{candidate}`: read by conditional and pmi, and by marginal with the source
        left out, so that the two sides of pmi differ in the source alone.
    reverse : str
        Holds `{candidate}`, then ends with `{source}`.

    Raises
    ------
    InputError
        If a field is absent, repeated or out of place.
    """

    name: str
    forward: str
    reverse: str

    def __post_init__(self) -> None:
        for text in (self.forward, self.reverse):
            if check_text("template", text)[0] != OK:
                raise InputError(f"template {self.name!r}: {check_text('template', text)[1]}")
        self.frame("conditional")
        self.frame("reverse")

    def frame(self, direction: str) -> tuple[str, str]:
        """The words before and after the context; the scored text follows the latter."""
        text, context, target = (
            (self.reverse, CANDIDATE, SOURCE) if direction == "reverse" else (self.forward, SOURCE, CANDIDATE)
        )
        before, found, rest = text.partition(context)
        after, ends, beyond = rest.partition(target)
        if not found or not ends or beyond or target in before or context in after:
            which = "reverse" if direction == "reverse" else "forward"
            raise InputError(
                f"template {self.name!r}: {which} must hold {context} once and then end with {target}, the scored text"
            )
        return before, after

    @property
    def identity(self) -> str:
        """What signatures say: equal for equal texts, whatever the file or the template is called.

        The name of the template of this module with the same texts, or "custom@" and `content_hash`.
        """
        texts = self.forward, self.reverse
        known = [name for name, item in TEMPLATES.items() if (item.forward, item.reverse) == texts]
        return known[0] if known else f"custom@{self.content_hash}"

    @property
    def content_hash(self) -> str:
        """Of both texts; 12 hexadecimal digits."""
        return hashlib.sha256(json.dumps([self.forward, self.reverse]).encode()).hexdigest()[:12]


PLAIN = Template("plain", SOURCE + CANDIDATE, CANDIDATE + SOURCE)
TEMPLATES = {
    item.name: item
    for item in (
        PLAIN,
        Template(
            "summarisation",
            f"Article:\n{SOURCE}\n\nSummary:\n{CANDIDATE}",
            f"Summary:\n{CANDIDATE}\n\nArticle:\n{SOURCE}",
        ),
        Template(
            "translation",
            f"Original:\n{SOURCE}\n\nTranslation:\n{CANDIDATE}",
            f"Translation:\n{CANDIDATE}\n\nOriginal:\n{SOURCE}",
        ),
        Template(
            "data-to-text",
            f"Data:\n{SOURCE}\n\nDescription:\n{CANDIDATE}",
            f"Description:\n{CANDIDATE}\n\nData:\n{SOURCE}",
        ),
        Template(
            "dialogue",
            f"Conversation:\n{SOURCE}\n\nReply:\n{CANDIDATE}",
            f"Reply:\n{CANDIDATE}\n\nConversation before it:\n{SOURCE}",
        ),
        Template(
            "simplification",
            f"Text:\n{SOURCE}\n\nIn simple words:\n{CANDIDATE}",
            f"In simple words:\n{CANDIDATE}\n\nText:\n{SOURCE}",
        ),
    )
}


def find_template(template: str | Path | Template) -> Template:
    """A template by name, or from a TOML or JSON file with the texts `forward` and `reverse`.

    A template from a file is called after the file.

    Raises
    ------
    InputError
        If there is no such template, or the file cannot be used.
    """
    if isinstance(template, Template):
        return template
    if not isinstance(template, str | Path):
        raise InputError(f"the template must be a Template, a name or a file, not {template!r}")
    if str(template) in TEMPLATES:
        return TEMPLATES[str(template)]
    path = Path(template)
    if path.suffix not in (".toml", ".json"):
        raise InputError(
            f"no template {str(template)!r}: neither {', '.join(TEMPLATES)}, nor a file that ends in .toml or .json"
        )
    texts = _read(path)
    if not isinstance(texts, dict) or texts.keys() != {"forward", "reverse"}:
        raise InputError(f"{path}: a template has the two texts forward and reverse, and nothing else")
    for key, text in texts.items():
        if not isinstance(text, str):
            raise InputError(f"{path}: {key} is a {type(text).__name__}, not text")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise InputError(f"{path}: {key} holds a lone surrogate, which is not text") from None
    return Template(path.stem, **texts)


def _read(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
        return tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise InputError(f"cannot read template {path}: {error.strerror}") from None
    except ValueError as error:  # no UTF-8, no TOML, no JSON
        raise InputError(f"{path}: not a readable template ({error})") from None
