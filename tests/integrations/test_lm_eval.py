"""Our models in lm-evaluation-harness, with the real package, on tasks made here."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from diffscore_fast import DiffScorer, LikelihoodBounds
from diffscore_fast.errors import InputError

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.extras

TASK = """task: own_choices
dataset_path: json
dataset_kwargs:
  data_files: {file}
test_split: train
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
doc_to_choice: "{{{{choices}}}}"
metric_list:
  - metric: acc
"""
ROLLING = """task: own_text
dataset_path: json
dataset_kwargs:
  data_files: {file}
test_split: train
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - metric: word_perplexity
"""


def instances(kind: str, arguments: list[tuple[str, ...]]) -> list:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, own, index) for index, own in enumerate(arguments)]


@pytest.fixture(scope="module")
def model():
    from diffscore_fast.integrations.lm_eval import DiffScoreLM

    return DiffScoreLM()


def test_continuations_obey_the_chain_rule(model):
    bounds = LikelihoodBounds("mini", block_size=1)
    texts = ["The cat sat on", "The cat sat on the mat.", "It rained all day."]
    whole, part, alone = (float(value) for value in bounds.exact([texts[1], texts[0], texts[2]]).exact)
    [(given, _), (without, _)] = model.loglikelihood(
        instances("loglikelihood", [("The cat sat on", " the mat."), ("", "It rained all day.")])
    )
    assert given == pytest.approx(whole - part, abs=1e-4) and without == pytest.approx(alone, abs=1e-4)
    [rolling] = model.loglikelihood_rolling(instances("loglikelihood_rolling", [("It rained all day.",)]))
    assert rolling == pytest.approx(alone, abs=1e-4)


def test_long_texts_are_read_in_windows_and_long_contexts_cut_on_the_left(model):
    long = "the cat sat on the mat and it rained all day " * 250
    [rolling] = model.loglikelihood_rolling(instances("loglikelihood_rolling", [(long,)]))
    assert np.isfinite(rolling) and rolling < 0
    [(value, _)] = model.loglikelihood(instances("loglikelihood", [(long + "It rained", " all day.")]))
    assert np.isfinite(value) and value < 0
    with pytest.raises(InputError, match="the model takes"):
        model.loglikelihood(instances("loglikelihood", [("a", " " + long)]))
    with pytest.raises(NotImplementedError, match="writes none"):
        model.generate_until([])


def test_elbo_is_the_scorer_s_own_bound():
    from diffscore_fast.integrations.lm_eval import DiffScoreLM

    own = DiffScoreLM(likelihood="elbo", draws=16)
    pairs = [("The cat sat on the mat.", "A cat sat."), ("", "It rained.")]
    found = own.loglikelihood(instances("loglikelihood", pairs))
    scorer, options = DiffScorer("mini"), dict(estimator="elbo", draws=16, mask_ratios="stratified")
    assert found == [
        (scorer.score([pairs[0][0]], [pairs[0][1]], **options).nats[0], False),
        (scorer.score(None, [pairs[1][1]], direction="marginal", **options).nats[0], False),
    ]
    with pytest.raises(InputError, match="the candidate has no tokens"):
        own.loglikelihood(instances("loglikelihood", [("The cat.", " ")]))


def test_wrong_arguments_are_said():
    from diffscore_fast.integrations.lm_eval import DiffScoreLM

    for options, said in (
        ({"draw": 4}, "no option 'draw'"),
        ({"likelihood": "exact"}, "left-to-right or elbo"),
        ({"dtype": "int8"}, "gives no likelihood"),
    ):
        with pytest.raises(InputError, match=said):
            DiffScoreLM(**options)


def test_the_command_runs_tasks(tmp_path):
    choices = [
        {"question": "The cat sat on", "choices": [" the mat.", " purple quickly whereas."], "answer": 0},
        {"question": "It rained all", "choices": [" day.", " xylophone."], "answer": 0},
    ]
    for name, rows, task in (
        ("own_choices", choices, TASK),
        ("own_text", [{"text": "The cat sat on the mat."}], ROLLING),
    ):
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / f"{name}.yaml").write_text(task.format(file=file))
    offline = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")
    command = [sys.executable, "-m", "diffscore_fast.integrations.lm_eval", "run", "--model", "diffscore"]
    command += ["--model_args", "model=mini", "--include_path", str(tmp_path), "--tasks", "own_choices,own_text"]
    done = subprocess.run(
        [*command, "--output_path", str(tmp_path / "out")],
        env={**os.environ, **offline, "HF_HOME": str(tmp_path / "home")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    [file] = (tmp_path / "out").rglob("results*.json")
    results = json.loads(file.read_text())["results"]
    assert results["own_choices"]["acc,none"] == 1.0
    assert results["own_text"]["word_perplexity,none"] > 1
