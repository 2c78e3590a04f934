"""Commands that run in the process of the tests."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from diffscore_fast.cli import score as score_module
from diffscore_fast.cli.main import main


@pytest.fixture
def score_here(mini, monkeypatch, tmp_path):
    """Run `diffscore score` in a new folder, with the model already loaded where this process is to score."""
    monkeypatch.setattr(score_module, "DiffScorer", lambda model, **options: mini)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str):
        return CliRunner().invoke(main, ["score", *arguments])

    return run
