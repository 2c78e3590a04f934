"""DiffScore in DeepEval, with the real package."""

from __future__ import annotations

import asyncio
import math

import pytest

from diffscore_fast import DiffScorer
from diffscore_fast.errors import InputError

pytest.importorskip("deepeval")
pytestmark = pytest.mark.extras


def test_a_case_is_measured_and_one_without_a_score_does_not_pass(monkeypatch):
    monkeypatch.setenv("DEEPEVAL_TELEMETRY_OPT_OUT", "YES")
    from deepeval.test_case import LLMTestCase

    from diffscore_fast.integrations.deepeval import DiffScoreMetric

    expected = DiffScorer("mini").score(["The cat sat on the mat."], ["A cat sat."], draws=2).scores[0]
    case = LLMTestCase(input="The cat sat on the mat.", actual_output="A cat sat.", expected_output="The cat sat.")
    metric = DiffScoreMetric(threshold=math.exp(expected) / 2, draws=2)
    assert metric.measure(case) == math.exp(expected) == metric.score and metric.is_successful()
    assert metric.score_breakdown["nats per token"] == expected and metric.error is None
    assert asyncio.run(metric.a_measure(case)) == math.exp(expected)
    other = DiffScoreMetric(threshold=0.0, against="expected_output", draws=2)
    assert other.measure(case) != metric.score
    empty = LLMTestCase(input="The cat.", actual_output="")
    assert metric.measure(empty) is None and metric.score is None and not metric.is_successful()
    assert metric.error == "empty_candidate: the candidate has no tokens"
    with pytest.raises(InputError, match="pmi"):
        DiffScoreMetric(threshold=0.5, direction="pmi")


def test_its_runner_takes_both(monkeypatch, tmp_path):
    monkeypatch.setenv("DEEPEVAL_TELEMETRY_OPT_OUT", "YES")
    monkeypatch.chdir(tmp_path)
    from deepeval import evaluate
    from deepeval.test_case import LLMTestCase

    from diffscore_fast.integrations.deepeval import DiffScoreMetric

    cases = [LLMTestCase(input="The cat sat.", actual_output=text) for text in ("A cat sat.", "")]
    results = evaluate(cases, [DiffScoreMetric(threshold=0.0, draws=2)]).test_results
    by_output = {result.actual_output: result.metrics_data[0] for result in results}
    assert by_output["A cat sat."].success and by_output["A cat sat."].score > 0
    assert not by_output[""].success and by_output[""].score is None and "empty_candidate" in by_output[""].error
