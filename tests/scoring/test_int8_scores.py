"""Scores of a network whose products run in int8."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from diffscore_fast import DiffScorer, LikelihoodBounds
from diffscore_fast.backbones import loader
from diffscore_fast.cli.main import main
from diffscore_fast.errors import InputError
from diffscore_fast.ops import int8_unavailable
from diffscore_fast.ops.extension import cpu_unavailable
from tests.support.checkpoints import save_causal_prefix_model

SOURCES = ["Two passengers were found dead on a cruise ship in Puerto Rico on Thursday, officials said."] * 3
CANDIDATES = ["Two people were found dead on a cruise ship.", "The weather was fine.", "Officials said so on Thursday."]

pytestmark = pytest.mark.skipif(cpu_unavailable(torch.device("cpu")) is not None, reason="no C++ kernels")


@pytest.fixture(scope="module")
def int8():
    """`mini` in int8. Without VNNI its loops give the same bits, slowly, and only a test asks for them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "int8_unavailable", lambda device: None)
        yield DiffScorer("mini", dtype=torch.int8)


def test_scores_are_near_those_in_float32_and_say_their_dtype(int8, mini):
    found, exact = int8.score(SOURCES, CANDIDATES), mini.score(SOURCES, CANDIDATES)
    assert found.signature.dtype == "int8" and exact.signature.dtype == "float32"
    assert 0 < np.abs(found.scores - exact.scores).max() < 0.15
    np.testing.assert_array_equal(np.argsort(found.scores), np.argsort(exact.scores))


def test_a_row_has_the_same_bits_alone_and_in_company(int8):
    together = int8.score(SOURCES, CANDIDATES, token_scores=True)
    for row in range(3):
        int8.clear_cache()
        alone = int8.score(SOURCES[row : row + 1], CANDIDATES[row : row + 1])
        assert alone.scores[0] == together.scores[row]
    assert np.nanmax(together.tokens.log_probs) <= 0


def test_llama_networks_have_int8_products_too(tmp_path, monkeypatch):
    monkeypatch.setattr(loader, "int8_unavailable", lambda device: None)
    folder = save_causal_prefix_model(tmp_path / "model")
    exact = DiffScorer(folder, dtype=torch.float32).score(SOURCES, CANDIDATES, block_size=4)
    found = DiffScorer(folder, dtype=torch.int8).score(SOURCES, CANDIDATES, block_size=4)
    assert 0 < np.abs(found.scores - exact.scores).max() < 0.3


def test_what_needs_a_distribution_is_refused(int8):
    with pytest.raises(InputError, match="elbo is a bound"):
        int8.score(SOURCES, CANDIDATES, estimator="elbo")
    with pytest.raises(InputError, match="bounds need probabilities that add to 1"):
        LikelihoodBounds("mini", dtype=torch.int8)


def test_a_processor_without_vnni_is_refused_with_the_reason(monkeypatch):
    monkeypatch.setattr(loader, "int8_unavailable", lambda device: "this processor has no AVX-512 VNNI")
    with pytest.raises(InputError, match="int8 cannot be used here: this processor has no AVX-512 VNNI"):
        DiffScorer("mini", dtype=torch.int8)


def test_the_command_takes_it_or_says_why_not(int8, tmp_path):
    rows = tmp_path / "rows.jsonl"
    pairs = zip(SOURCES, CANDIDATES, strict=True)
    rows.write_text("".join(json.dumps({"source": one, "candidate": two}) + "\n" for one, two in pairs))
    out = tmp_path / "out.jsonl"
    result = CliRunner().invoke(main, ["score", str(rows), "-o", str(out), "--dtype", "int8"])
    if int8_unavailable(torch.device("cpu")) is not None:
        assert result.exit_code == 2 and "int8 cannot be used here" in result.output
        return
    found = [json.loads(line)["score"] for line in out.read_text().splitlines()]
    np.testing.assert_array_equal(found, int8.score(SOURCES, CANDIDATES).scores)
    refused = CliRunner().invoke(main, ["bound", str(rows), "-o", "-", "--dtype", "int8", "--text-column", "candidate"])
    assert refused.exit_code == 2 and "add to 1" in refused.output
