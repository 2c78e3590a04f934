"""`diffscore calibrate`: the comparison against two scores made by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from scipy.stats import kendalltau, rankdata

from diffscore_fast.cli import calibrate as calibrate_module
from diffscore_fast.cli.main import main
from diffscore_fast.scoring.calibrate import calibrate

SOURCES = ["The cat sat.", "The cat sat on the mat.", "It rained.", "It rained all day and all night."]
CANDIDATES = ["A cat sat.", "A cat sat.", "It was wet.", "It was wet."]


def test_calibration_is_the_difference_of_two_scores(mini):
    found = {item.label: item for item in calibrate(mini, [*SOURCES, ""], [*CANDIDATES, "x"], draws=5)}
    prefix, full = (
        mini.score(SOURCES, CANDIDATES, draws=5, coupling="independent", attention=name) for name in ("prefix", "full")
    )
    everything = found["all rows"]
    difference = prefix.scores - full.scores
    assert everything.rows == 4
    assert everything.mean_difference == pytest.approx(difference.mean(), abs=1e-5)
    assert abs(everything.worst_difference) == pytest.approx(np.abs(difference).max(), abs=1e-5)
    distances = rankdata(prefix.scores) - rankdata(full.scores)
    assert everything.rank_correlation == pytest.approx(1 - 6 * (distances**2).sum() / (4 * 15), abs=1e-9)
    assert np.sign(everything.rank_correlation) == np.sign(kendalltau(prefix.scores, full.scores)[0])
    level = found["mask ratio 0.3"]
    assert level.mean_difference == pytest.approx((prefix.profile[:, 2] - full.profile[:, 2]).mean(), abs=1e-5)
    by_length = [item for label, item in found.items() if label.startswith("prefix of")]
    assert sum(item.rows for item in by_length) == 4 and len(by_length) > 1
    assert by_length[0].label.startswith("prefix of 4 to 4")


def test_the_command_prints_it_and_counts_rows_that_fail(mini, monkeypatch, tmp_path):
    monkeypatch.setattr(calibrate_module, "DiffScorer", lambda model, **options: mini)
    monkeypatch.chdir(tmp_path)
    rows = [dict(source=source, candidate=candidate) for source, candidate in zip(SOURCES, CANDIDATES, strict=True)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = CliRunner().invoke(main, ["calibrate", "rows.jsonl", "--draws", "1", "--rows", "2"])
    assert result.exit_code == 0 and "2 of 2 rows" in result.output and "mask ratio 0.9" in result.output
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows[:1], {**rows[0], "source": ""}]))
    result = CliRunner().invoke(main, ["calibrate", "rows.jsonl", "--draws", "1"])
    assert result.exit_code == 3 and "1 of 2 rows" in result.output
    for arguments, message in [
        (["rows.jsonl", "--source-column", "text"], "has no field 'text'; it has: source, candidate"),
        (["none.jsonl"], "cannot read none.jsonl"),
        (["rows.jsonl", "--rows", "0"], "--rows must be at least 1"),
    ]:
        result = CliRunner().invoke(main, ["calibrate", *arguments])
        assert result.exit_code == 2 and message in result.output
