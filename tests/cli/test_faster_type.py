"""The summary recommends bfloat16 if the processor has units for it and the run did not use them."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from bench.tiny_model import tiny_model
from diffscore_fast.cli.main import main

LINE = "--dtype bfloat16"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("faster") / "tiny")


def summary(tmp_path, tiny, command, *options):
    (tmp_path / "in.jsonl").write_text(json.dumps({"source": "It rained.", "candidate": "A cat sat."}) + "\n")
    own = ["--draws", "1"] if command == "score" else ["--text-column", "candidate", "--block-size", "4"]
    files = [str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]
    done = CliRunner(env={"COLUMNS": "200"}).invoke(main, [command, *files, "--model", str(tiny), *own, *options])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize("command", ["score", "bound"])
def test_one_line_where_there_are_units_for_bfloat16_and_float32_was_used(tmp_path, tiny, monkeypatch, command):
    monkeypatch.setattr("diffscore_fast.cli.model.multiplies_bfloat16", lambda: True)
    told = [line for line in summary(tmp_path, tiny, command).splitlines() if LINE in line]
    assert len(told) == 1 and "0.002 to 0.005 nats per token" in told[0]
    assert LINE not in summary(tmp_path, tiny, command, "--quiet")
    assert LINE not in summary(tmp_path, tiny, command, "--dtype", "bfloat16")
    monkeypatch.setattr("diffscore_fast.cli.model.multiplies_bfloat16", lambda: False)
    assert LINE not in summary(tmp_path, tiny, command)
