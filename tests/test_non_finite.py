"""A token of probability 0: its own status, no score, no part in any mean, and no warning (an error here)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from diffscore_fast import DiffScorer, LikelihoodBounds
from diffscore_fast.cli import bound as bound_module
from diffscore_fast.cli import score as score_module
from diffscore_fast.cli.main import main
from diffscore_fast.scoring.calibrate import calibrate
from diffscore_fast.scoring.compare import compare

SOURCES = ["The cat sat on the mat.", "It rained all day.", "He saw a dog by the river bank today."]
CANDIDATES = ["A cat sat.", "It rained.", "A dog stood by the river and looked at the boat."]
BAD = 2  # the only candidate with "dog"
WORD = "dog"


@pytest.fixture(scope="module", params=["-inf", "nan"])
def scorer(request):
    loaded = DiffScorer("mini")
    forbid(loaded, float(request.param))
    return loaded


def forbid(loaded, value: float) -> None:
    """The model gives one word this log-prob; with NaN, all words of a row become NaN."""
    token = int(loaded._tokenizer.encode([WORD])[0].ids[0])
    runner = loaded._runner
    plain = runner.evaluate

    def evaluate(estimator, sequences, attention, progress=None):
        return plain(Spoiled(estimator, sequences, token, value), sequences, attention, progress)

    runner.evaluate = evaluate


class Spoiled:
    """An estimator whose observations of one token are replaced."""

    def __init__(self, inner, sequences, token: int, value: float) -> None:
        self._inner, self._sequences, self._token, self._value = inner, sequences, token, value

    def _seen(self, observed):
        out = []
        for item in observed:
            plan, values = item.plan, item.log_probs.copy()
            flags = plan.masked if plan.wanted is None else plan.wanted
            starts = self._sequences.target_offsets[plan.sequence]
            tokens = np.concatenate(
                [
                    self._sequences.target_tokens[begin + first : begin + last]
                    for begin, first, last in zip(starts, plan.start, plan.stop, strict=True)
                ]
            )[flags]
            values[tokens == self._token] = self._value
            out.append(type(item)(plan, values))
        return out

    def plan(self, observed):
        return self._inner.plan(self._seen(observed))

    def reduce(self, observed):
        return self._inner.reduce(self._seen(observed))


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(coupling="independent", draws=20),
        dict(attention="corrected"),
        dict(attention="corrected", full_draws="auto"),
        dict(target_stderr=0.5, max_draws=16),
        dict(direction="pmi"),
        dict(direction="bidirectional"),
        dict(estimator="elbo"),
        dict(token_scores=True),
        dict(draws=5, replicates=1),
    ],
)
def test_the_row_has_a_status_and_its_neighbours_the_scores_they_have_alone(scorer, options):
    options = {"draws": 8, **options}
    table = scorer.score(SOURCES, CANDIDATES, seed=3, **options)
    assert table.status[:BAD] == ["ok", "ok"] and table.status[BAD] == "non_finite_score"
    assert "probability 0" in table.messages[BAD] or "not a number" in table.messages[BAD]
    assert np.isnan([table.scores[BAD], table.stderr[BAD], table.nats[BAD], *table.profile[BAD]]).all()
    assert table.num_tokens[BAD] == table.num_draws[BAD] == table.full_draws[BAD] == 0
    alone = scorer.score(SOURCES[:BAD], CANDIDATES[:BAD], seed=3, **options)
    np.testing.assert_allclose(table.scores[:BAD], alone.scores, atol=1e-5)
    if options.get("token_scores"):
        assert table.tokens.offsets[BAD] == table.tokens.offsets[BAD + 1] == len(table.tokens.spans)
        assert table.tokens.spans.tolist() == alone.tokens.spans.tolist()


@pytest.mark.parametrize("aggregate", ["max", "mean"])
def test_a_reference_without_a_number_is_left_out(scorer, aggregate):
    references = [[CANDIDATES[BAD], "It rained."], [CANDIDATES[BAD]]]
    options = dict(direction="reverse", aggregate=aggregate, draws=20, coupling="independent")
    table = scorer.score(None, ["It rained all day.", "Rain."], references=references, **options)
    assert table.status == ["skipped_reference", "non_finite_score"]
    single = scorer.score(["It rained."], ["It rained all day."], direction="reverse", draws=20, coupling="independent")
    assert table.scores[0] == pytest.approx(single.scores[0], abs=1e-5) and np.isnan(table.scores[1])


def test_the_row_is_left_out_of_comparisons_and_calibration(scorer):
    a, b = scorer.score(SOURCES, CANDIDATES), scorer.score(SOURCES, CANDIDATES[:2] + ["It rained."])
    result = compare(a, b)
    assert result.rows.tolist() == [0, 1] and result.excluded == {"A: non_finite_score": 1}
    assert np.isfinite([result.mean_a, result.mean_b, result.difference]).all()
    assert calibrate(scorer, SOURCES, CANDIDATES)[0].rows == 2


def test_the_command_counts_the_row_as_failed(scorer, monkeypatch, tmp_path):
    monkeypatch.setattr(score_module, "DiffScorer", lambda model, **options: scorer)
    monkeypatch.chdir(tmp_path)
    rows = [{"source": source, "candidate": text} for source, text in zip(SOURCES, CANDIDATES, strict=True)]
    Path("in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = CliRunner().invoke(main, ["score", "in.jsonl", "-o", "out.jsonl", "--profile", "--tokens"])
    written = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert result.exit_code == 3 and "Warning" not in result.output
    assert written[BAD]["score"] is None and written[BAD]["status"] == "non_finite_score" and written[BAD]["message"]
    mean = np.mean([row["score"] for row in written[:BAD]])
    assert f"{mean:.4f}" in result.output


@pytest.mark.parametrize("value", [-np.inf, np.nan])
@pytest.mark.parametrize("method", ["exact", "estimate", "comparators", "plain"])
def test_bounds_of_a_text_of_probability_zero(monkeypatch, tmp_path, value, method):
    bounds = LikelihoodBounds("mini", block_size=4)
    forbid(bounds, value)
    if method == "exact":
        table, alone = bounds.exact(CANDIDATES), bounds.exact(CANDIDATES[:BAD])
    else:
        options = {"comparators": method == "comparators", "cross_fitted": method != "plain"}
        table, alone = bounds.estimate(CANDIDATES, **options), bounds.estimate(CANDIDATES[:BAD], **options)
    assert table.status == ["ok", "ok", "non_finite_score"] and table.messages[BAD]
    assert np.isnan([table.lower[BAD], table.upper[BAD], table.exact[BAD]]).all() and table.num_tokens[BAD] == 0
    np.testing.assert_allclose(table.lower[:BAD], alone.lower, atol=1e-4)
    assert table.perplexity_interval() == pytest.approx(alone.perplexity_interval(), rel=1e-4)
    if method == "exact":
        monkeypatch.setattr(bound_module, "LikelihoodBounds", lambda model, **options: bounds)
        monkeypatch.chdir(tmp_path)
        Path("in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in CANDIDATES))
        result = CliRunner().invoke(main, ["bound", "in.jsonl", "-o", "out.jsonl", "--block-size", "4"])
        written = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
        assert result.exit_code == 3 and written[BAD]["lower"] is None
        assert written[BAD]["status"] == "non_finite_score" and "inf" not in result.output.replace("info", "")


def test_a_bias_of_minus_infinity_in_the_model_itself():
    loaded = DiffScorer("mini", implementation="reference")
    token = int(loaded._tokenizer.encode([WORD])[0].ids[0])
    with torch.inference_mode():
        loaded._runner.backbone.vocabulary_bias[token] = -torch.inf
    table = loaded.score(SOURCES, CANDIDATES, draws=8)
    assert table.status == ["ok", "ok", "non_finite_score"] and "probability 0" in table.messages[BAD]
