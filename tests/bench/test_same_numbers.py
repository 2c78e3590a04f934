"""`python -m bench.same_numbers` refuses a call that it cannot carry out."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from bench.same_numbers import ROOT, check_commit, main


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "Say what to do: --against COMMIT"),
        (["--against", "no-such-commit"], "'no-such-commit' is no commit of this repository."),
        (["--against", ""], "'' is no commit of this repository."),
        (["--against", "--version"], "'--version' is no commit of this repository."),
        (["--against", "HEAD:README.md"], "'HEAD:README.md' is no commit of this repository."),
    ],
    ids=["nothing", "unknown", "empty", "an option of git", "a file"],
)
def test_a_call_without_a_commit_or_a_task_is_a_usage_error(arguments, sentence):
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 2
    assert sentence in " ".join(done.output.split())


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout")
def test_a_commit_of_the_repository_is_taken():
    unused: Any = None
    assert check_commit(unused, unused, "HEAD") == "HEAD"
