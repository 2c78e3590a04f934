"""Text to token ids and the characters each covers, through the `tokenizers` library."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, compress, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from diffscore_fast.errors import CheckpointError
from diffscore_fast.process import is_forked

# A text of more characters than this for each token of room is first read in part.
CHARACTERS_PER_TOKEN = 16
# Where a text may be cut so that the part before keeps the tokens that it has in the whole: a space between letters.
_BORDER = re.compile(r"[^\W\d_](?= [^\W\d_])")
_WINDOW = 1 << 12  # characters in which a border is looked for
# Normalisers that change a text character by character, or join only what a space does not part.
_LOCAL_NORMALIZERS = ("BertNormalizer", "NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Prepend")
# Patterns of Qwen 2 and of GPT-4 (Llama 3): every alternative that takes a space before letters begins with it.
_PARTING_PATTERNS = tuple(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
    + numbers
    + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for numbers in (r"\p{N}", r"\p{N}{1,3}")
)
# Pre-tokenisers that part a text at such a border, whatever stands around it.
_PARTING = ("BertPreTokenizer", "Whitespace", "WhitespaceSplit")

FEW_TEXTS = 4  # these take less time than to wake the library's threads
NO_SPANS = np.zeros((0, 2), np.int32)
UNKNOWN = ("[UNK]", "<unk>")  # what a text that cannot be spelled becomes; no control token


@dataclass(frozen=True)
class Encoded:
    """One text as tokens.

    Byte-level tokenizers have tokens of white space alone, whose range may be empty, and cut a character into several
    tokens, which then all have its range.

    Parameters
    ----------
    ids : int32 [L]
    spans : int32 [L, 2]
        Half-open character range of each; [0, 2] where they were not asked for.
    eligible : bool [L], optional
        Which tokens may be masked; all of them if not given.
    is_beginning : bool
        Whether these are only the first tokens of the text, which has more.
    """

    ids: np.ndarray
    spans: np.ndarray
    eligible: np.ndarray | None = None
    is_beginning: bool = False

    @property
    def num_eligible(self) -> int:
        return len(self.ids) if self.eligible is None else int(self.eligible.sum())

    def head(self, count: int) -> Encoded:
        """The first tokens."""
        eligible = None if self.eligible is None else self.eligible[:count]
        return Encoded(self.ids[:count], self.spans[:count], eligible)


def count_of(item: Encoded) -> str:
    """How many tokens a text has, in words."""
    return f"more than {len(item.ids) - 1} tokens" if item.is_beginning else f"{len(item.ids)} tokens"


@dataclass(frozen=True)
class ControlTokens:
    """The control tokens that a tokenizer sets around a text and a pair of texts.

    `start_id` comes first (None: nothing does), `separator_ids` between two texts, `end_ids` last; `second_type` is
    the token type of the second text of a pair, the first has 0.
    """

    start_id: int | None
    separator_ids: tuple[int, ...] = ()
    end_ids: tuple[int, ...] = ()
    second_type: int = 0


class TextTokenizer:
    """A tokenizer.json read as it is, adding no special tokens and reading none out of user text.

    Parameters
    ----------
    path : Path
        The tokenizer.json of a model folder.
    mask_token : str or int
        The control token that stands for a masked position, by name or id; it must exist.
    start_token : str or None
        The control token that begins every text, likewise.
    content : str, optional
        What the file would say, where a folder has its tokenizer in another format.
    """

    def __init__(self, path: Path, mask_token: str | int, start_token: str | None, content: str | None = None) -> None:
        if content is None and not path.is_file():
            raise CheckpointError(f"{path}: no such file; a model folder needs tokenizer.json")
        stored = path.read_bytes() if content is None else content.encode()
        try:
            self._tokenizer = Tokenizer.from_str(stored.decode())
        except Exception as error:  # the library raises nothing narrower
            raise CheckpointError(f"{path}: not a readable tokenizer ({error})") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # "[MASK]" typed by a user is six characters, not a masked position.
        self._tokenizer.encode_special_tokens = True
        self._path = path
        self.sha256 = hashlib.sha256(stored).hexdigest()
        self._parts_at_borders = _parts_at_borders(json.loads(stored))
        self.mask_id = self._control_id(mask_token)
        self.start_id = None if start_token is None else self._control_id(start_token)
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self._check_text_is_text()

    def encode(self, texts: Sequence[str], *, keep_blank: bool = False, spans: bool = True) -> list[Encoded]:
        """Encode texts, in order, on all cores (in a forked child on one).

        White space alone has no tokens, unless `keep_blank`: a blank text is an empty one, a blank part of a template
        is as it stands there. Without `spans`, which take half of the time, all spans are empty.

        Raises
        ------
        UnicodeEncodeError
            If a text holds a lone surrogate, which is not Unicode text; callers check first.
        """
        if is_forked() or len(texts) <= FEW_TEXTS:
            encodings = [self._tokenizer.encode(text, add_special_tokens=False) for text in texts]
        else:
            encode = self._tokenizer.encode_batch if spans else self._tokenizer.encode_batch_fast
            encodings = encode(list(texts), add_special_tokens=False)
        has_tokens = [keep_blank or bool(text.strip()) for text in texts]
        # Of all texts together: to make an array takes longer than to cut one.
        own_ids = [item.ids if has else () for item, has in zip(encodings, has_tokens, strict=True)]
        ends = list(accumulate(map(len, own_ids), initial=0))
        ids = np.fromiter(chain.from_iterable(own_ids), np.int32, ends[-1])
        if not spans:
            return [Encoded(ids[start:end], NO_SPANS) for start, end in pairwise(ends)]
        pairs = chain.from_iterable(item.offsets for item in compress(encodings, has_tokens))
        ranges = np.fromiter(chain.from_iterable(pairs), np.int32, 2 * ends[-1]).reshape(-1, 2)
        return [Encoded(ids[start:end], ranges[start:end]) for start, end in pairwise(ends)]

    def decode(self, ids: np.ndarray) -> str:
        """The text of tokens, control tokens left out; a character that is cut is U+FFFD."""
        return self._tokenizer.decode(ids.tolist())

    def encode_up_to(self, texts: Sequence[str], max_tokens: int, *, spans: bool = True) -> list[Encoded]:
        """Like `encode`; of a text of more than `max_tokens` tokens it may return the first `max_tokens` + 1 only.

        A long text is read in parts that double, until one has more tokens than that or the text is at its end. Each
        part ends between two words, where the tokens before are those of the whole text; with a tokenizer for which
        that is not certain, or in a text without such a place, the whole text is read.
        """
        size = CHARACTERS_PER_TOKEN * (max_tokens + 1)
        parts = [self._first_part(text, max_tokens) if len(text) > size else None for text in texts]
        whole = [row for row, part in enumerate(parts) if part is None]
        for row, item in zip(whole, self.encode([texts[row] for row in whole], spans=spans), strict=True):
            parts[row] = item
        return [part for part in parts if part is not None]

    def _first_part(self, text: str, max_tokens: int) -> Encoded | None:
        """The first tokens of a text that certainly has more than `max_tokens`; None if that is not known."""
        size = CHARACTERS_PER_TOKEN * (max_tokens + 1)
        while self._parts_at_borders and size < len(text):
            borders = list(_BORDER.finditer(text, max(size - _WINDOW, 0), size))
            if borders:
                beginning = self.encode([text[: borders[-1].end()]])[0]
                if len(beginning.ids) > max_tokens:
                    return Encoded(
                        beginning.ids[: max_tokens + 1], beginning.spans[: max_tokens + 1], is_beginning=True
                    )
            size *= 2
        return None

    def control_tokens(self) -> ControlTokens:
        """What the file's own post-processor puts around a text and a pair; its start token is ours.

        Raises
        ------
        CheckpointError
            If a text starts with several control tokens, or ends differently alone and in a pair.
        """
        single = self._tokenizer.encode("a")
        pair = self._tokenizer.encode("a", "a")
        first, second = (np.array(pair.sequence_ids, dtype=float) == index for index in (0, 1))  # None becomes NaN
        alone = np.array(single.sequence_ids, dtype=float) == 0
        ids, lone_ids = np.array(pair.ids), np.array(single.ids)
        if not (first.any() and second.any() and alone.any()):
            raise CheckpointError(f"{self._path}: cannot spell 'a', so that its control tokens cannot be told")
        begins, ends = np.flatnonzero(first)[[0, -1]]
        second_begins, second_ends = np.flatnonzero(second)[[0, -1]]
        alone_begins, alone_ends = np.flatnonzero(alone)[[0, -1]]
        starts, closes = ids[:begins], ids[second_ends + 1 :]
        same = np.array_equal(starts, lone_ids[:alone_begins]) and np.array_equal(closes, lone_ids[alone_ends + 1 :])
        if len(starts) > 1 or not same:
            raise CheckpointError(
                f"{self._path}: sets control tokens around a text in a way that is not supported: "
                f"{single.tokens} alone, {pair.tokens} as a pair"
            )
        return ControlTokens(
            int(starts[0]) if len(starts) else None,
            tuple(ids[ends + 1 : second_begins].tolist()),
            tuple(closes.tolist()),
            int(pair.type_ids[second_begins]),
        )

    @property
    def has_post_processor(self) -> bool:
        """False where the file does not say what to set around a text."""
        return self._tokenizer.post_processor is not None

    def token_name(self, index: int) -> str:
        """The token of that id, as the file spells it."""
        return self._tokenizer.id_to_token(index) or f"token {index}"

    def _check_text_is_text(self) -> None:
        """Refuse a tokenizer that spells a control token from ordinary characters, as unigram vocabularies can."""
        control = {
            index: token.content
            for index, token in self._tokenizer.get_added_tokens_decoder().items()
            if token.special and token.content not in UNKNOWN
        }
        # These two control texts whether or not the file calls them special.
        control |= {index: self.token_name(index) for index in (self.mask_id, self.start_id) if index is not None}
        for index, content in control.items():
            if index in self._tokenizer.encode(f"a {content} a", add_special_tokens=False).ids:
                raise CheckpointError(
                    f"{self._path}: reads the control token {content!r} out of ordinary text, so that texts "
                    "could mask themselves; it cannot be used"
                )

    def _control_id(self, token: str | int) -> int:
        if isinstance(token, int) and 0 <= token < 1 << 31 and self._tokenizer.id_to_token(token) is not None:
            return token
        index = self._tokenizer.token_to_id(token) if isinstance(token, str) else None
        if index is None:
            raise CheckpointError(f"{self._path}: no token {token!r}, which is named as a control token")
        return index


def _parts_at_borders(stored: dict[str, Any]) -> bool:
    """Whether a tokenizer.json certainly parts every text at a space between two letters.

    True for what is known to: WordPiece as BERT has it, BPE over the pieces of GPT-2's, GPT-4's or Qwen 2's pattern.
    """
    normalizers = _members(stored.get("normalizer"), "normalizers")
    if any(item.get("type") not in _LOCAL_NORMALIZERS for item in normalizers):
        return False
    if any(re.search(r"\s", token["content"]) for token in stored.get("added_tokens") or ()):
        return False  # an added token could lie across the border
    return any(
        item.get("type") in _PARTING
        or (item.get("type") == "ByteLevel" and item.get("use_regex", True))
        or (
            item.get("type") == "Split"
            and (item.get("pattern") or {}).get("Regex") in _PARTING_PATTERNS
            and item.get("behavior") == "Isolated"
            and not item.get("invert")
        )
        for item in _members(stored.get("pre_tokenizer"), "pretokenizers")[:1]
    )


def _members(part: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """The steps of a part of a tokenizer.json, which may be none, one, or a sequence."""
    if part is None:
        return []
    return list(part[name]) if part.get("type") == "Sequence" else [part]
