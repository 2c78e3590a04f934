"""The call signatures of BARTScore and bert-score, and what their callers get."""

from __future__ import annotations

import inspect
import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from diffscore_fast import DiffScorer
from diffscore_fast.compat import bartscore, bertscore
from diffscore_fast.errors import CheckpointError, InputError
from tests.support.checkpoints import save_prefix_model

SOURCES = ["The cat sat on the mat.", "Two people died on a cruise ship."]
TARGETS = ["A cat sat.", "The weather was fine."]

# github.com/neulab/BARTScore, bart_score.py at 40c658f (`multi_ref_score`: README of the same repository).
BARTSCORE = {
    "__init__": ["self", "device", "max_length", "checkpoint"],
    "score": ["self", "srcs", "tgts", "batch_size"],
    "multi_ref_score": ["self", "srcs", "tgts", "agg", "batch_size"],
}
BARTSCORE_DEFAULTS = {"max_length": 1024, "batch_size": 4, "agg": "mean"}
# bert-score 0.3.13 from PyPI, bert_score/score.py.
BERTSCORE = {
    "cands": inspect.Parameter.empty,
    "refs": inspect.Parameter.empty,
    "model_type": None,
    "num_layers": None,
    "verbose": False,
    "idf": False,
    "device": None,
    "batch_size": 64,
    "nthreads": 4,
    "all_layers": False,
    "lang": None,
    "return_hash": False,
    "rescale_with_baseline": False,
    "baseline_path": None,
    "use_fast_tokenizer": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_prefix_model(tmp_path_factory.mktemp("compat") / "model"))


@pytest.fixture(scope="module")
def model(folder):
    return DiffScorer(folder)


@pytest.fixture(scope="module")
def scorer(folder):
    return bartscore.BARTScorer(device="cpu", max_length=1024, checkpoint=folder, draws=5)


def test_signatures_are_the_originals():
    for method, names in BARTSCORE.items():
        parameters = inspect.signature(getattr(bartscore.BARTScorer, method)).parameters
        assert [name for name in parameters if name != "options"] == names
        for name, default in BARTSCORE_DEFAULTS.items():
            assert name not in parameters or parameters[name].default == default
    ours = {name: item.default for name, item in inspect.signature(bertscore.score).parameters.items()}
    assert ours.pop("options") is inspect.Parameter.empty
    assert list(ours.items()) == list(BERTSCORE.items())


def test_bartscore_is_the_conditional_score(scorer, model):
    expected = model.score(SOURCES, TARGETS, draws=5).scores
    got = scorer.score(SOURCES, TARGETS, batch_size=1)
    assert isinstance(got, list) and all(type(value) is float for value in got)
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_several_targets_are_joined_by_mean_or_maximum(scorer):
    singles = [scorer.score([SOURCES[0]] * 2, TARGETS), scorer.score([SOURCES[1]], TARGETS[:1])]
    rows = [TARGETS, TARGETS[:1]]
    np.testing.assert_allclose(scorer.multi_ref_score(SOURCES, rows), [np.mean(item) for item in singles], atol=1e-5)
    np.testing.assert_allclose(
        scorer.multi_ref_score(SOURCES, rows, agg="max", batch_size=2), [max(item) for item in singles], atol=1e-5
    )
    assert math.isnan(scorer.multi_ref_score(SOURCES, [[], TARGETS])[0])
    assert scorer.multi_ref_score([], []) == []
    for agg, wrong in (("median", rows), ("mean", TARGETS), ("mean", rows[:1])):
        with pytest.raises(InputError):
            scorer.multi_ref_score(SOURCES, wrong, agg=agg)


def test_a_row_without_a_score_is_nan_with_a_warning_and_never_zero(scorer, folder):
    with pytest.warns(UserWarning, match="1 of 2 rows have no score and are NaN: 1 empty_candidate"):
        got = scorer.score(SOURCES, ["", TARGETS[1]])
    assert math.isnan(got[0]) and got[1] < 0
    short = bartscore.BARTScorer("cpu", 6, folder, draws=1)
    with pytest.warns(UserWarning, match="1 longer than max_length=6"):
        got = short.score(["A cat.", SOURCES[1]], ["A cat.", "A cat."])
    assert got[0] < 0 and math.isnan(got[1])
    for agg in ("mean", "max"):
        with pytest.warns(UserWarning, match="1 empty_candidate"):
            assert math.isnan(scorer.multi_ref_score(SOURCES[:1], [["", TARGETS[1]]], agg=agg)[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scorer.score(SOURCES, TARGETS)


def test_a_bart_checkpoint_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["BartForConditionalGeneration"], "model_type": "bart"}')
    with pytest.raises(CheckpointError, match="sequence-to-sequence"):
        bartscore.BARTScorer(device="cpu", checkpoint=str(tmp_path))


def test_bertscore_is_both_directions_and_their_mean(model, folder):
    (precision, recall, mean), signature = bertscore.score(
        TARGETS, SOURCES, folder, lang="en", device="cpu", verbose=True, return_hash=True, draws=5
    )
    assert all(item.dtype == torch.float32 and item.shape == (2,) for item in (precision, recall, mean))
    np.testing.assert_allclose(precision, model.score(SOURCES, TARGETS, draws=5).scores, atol=1e-5)
    np.testing.assert_allclose(recall, model.score(SOURCES, TARGETS, direction="reverse", draws=5).scores, atol=1e-5)
    both = model.score(SOURCES, TARGETS, direction="bidirectional", draws=5)
    np.testing.assert_allclose(mean, both.scores, atol=1e-5)
    assert signature == str(both.signature)


def test_bertscore_takes_the_best_of_several_references(folder):
    options: dict[str, Any] = dict(model_type=folder, device="cpu", draws=5)
    references = [SOURCES, SOURCES[:1]]
    got = bertscore.score(TARGETS, references, **options)
    first = bertscore.score([TARGETS[0]] * 2, SOURCES, **options)
    second = bertscore.score(TARGETS[1:], SOURCES[:1], **options)
    for best, several, one in zip(got, first, second, strict=True):
        assert isinstance(best, torch.Tensor) and isinstance(several, torch.Tensor) and isinstance(one, torch.Tensor)
        torch.testing.assert_close(best, torch.stack([several.max(), one[0]]), rtol=0, atol=1e-5)
    with pytest.warns(UserWarning, match="empty_candidate"):
        assert torch.isnan(bertscore.score([""], [SOURCES], **options)[2]).all()


@pytest.mark.parametrize("option", [{"idf": True}, {"num_layers": 9}, {"rescale_with_baseline": True}, {"lang": "de"}])
def test_bertscore_options_without_a_counterpart_are_refused(option):
    with pytest.raises(InputError):
        bertscore.score(TARGETS, SOURCES, **option)


def test_bare_strings_and_missing_references(scorer, folder):
    with pytest.raises(InputError, match="srcs is one string"):
        scorer.multi_ref_score("ab", [["a b"], ["c d"]])
    with pytest.warns(UserWarning, match="1 missing"):
        precision, _, _ = bertscore.score(["A cat sat.", "A cat sat."], ["A cat.", float("nan")], model_type=folder)  # type: ignore[list-item]
    assert precision.isnan().tolist() == [False, True]
