"""DiffScore in Hugging Face evaluate, with the real package, without a network."""

from __future__ import annotations

import pytest

from diffscore_fast import DiffScorer
from diffscore_fast.integrations import EVALUATE_FOLDER

pytest.importorskip("evaluate")
pytestmark = pytest.mark.extras

SOURCES = ["The cat sat on the mat.", "It rained all day."]
CANDIDATES = ["A cat sat.", ""]


@pytest.fixture
def metric(monkeypatch, tmp_path):
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE"):
        monkeypatch.setenv(name, "1")
    import evaluate

    return evaluate.load(str(EVALUATE_FOLDER), cache_dir=str(tmp_path))


def test_the_folder_loads_and_scores(metric):
    found = metric.compute(predictions=CANDIDATES, references=SOURCES, draws=2)
    table = DiffScorer("mini").score(SOURCES, CANDIDATES, draws=2)
    assert found["scores"] == [table.scores[0], None] and found["score"] == table.scores[0]
    assert found["statuses"] == table.status and found["signature"] == str(table.signature)


def test_references_and_batches(metric):
    references = [["A dog ran.", "The cat sat."], ["It rained all day."]]
    metric.add_batch(predictions=["A cat sat.", "It rained."], references=references)
    found = metric.compute(draws=2)
    table = DiffScorer("mini").score(None, ["A cat sat.", "It rained."], references=references, draws=2)
    assert found["scores"] == table.scores.tolist()


def test_no_row_with_a_score_is_no_score(metric):
    assert metric.compute(predictions=[""], references=["a"], draws=1)["score"] is None
