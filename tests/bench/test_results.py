"""Figures that depend on the embedded model were measured on the weights that are embedded."""

from __future__ import annotations

import json

import pytest

from bench.records import RESULTS
from diffscore_fast.backbones.config import EMBEDDED_MODELS


@pytest.mark.parametrize("name", ["mini_quality.jsonl", "bounds.jsonl"])
def test_the_newest_record_is_of_the_embedded_weights(name):
    config = json.loads((EMBEDDED_MODELS["mini"] / "config.json").read_text(encoding="utf-8"))
    newest = json.loads((RESULTS / name).read_text(encoding="utf-8").splitlines()[-1])
    assert newest["weights_sha256"] == config["diffscore_fast"]["weights_sha256"]
