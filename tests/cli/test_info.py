"""`diffscore info`."""

from __future__ import annotations

import pytest
from click.testing import CliRunner
from safetensors.torch import load_file

from diffscore_fast.backbones.loader import load_model
from diffscore_fast.cli.main import main
from tests.support.block_checkpoints import save_block_model
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


def test_info_states_what_a_checkpoint_leaves_to_its_family(tmp_path):
    folder = save_block_model("sdar", tmp_path / "SDAR-b8")
    (folder / "README.md").write_text("---\nlanguage: en\nlicense: apache-2.0\n---\n# SDAR\nlicense: mit\n")
    done = CliRunner(env={"COLUMNS": "400"}).invoke(main, ["info", "--model", str(folder)])
    assert done.exit_code == 0, done.output
    spec = load_model(folder).backbone.spec
    assert f"by block of 8 tokens unless told otherwise; mask <|MASK|> ({spec.mask_id}), in the softmax" in done.output
    assert "apache-2.0" in done.output and "mit " not in done.output
    weights = sum(item.numel() for item in load_file(folder / "model.safetensors").values())
    assert f"{weights / 1e6:,.2f} million weights, {4 * weights / 1e6:,.1f} MB in float32" in done.output
    assert "0.5 kB per cached token" in done.output  # 2 layers, keys and values, 2 heads of 16, 4 bytes
    (folder / "README.md").unlink()
    done = CliRunner(env={"COLUMNS": "400"}).invoke(main, ["info", "--model", str(folder)])
    assert "the folder's README.md names none" in done.output


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
