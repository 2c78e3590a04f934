"""Templates: every part is there, in its place, in tokens of its own."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from diffscore_fast.backbones.spec import PatternSpec
from diffscore_fast.errors import InputError
from diffscore_fast.scoring.config import ScoreConfig
from diffscore_fast.scoring.rows import RowTokenizer
from diffscore_fast.text.templates import TEMPLATES, Template, find_template
from diffscore_fast.text.tokenizer import TextTokenizer

SOURCES = ["The cat sat on the mat.", "It rained {all} day."]
CANDIDATES = ["A cat sat.", "Rain {source}."]
FEW = dict(draws=1, levels=3)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    """A byte-level tokenizer whose merges cross every border: spaces join words, line breaks join each other."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["[MASK]", "[CLS]"],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    texts = [item.forward + item.reverse for item in TEMPLATES.values()] + ["Summary:\nA cat\n\nSummary:\nThe cat"] * 9
    tokenizer.train_from_iterator(texts, trainer)
    path = tmp_path_factory.mktemp("byte_level") / "tokenizer.json"
    tokenizer.save(str(path))
    return tokenizer, TextTokenizer(path, "[MASK]", "[CLS]")


TEXTS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20).filter(str.strip),
    st.sampled_from(["{source}", "{candidate}", "{", "}}", "[MASK]", " cat ", "\n\nSummary:\n", "é🙂", "{0!r}", "\\n"]),
)
OWN = Template("own", "a {b} {source}{{}}\n{candidate}", "{candidate} {source}")


@settings(max_examples=150, deadline=None)
@given(
    source=TEXTS,
    candidate=TEXTS,
    template=st.sampled_from([*TEMPLATES.values(), OWN]),
    direction=st.sampled_from(["conditional", "reverse", "marginal"]),
)
def test_tokens_spell_the_filled_template_and_the_target_keeps_its_own(
    byte_level, source, candidate, template, direction
):
    library, tokenizer = byte_level
    config = ScoreConfig(direction=direction, template=template, token_scores=True)
    pattern = PatternSpec(10_001, restart_positions=True)
    rows = RowTokenizer(tokenizer).tokenise([(source, candidate)], config, [(pattern, 10_000)])
    assert rows.status == ["ok"]
    [context], [target] = rows.sides(direction, [0])
    if direction == "reverse":
        pattern, fills, scored = template.reverse, {"{candidate}": candidate}, source
    else:
        pattern, fills, scored = template.forward, {"{source}": source if direction == "conditional" else ""}, candidate
    field = next(iter(fills))
    before, after = pattern.rsplit("{", 1)[0].split(field)
    assert library.decode(context, skip_special_tokens=False) == before + fills[field] + after
    assert library.decode(target.ids, skip_special_tokens=False) == scored
    # The library's own ids for the text alone, control tokens spelled out: nothing merges over the border.
    library.encode_special_tokens = True
    assert target.ids.tolist() == library.encode(scored, add_special_tokens=False).ids
    covered = {at for start, end in target.spans for at in range(start, end)}
    assert covered == set(range(len(scored)))


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "plain"])
def test_a_template_is_the_plain_score_of_texts_with_its_words(mini, name):
    """Word pieces never join words, so the words may as well be part of the texts."""
    template = TEMPLATES[name]
    before, after = template.forward.removesuffix("{candidate}").split("{source}")
    back, between = template.reverse.removesuffix("{source}").split("{candidate}")
    conditional = mini.score([before + item + after for item in SOURCES], CANDIDATES, **FEW)
    marginal = mini.score([before + after] * 2, CANDIDATES, **FEW)
    reverse = mini.score(SOURCES, [back + item + between for item in CANDIDATES], direction="reverse", **FEW)
    expected = {
        "conditional": conditional.scores,
        "marginal": marginal.scores,
        "reverse": reverse.scores,
        "pmi": conditional.scores - marginal.scores,
        "bidirectional": (conditional.scores + reverse.scores) / 2,
    }
    directions = expected if name == "summarisation" else ["conditional", "reverse"]
    for direction in directions:
        table = mini.score(SOURCES, CANDIDATES, direction=direction, template=name, **FEW)
        np.testing.assert_allclose(table.scores, expected[direction], atol=1e-5)
        assert table.signature.template == name


