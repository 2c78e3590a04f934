"""`diffscore info`."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from diffscore_fast.cli.main import main
from tests.support.checkpoints import save_checkpoint


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("electra", "electra, 2 layers of 32, 20011 tokens; own network; attention full"),
        ("modernbert", "<s> source </s> </s> candidate </s>; up to 64 tokens"),
    ],
)
def test_info_describes_a_model(tmp_path, family, layout):
    folder = save_checkpoint(family, tmp_path / family)
    done = CliRunner(env={"COLUMNS": "400"}).invoke(main, ["info", "--model", str(folder)])
    assert done.exit_code == 0, done.output
    assert layout in done.output
    mini = "[CLS] source candidate; up to 2048 tokens before the candidate, and up to 2048 tokens from it on"
    assert mini in done.output


def test_info_about_no_model_says_so(tmp_path):
    done = CliRunner().invoke(main, ["info", "--model", str(tmp_path)])
    assert done.exit_code == 2 and "config.json: no such file" in done.output


@pytest.mark.parametrize(
    ("units", "says"), [(True, "about 3 times as fast where it was measured"), (False, "no units for it")]
)
def test_info_names_the_default_dtype_and_the_speed_of_bfloat16(monkeypatch, units, says):
    monkeypatch.setattr("diffscore_fast.cli.info.multiplies_bfloat16", lambda: units)
    done = CliRunner(env={"COLUMNS": "400"}).invoke(main, ["info"])
    lines = [" ".join(line.strip("\u2502 ").split()) for line in done.output.splitlines()]
    assert any(line.startswith("default dtype on cpu") and line.endswith("float32") for line in lines)
    assert any(line.startswith("--dtype bfloat16 on cpu") and says in line for line in lines)
