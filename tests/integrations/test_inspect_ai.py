"""DiffScore in inspect, with the real package and its mock model."""

from __future__ import annotations

import math

import pytest

from diffscore_fast import DiffScorer
from diffscore_fast.errors import InputError

pytest.importorskip("inspect_ai")
pytestmark = pytest.mark.extras

SOURCES = ["The cat sat on the mat.", "It rained all day."]


@pytest.mark.parametrize("against", ["input", "target"])
def test_a_task_is_scored_and_a_sample_without_a_score_is_unscored(tmp_path, against):
    from inspect_ai import Task, eval
    from inspect_ai.dataset import Sample
    from inspect_ai.model import ModelOutput, ModelUsage, get_model

    from diffscore_fast.integrations.inspect_ai import diffscore

    outputs = [ModelOutput.from_content("mock", text) for text in ("A cat sat.", "")]
    for output in outputs:  # without it the mock model downloads a tokenizer
        output.usage = ModelUsage(input_tokens=1, output_tokens=1, total_tokens=2)
    task = Task(
        [Sample(input=text, target=["A cat.", text]) for text in SOURCES], scorer=diffscore(against=against, draws=2)
    )
    model = get_model("mockllm/model", custom_outputs=outputs)
    [log] = eval(task, model=model, log_dir=str(tmp_path), display="none", max_samples=1)
    assert log.status == "success"
    first, second = (sample.scores["diffscore"] for sample in log.samples)
    if against == "input":
        table = DiffScorer("mini").score(SOURCES[:1], ["A cat sat."], draws=2)
    else:
        table = DiffScorer("mini").score(None, ["A cat sat."], references=[["A cat.", SOURCES[0]]], draws=2)
    assert first.value == table.scores[0]
    assert math.isnan(second.value) and "empty_candidate" in second.explanation
    assert log.results.scores[0].metrics["mean"].value == pytest.approx(table.scores[0])


def test_wrong_options_are_said():
    from diffscore_fast.integrations.inspect_ai import diffscore

    with pytest.raises(InputError, match="against 'inputs'"):
        diffscore(against="inputs")