@pytest.mark.parametrize(("attention", "restart"), [("prefix", True), ("full", False)])
def test_length_limits_count_the_template_and_a_cut_spares_it(mini, attention, restart):
    rows = RowTokenizer(mini._tokenizer)
    words = len(mini._tokenizer.encode(["Article: Summary:"])[0].ids)
    patterns = [(PatternSpec(41, restart_positions=restart), 40)]

    def tokenise(source: int, candidate: int, direction: str = "conditional"):
        config = ScoreConfig(
            direction=direction, attention=attention, template=TEMPLATES["summarisation"], overlength="truncate-source"
        )
        return rows.tokenise([("word " * source, "word " * candidate)], config, patterns)

    room = 40 - words - (0 if restart else 5)
    exact, cut = tokenise(room, 5), tokenise(room + 3, 5)
    assert exact.status == ["ok"] and cut.status == ["truncated_source"] and cut.truncated.tolist() == [3]
    assert exact.sides("conditional", [0])[0][0].tolist() == cut.sides("conditional", [0])[0][0].tolist()
    assert tokenise(1, 40 - words, "reverse").status == [("ok" if restart else "too_long")]
    assert tokenise(1, 40 - words + 1, "reverse").status == ["too_long"]
    huge = ScoreConfig(template=Template("huge", "word " * 40 + "{source}{candidate}", "{candidate}{source}"))
    with pytest.raises(InputError, match="'huge' has 40 tokens, the model takes 40"):
        rows.tokenise([], huge, patterns)


def test_templates_from_files_are_signed_by_their_content(mini, tmp_path):
    texts = {"forward": "S {x} {source}\nT {candidate}", "reverse": "T {candidate}\nS {source}"}
    (tmp_path / "mine.json").write_text(json.dumps(texts))
    (tmp_path / "mine.toml").write_text("".join(f"{key} = {json.dumps(text)}\n" for key, text in texts.items()))
    from_json, from_toml = find_template(tmp_path / "mine.json"), find_template(str(tmp_path / "mine.toml"))
    assert from_json == from_toml and from_json.identity == f"custom@{from_json.content_hash}"
    (tmp_path / "other.json").write_text(json.dumps(texts))  # equal content under another name
    signed = [mini.score([], [], template=tmp_path / name).signature for name in ("mine.json", "other.json")]
    assert signed[0] == signed[1]
    (tmp_path / "mine.json").write_text(json.dumps({**texts, "reverse": "T: {candidate}\nS {source}"}))
    other = mini.score([], [], template=tmp_path / "mine.json").signature
    assert other.template.startswith("custom@") and other.template != from_json.identity


def test_only_equal_templates_are_signed_alike(mini):
    """A name is not enough: another template may bear it, that of a built-in one too, and equal texts may have two."""
    shouted = Template("plain", "A: {source} {candidate}", "{candidate} {source}")
    signed = {
        mini.score([], [], template=item).signature.template
        for item in ("plain", shouted, Template("own", "{source}{candidate}", "{candidate}{source}"), OWN)
    }
    assert len(signed) == 3 and "plain" in signed  # "own" has the texts of "plain"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.toml", None, "cannot read template .*: No such file"),
        ("summary", None, "no template 'summary': neither plain, summarisation"),
        ("a.toml", "forward = ", "not a readable template"),
        ("a.json", "[]", "two texts forward and reverse"),
        ("a.json", '{"forward": "{source}{candidate}"}', "two texts forward and reverse"),
        ("a.json", '{"forward": 3, "reverse": "{candidate}{source}"}', "forward is a int"),
        ("a.json", '{"forward": "\\ud800{source}{candidate}", "reverse": "{candidate}{source}"}', "lone surrogate"),
        ("a.json", '{"forward": "{candidate}{source}", "reverse": "{candidate}{source}"}', "forward must hold"),
        ("a.json", '{"forward": "{source}{candidate}.", "reverse": "{candidate}{source}"}', "forward must hold"),
        ("a.json", '{"forward": "{source}{source}{candidate}", "reverse": "{candidate}{source}"}', "forward must hold"),
        ("a.json", '{"forward": "{source}{candidate}", "reverse": "{source}"}', "reverse must hold"),
    ],
)
def test_unusable_templates_are_refused(tmp_path, monkeypatch, name, content, message):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=message):
        find_template(name)
