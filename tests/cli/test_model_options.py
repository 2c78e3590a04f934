"""The options for where and how a model runs."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from diffscore_fast.backbones.loader import read_spec
from diffscore_fast.cli.main import main
from diffscore_fast.errors import CheckpointError

COMMANDS = {
    "score": ["score", "in.jsonl", "-o", "out.jsonl"],
    "bound": ["bound", "in.jsonl", "-o", "out.jsonl", "--text-column", "candidate"],
    "calibrate": ["calibrate", "in.jsonl"],
    "compare": ["compare", "in.jsonl", "in.jsonl"],
}


@pytest.fixture(autouse=True)
def rows(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text(json.dumps({"source": "The cat sat on the mat.", "candidate": "A cat sat."}) + "\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_passes_them_on(command, monkeypatch):
    found = []

    def taken(model, **options):
        found.append((model, options))
        raise CheckpointError("seen")

    monkeypatch.setattr("diffscore_fast.cli.bound.read_spec", lambda model: read_spec("mini"))
    kind = "LikelihoodBounds" if command == "bound" else "DiffScorer"
    monkeypatch.setattr(import_module(f"diffscore_fast.cli.{command}"), kind, taken)
    given = [
        "--model",
        "some",
        "--device",
        "cuda:1",
        "--dtype",
        "bfloat16",
        "--implementation",
        "triton",
        "--memory",
        "1G",
        "--token-budget",
        "99",
        "--adapter",
        "folder",
    ]
    for arguments in (given, []):
        result = CliRunner().invoke(main, [*COMMANDS[command], *arguments])
        assert result.exit_code == 2 and "seen" in result.output, result.output
    (model, options), (_, defaults) = found
    options.pop("block_size", None), defaults.pop("block_size", None)
    assert model == "some"
    assert options == {
        "device": "cuda:1",
        "dtype": torch.bfloat16,
        "implementation": "triton",
        "memory": 1 << 30,
        "token_budget": 99,
        "adapter": "folder",
    }
    assert defaults == {"device": "cpu", "implementation": "auto"}


def test_dtype_and_implementation_are_in_the_signature():
    arguments = [*COMMANDS["score"], "--draws", "2", "--dtype", "bfloat16", "--implementation", "reference"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    signature = json.loads(Path("out.jsonl.signature.json").read_text())["signature"]
    assert (signature["dtype"], signature["implementation"]) == ("bfloat16", "reference")


@pytest.mark.parametrize("device", ["cuda:99", "gpu", ""])
def test_a_missing_device_is_reported_and_leaves_no_file(device):
    result = CliRunner().invoke(main, [*COMMANDS["score"], "--device", device])
    assert result.exit_code == 2
    assert f"device '{device}' cannot be used here" in result.output and "diffscore info" in result.output
    assert [path.name for path in Path().iterdir()] == ["in.jsonl"]
