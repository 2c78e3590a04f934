"""DiffScore by blocks: a masked token sees its source, earlier blocks unmasked, and its own block."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from diffscore_fast import DiffScorer
from diffscore_fast.backbones.loader import load_model
from diffscore_fast.cli.main import main
from diffscore_fast.engine import forward
from diffscore_fast.errors import CheckpointError, InputError, UnsupportedPatternError
from diffscore_fast.training.objective import masked_losses
from diffscore_fast.training.patterns import lay_left_to_right, pack_layouts
from tests.support.checkpoints import save_causal_prefix_model

SOURCES = ["The cat sat on the mat.", "Two people died.", "The cat sat on the mat."]
CANDIDATES = ["A cat sat on a mat.", "Two people died on a cruise ship.", "The mat was sat on."]
PAIRS = list(zip(SOURCES, CANDIDATES, strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_causal_prefix_model(tmp_path_factory.mktemp("blocks") / "model")


@pytest.fixture(scope="module")
def scorer(folder):
    return DiffScorer(folder, dtype=torch.float32)


def test_block_size_1_is_the_left_to_right_score(folder, scorer):
    """Every mask gives the same value of a token, so token scores are the causal log-probs."""
    table = scorer.score(SOURCES, CANDIDATES, block_size=1, draws=16, token_scores=True)
    loaded = load_model(folder, dtype=torch.float32)
    for row, texts in enumerate(zip(SOURCES, CANDIDATES, strict=True)):
        source, target = (item.ids.astype(np.int64) for item in loaded.tokenizer.encode(list(texts)))
        layout = lay_left_to_right(source, target, loaded.backbone.spec)
        with torch.no_grad():
            expected = -masked_losses(loaded.backbone, pack_layouts([layout])).tokens.numpy()
        found = table.tokens.log_probs[table.tokens.offsets[row] : table.tokens.offsets[row + 1]]
        made = np.isfinite(found)
        assert made.mean() > 0.9
        np.testing.assert_allclose(found[made], expected[made], atol=2e-5)


def test_one_block_is_read_like_the_whole_candidate(scorer):
    whole = scorer.score(SOURCES, CANDIDATES, attention="prefix")
    one = scorer.score(SOURCES, CANDIDATES, block_size=64)
    np.testing.assert_allclose(one.scores, whole.scores, atol=2e-5)
    smaller = scorer.score(SOURCES, CANDIDATES, block_size=4)
    assert np.abs(smaller.scores - whole.scores).min() > 1e-3


@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_a_row_has_the_same_bits_alone_and_in_company(folder, scorer, block_size):
    together = scorer.score(SOURCES, CANDIDATES, block_size=block_size)
    for row in range(len(SOURCES)):
        fresh = DiffScorer(folder, dtype=torch.float32, token_budget=24)
        alone = fresh.score(SOURCES[row : row + 1], CANDIDATES[row : row + 1], block_size=block_size)
        assert alone.scores[0] == together.scores[row]


@pytest.mark.parametrize("cache_bytes", [1, 20_000, None])
def test_a_source_is_read_once_for_its_candidates(folder, scorer, monkeypatch, cache_bytes):
    """Whatever is cached already, and wherever the cache is full, the bits are those of candidates alone."""
    read: list[int] = []
    fill_cache = forward._LayerByLayer.fill_cache

    def counted(self, pack):
        read.append(len(pack.tokens))
        fill_cache(self, pack)

    monkeypatch.setattr(forward._LayerByLayer, "fill_cache", counted)
    candidates = [*CANDIDATES, "The mat.", "A cat."]
    sources = [SOURCES[0]] * len(candidates)
    alone = [scorer.score(sources[:1], [text], block_size=2).scores[0] for text in candidates]
    fresh = DiffScorer(folder, dtype=torch.float32, cache_bytes=cache_bytes)
    read.clear()
    first = fresh.score(sources[:2], candidates[:2], block_size=2)
    if cache_bytes is None:
        (source,), targets = (scorer.tokenize(texts) for texts in (sources[:1], candidates[:2]))
        separator = len(scorer.spec.pattern("block", 2).separator_ids)
        # The last token of a context, and of a target's clean blocks, is read in the window that follows it.
        longest = [len(source) + 1 + separator + (len(target) - 1) // 2 * 2 - 1 for target in targets]
        assert sum(read) == sum(longest) - (len(source) + separator)
    together = fresh.score(sources, candidates, block_size=2)
    np.testing.assert_array_equal(first.scores, alone[:2])
    np.testing.assert_array_equal(together.scores, alone)


@pytest.mark.parametrize("order", [[0, 1, 2], [1, 0, 2], [2, 1, 0]])
def test_candidates_of_one_block_share_their_source_with_longer_ones(folder, scorer, order):
    candidates = [["A", "A cat sat on a mat.", "cat"][index] for index in order]
    lengths = [len(ids) for ids in scorer.tokenize(candidates)]
    assert min(lengths) <= 4 < max(lengths)  # one of them lies in one block
    alone = [
        DiffScorer(folder, dtype=torch.float32).score(SOURCES[:1], [text], block_size=4).scores[0]
        for text in candidates
    ]
    together = DiffScorer(folder, dtype=torch.float32).score(SOURCES[:1] * 3, candidates, block_size=4)
    np.testing.assert_array_equal(together.scores, alone)


def test_later_blocks_are_not_seen(scorer):
    """Another end of the candidate changes nothing at its beginning."""
    one, other = "A cat sat on a mat.", "A cat sat on ships."
    tokens = [ids.tolist() for ids in scorer.tokenize([one, other])]
    assert tokens[0][:4] == tokens[1][:4] and tokens[0] != tokens[1]
    values = []
    for text in (one, other):
        table = scorer.score(SOURCES[:1], [text], block_size=1, draws=32, token_scores=True)
        values.append(table.tokens.log_probs[:4])
    np.testing.assert_allclose(values[0], values[1], rtol=1e-12)  # a mean over another number of draws


def test_signature_and_defaults(scorer):
    assert scorer.score(SOURCES, CANDIDATES, attention="block").signature.block_size == 4
    named = scorer.score(SOURCES, CANDIDATES, block_size=2).signature
    assert (named.attention, named.block_size) == ("block", 2) and "attention:block|block_size:2" in str(named)
    assert scorer.score(SOURCES, CANDIDATES).signature.block_size is None
    for direction in ("marginal", "reverse", "pmi", "bidirectional"):
        table = scorer.score(SOURCES, CANDIDATES, direction=direction, block_size=2)
        assert table.status == ["ok"] * 3 and np.isfinite(table.scores).all()


def test_unfit_block_sizes_are_named(scorer):
    with pytest.raises(UnsupportedPatternError, match=r"block size 3; it has: 1, 2, 4, 64"):
        scorer.score(SOURCES, CANDIDATES, block_size=3)
    for wrong in (0, -1, 1.5, "4"):
        with pytest.raises(InputError, match="block size"):
            scorer.score(SOURCES, CANDIDATES, block_size=wrong)
    with pytest.raises(InputError, match="belongs to attention 'block', not to 'prefix'"):
        scorer.score(SOURCES, CANDIDATES, attention="prefix", block_size=4)
    with pytest.raises(UnsupportedPatternError, match=r"needs a block size for attention 'block': 1, 4, 8, 16"):
        DiffScorer("mini").score(SOURCES, CANDIDATES, attention="block")


def test_mini_scores_by_blocks():
    table = DiffScorer("mini").score(SOURCES, CANDIDATES, block_size=8)
    assert table.status == ["ok"] * 3 and np.isfinite(table.scores).all()


def test_the_command_scores_by_blocks(folder, scorer, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"source": s, "candidate": c}) + "\n" for s, c in PAIRS))
    for options, expected in ((["--block-size", "2"], 2), (["--attention", "block"], 4)):
        out = tmp_path / f"{expected}.jsonl"
        result = CliRunner().invoke(
            main, ["score", str(rows), "-o", str(out), "--model", str(folder), "--dtype", "float32", *options]
        )
        assert result.exit_code == 0, result.output
        scores = [json.loads(line)["score"] for line in out.read_text().splitlines()]
        np.testing.assert_array_equal(scores, scorer.score(SOURCES, CANDIDATES, block_size=expected).scores)
    result = CliRunner().invoke(main, ["score", str(rows), "-o", "-", "--attention", "full", "--block-size", "2"])
    assert result.exit_code == 2 and "belongs to attention 'block'" in result.output


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"default_pattern": "block", "default_block_size": 0}, "needs a default_block_size"),
        ({"default_block_size": 5}, "lack the default"),
        ({"block_sizes": [0, 4]}, "no whole numbers above 0"),
    ],
)
def test_unfit_block_patterns_of_a_checkpoint_are_named(folder, tmp_path, change, message):
    import shutil

    changed = shutil.copytree(folder, tmp_path / "changed", ignore=shutil.ignore_patterns("twin"))
    config = json.loads((changed / "config.json").read_text())
    own = config["diffscore_fast"]
    for name, value in change.items():
        (own if name == "default_pattern" else own["patterns"]["block"])[name] = value
    (changed / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        load_model(changed)
