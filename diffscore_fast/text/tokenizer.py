"""Text to token ids and the characters each covers, through the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from diffscore_fast.backbones.weights import file_sha256
from diffscore_fast.errors import CheckpointError


@dataclass(frozen=True)
class Encoded:
    """One text as tokens.

    Parameters
    ----------
    ids : int32 [L]
    spans : int32 [L, 2]
        Half-open character range of each.
    eligible : bool [L], optional
        Which tokens may be masked; all of them if not given.
    """

    ids: np.ndarray
    spans: np.ndarray
    eligible: np.ndarray | None = None

    @property
    def num_eligible(self) -> int:
        return len(self.ids) if self.eligible is None else int(self.eligible.sum())

    def head(self, count: int) -> Encoded:
        """The first tokens."""
        eligible = None if self.eligible is None else self.eligible[:count]
        return Encoded(self.ids[:count], self.spans[:count], eligible)


class TextTokenizer:
    """A tokenizer.json read as it is, adding no special tokens and reading none out of user text.

    Parameters
    ----------
    path : Path
        The tokenizer.json of a model folder.
    mask_token, start_token : str
        Control tokens that must exist under these names.
    """

    def __init__(self, path: Path, mask_token: str, start_token: str | None) -> None:
        if not path.is_file():
            raise CheckpointError(f"{path}: no such file; a model folder needs tokenizer.json")
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise CheckpointError(f"{path}: not a readable tokenizer ({error})") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # "[MASK]" typed by a user is six characters, not a masked position.
        self._tokenizer.encode_special_tokens = True
        self.sha256 = file_sha256(path)
        self.mask_id = self._control_id(path, mask_token)
        self.start_id = None if start_token is None else self._control_id(path, start_token)
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        """Encode texts, in order, on all cores.

        Raises
        ------
        UnicodeEncodeError
            If a text holds a lone surrogate, which is not Unicode text; callers check first.
        """
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [
            Encoded(np.array(item.ids, dtype=np.int32), np.array(item.offsets, dtype=np.int32).reshape(-1, 2))
            for item in encodings
        ]

    def _control_id(self, path: Path, token: str) -> int:
        index = self._tokenizer.token_to_id(token)
        if index is None:
            raise CheckpointError(f"{path}: no token {token!r}, which config.json names as a control token")
        return index
