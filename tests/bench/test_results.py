"""Figures that depend on the embedded model were measured on the weights that are embedded."""

from __future__ import annotations

import json

import pytest

from bench.records import RESULTS
from diffscore_fast.backbones.config import EMBEDDED_MODELS
from diffscore_fast.backbones.small import ADAPTER_FOLDER


@pytest.mark.parametrize("name", ["mini_quality.jsonl", "bounds.jsonl"])
def test_the_newest_record_is_of_the_embedded_weights(name):
    config = json.loads((EMBEDDED_MODELS["mini"] / "config.json").read_text(encoding="utf-8"))
    newest = json.loads((RESULTS / name).read_text(encoding="utf-8").splitlines()[-1])
    assert newest["weights_sha256"] == config["diffscore_fast"]["weights_sha256"]


def test_the_newest_record_of_small_is_of_the_weights_that_get_small_makes():
    settings = json.loads((ADAPTER_FOLDER / "settings.json").read_text(encoding="utf-8"))
    newest = json.loads((RESULTS / "small_quality.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    assert newest["weights_sha256"] == settings["weights_sha256"]
