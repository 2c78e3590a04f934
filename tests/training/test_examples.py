from __future__ import annotations

import numpy as np
import pytest

from diffscore_fast.training.corpus import load_corpus, prepare_corpus
from diffscore_fast.training.evaluation import with_wrong_prefixes
from diffscore_fast.training.examples import ExampleSampler, Mixture, log_uniform

SHORT = Mixture(prefix_lengths=(3, 30), window_lengths=(3, 20), run_lengths=(4, 40))


def test_no_example_crosses_articles(corpus):
    sampler = ExampleSampler(corpus, SHORT)
    for seed in range(400):
        example = sampler.draw(np.random.default_rng(seed))
        assert len(example.window) >= 1
        assert len(set(example.prefix.tolist()) | set(example.window.tolist())) == 1


def test_held_out_articles_are_never_drawn(corpus):
    train, held_out = corpus.split(0.2)
    assert (train.last, held_out.first, held_out.last) == (32, 32, 40)
    drawn = [
        {int(ExampleSampler(part, SHORT).draw(np.random.default_rng(seed)).window[0]) for seed in range(600)}
        for part in (train, held_out)
    ]
    assert drawn[0] == {5 + article for article in range(32)}
    assert drawn[1] == {5 + article for article in range(32, 40)}


@pytest.mark.parametrize("kind", list(Mixture().pairs))
def test_relations_keep_to_their_paragraphs(corpus, kind):
    """Tokens are replaced by their own place, so that a drawn range says where it lies."""
    places = type(corpus)(np.arange(len(corpus.tokens)), corpus.sentences, corpus.paragraphs, corpus.articles, 0, 40)
    sampler = ExampleSampler(places, SHORT)
    starts = corpus.sentences[corpus.paragraphs]
    for seed in range(200):
        example = sampler.draw_pair(np.random.default_rng(seed), kind)
        window = example.window
        paragraph = np.searchsorted(starts, window[0], side="right") - 1
        article = np.searchsorted(corpus.articles, paragraph, side="right") - 1
        lead = corpus.articles[article] + 1
        if kind == "marginal":
            assert len(example.prefix) == 0
            assert window[0] in corpus.sentences
        elif kind == "continuation":
            assert example.prefix[-1] + 1 == window[0]
        elif kind == "extract":
            assert set(window) <= set(example.prefix)
        elif kind == "body_to_lead":
            assert window[0] == starts[lead]
            assert window[-1] < starts[lead + 1] <= example.prefix[0]
        elif kind == "lead_to_body":
            assert example.prefix[0] == starts[lead]
            assert example.prefix[-1] < starts[lead + 1] <= window[0]
        else:
            assert not set(window) & set(example.prefix)
            assert {window[0], example.prefix[0]} <= set(starts)


def test_wrong_prefixes_come_from_other_articles_and_windows_stay(corpus):
    sampler = ExampleSampler(corpus, SHORT)
    pairs = [sampler.draw_pair(np.random.default_rng(seed), "extract") for seed in range(40)]
    wrong = with_wrong_prefixes(pairs)
    assert all(one.window is other.window for one, other in zip(pairs, wrong, strict=True))
    assert np.mean([pair.prefix[0] != pair.window[0] for pair in wrong]) > 0.9


def test_log_uniform_reaches_both_ends_and_not_beyond():
    rng = np.random.default_rng(0)
    drawn = [log_uniform(rng, 1, 9) for _ in range(4000)]
    assert set(drawn) == set(range(1, 10))
    # P(n) = log((n + 1) / n) / log(10)
    assert np.mean(np.array(drawn) == 1) == pytest.approx(np.log10(2), abs=0.03)


def test_prepared_corpus_keeps_articles_paragraphs_and_sentences(tmp_path, model_folder):
    from diffscore_fast.text.tokenizer import TextTokenizer

    path = tmp_path / "text.txt"
    path.write_text("w1 w2\nw3 w4\nw5\n\n\nw6\nw7 w8\n", encoding="utf-8")
    prepare_corpus(path, TextTokenizer(model_folder / "tokenizer.json", "[MASK]", "[CLS]"), tmp_path / "corpus")
    corpus = load_corpus(tmp_path / "corpus")
    assert corpus.tokens.tolist() == [6, 7, 8, 9, 10, 11, 12, 13]
    assert corpus.articles.tolist() == [0, 3, 5]
    assert corpus.article_tokens(0) == (0, 5)
    assert corpus.paragraph_tokens(1, 2) == (2, 4)


def test_sentences_are_cut_after_their_closing_mark(tmp_path):
    from diffscore_fast.backbones.config import EMBEDDED_MODELS
    from diffscore_fast.text.tokenizer import TextTokenizer

    tokenizer = TextTokenizer(EMBEDDED_MODELS["mini"] / "tokenizer.json", "[MASK]", "[CLS]")
    path = tmp_path / "text.txt"
    path.write_text('Title\nIt rose. "It fell!" He said 3.5 of it.\n', encoding="utf-8")
    corpus = prepare_corpus(path, tokenizer, tmp_path / "corpus")
    lengths = [len(item.ids) for item in tokenizer.encode(["Title", "It rose.", '"It fell!"', "He said 3.5 of it."])]
    assert np.diff(corpus.sentences).tolist() == lengths
