"""Masks shared within an item: place by place, without moving a score's distribution, and row by row."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner

from diffscore_fast import DiffScorer
from diffscore_fast.cli.main import main
from diffscore_fast.engine.random import item_key, target_key
from diffscore_fast.errors import InputError
from diffscore_fast.scoring.draws import draw_masks
from diffscore_fast.scoring.mask_design import MaskDesign

SOURCE = (
    "The committee met on Tuesday and agreed to raise spending on schools in the northern districts by four per cent."
)
CANDIDATES = [
    "The committee agreed to raise spending on schools in the north by four per cent on Tuesday.",
    "The committee agreed to raise spending on schools in the north by nine per cent on Tuesday.",
    "The committee agreed to cut spending on schools.",
]


@pytest.fixture(scope="module")
def scorer():
    return DiffScorer("mini")


@pytest.mark.parametrize(
    "design", [MaskDesign(8), MaskDesign(20, coupling="independent"), MaskDesign(6, masking="count")]
)
def test_targets_of_one_length_and_item_have_the_same_masks(design):
    keys = np.array([item_key(3, "a"), item_key(3, "a"), item_key(3, "b"), item_key(4, "a"), item_key(3, "a", 1)])
    replicates = np.full(5, design.num_replicates)
    draws = draw_masks(design, keys.astype(np.uint64), np.full(5, 30), replicates)
    masks = draws.masked.reshape(5, -1)
    np.testing.assert_array_equal(masks[0], masks[1])
    for other in masks[2:]:
        assert (masks[0] != other).mean() > 0.2
    longer = draw_masks(design, keys[:2].astype(np.uint64), np.array([30, 33]), replicates[:2])
    ours, theirs = (longer.masked[longer.lengths.repeat(longer.lengths) == size].reshape(-1, size) for size in (30, 33))
    assert (ours == theirs[:, :30]).mean() > 0.8  # most places have the same number in both


def test_keys_of_items_are_no_keys_of_targets():
    assert item_key(0, "a") != target_key(0, np.frombuffer(b"\0\0\0\0a\0\0\0", dtype=np.int32))
    assert item_key(-1, "a") != item_key(1, "a")


def test_the_difference_of_outputs_of_one_item_is_less_noisy(scorer):
    """Over seeds: the variance of the difference of two texts that differ in a word, with and without an item."""
    rows, seeds = [SOURCE] * 2, range(12)
    spread = {}
    for items in (None, ["x", "x"]):
        scores = np.array(
            [scorer.score(rows, CANDIDATES[:2], seed=seed, draws=4, items=items).scores for seed in seeds]
        )
        spread[items is None] = (scores[:, 0] - scores[:, 1]).std(ddof=1)
    assert spread[False] < 0.5 * spread[True]


def test_the_distribution_of_a_score_stays(scorer):
    """The mean over many seeds is the same with masks of its own and masks of its item."""
    own = [scorer.score([SOURCE], CANDIDATES[2:], seed=seed, draws=4).scores[0] for seed in range(40)]
    item = [scorer.score([SOURCE], CANDIDATES[2:], seed=seed, draws=4, items=["x"]).scores[0] for seed in range(40)]
    error = np.hypot(np.std(own), np.std(item)) / np.sqrt(40)
    assert abs(np.mean(own) - np.mean(item)) < 4 * error
    assert not np.array_equal(own, item)


def test_a_row_depends_on_itself_and_its_item_alone(scorer):
    together = scorer.score([SOURCE] * 3, CANDIDATES, items=["x", "x", "y"])
    for row, item in enumerate(["x", "x", "y"]):
        alone = scorer.score([SOURCE], CANDIDATES[row : row + 1], items=[item])
        assert alone.scores[0] == together.scores[row]
    assert scorer.score([SOURCE], CANDIDATES[:1], items=["y"]).scores[0] != together.scores[0]
    assert (
        scorer.score([SOURCE], CANDIDATES[:1], items=[7]).scores
        == scorer.score([SOURCE], CANDIDATES[:1], items=["7"]).scores
    )
    assert together.signature.masks_by == "item" and "masks_by:item" in str(together.signature)
    assert scorer.score([SOURCE], CANDIDATES[:1]).signature.masks_by is None


@pytest.mark.parametrize("direction", ["marginal", "reverse", "bidirectional", "pmi"])
def test_directions(scorer, direction):
    table = scorer.score([SOURCE] * 2, CANDIDATES[:2], direction=direction, items=["x", "x"], token_scores=True)
    assert table.status == ["ok", "ok"]


def test_references_share_the_items_masks(scorer):
    table = scorer.score(None, CANDIDATES[:2], references=[[SOURCE, CANDIDATES[2]], [SOURCE]], items=["x", "x"])
    alone = scorer.score(None, CANDIDATES[1:2], references=[[SOURCE]], items=["x"])
    assert table.status == ["ok", "ok"] and table.scores[1] == alone.scores[0]


@pytest.mark.parametrize("item", [None, 1.5, ["x"], True, "\ud800", float("nan")])
def test_a_row_without_a_usable_item_is_named_and_the_others_are_scored(scorer, item):
    table = scorer.score([SOURCE] * 2, CANDIDATES[:2], items=[item, "x"])
    assert table.status == ["invalid_record", "ok"] and table.messages[0].startswith("the item ")


def test_items_must_fit_the_rows(scorer):
    with pytest.raises(InputError, match="1 items but 2 candidates"):
        scorer.score([SOURCE] * 2, CANDIDATES[:2], items=["x"])
    with pytest.raises(InputError, match="items"):
        scorer.score([SOURCE] * 2, CANDIDATES[:2], items="xx")


def test_commands_read_the_item_column(scorer, tmp_path):
    rows = tmp_path / "rows.jsonl"
    records = [{"source": SOURCE, "candidate": text, "doc": 5} for text in CANDIDATES[:2]]
    rows.write_text("".join(json.dumps(row) + "\n" for row in [*records, {"source": SOURCE, "candidate": "A cat."}]))
    out = tmp_path / "out.jsonl"
    result = CliRunner().invoke(main, ["score", str(rows), "-o", str(out), "--item-column", "doc"])
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert result.exit_code == 3 and found[2]["status"] == "invalid_record" and "item is missing" in found[2]["message"]
    expected = scorer.score([SOURCE] * 2, CANDIDATES[:2], items=[5, 5]).scores
    np.testing.assert_array_equal([row["score"] for row in found[:2]], expected)
    missing = CliRunner().invoke(main, ["score", str(rows), "-o", str(out), "--item-column", "document"])
    assert missing.exit_code == 2 and "--item-column" in missing.output


def test_compare_shares_masks_by_the_source(scorer, tmp_path):
    rows = tmp_path / "rows.jsonl"
    record = {"source": SOURCE, "a": CANDIDATES[0], "b": CANDIDATES[1], "doc": "d"}
    rows.write_text(json.dumps(record) + "\n")
    for options, item in (([], SOURCE), (["--item-column", "doc"], "d")):
        result = CliRunner().invoke(
            main, ["compare", str(rows), "--candidate-columns", "a", "b", "--json", "--resamples", "10", *options]
        )
        assert result.exit_code == 0, result.output
        scores = scorer.score([SOURCE] * 2, CANDIDATES[:2], items=[item] * 2).scores
        assert json.loads(result.output)["difference"] == pytest.approx(scores[0] - scores[1], abs=1e-12)
