"""`diffscore bound`, run as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from diffscore_fast import LikelihoodBounds
from diffscore_fast.cli import bound as bound_module
from diffscore_fast.cli.main import main
from tests.support.dit_checkpoints import save_dit_model

TEXTS = ["The cat sat on the mat.", "It rained.", ""]


@pytest.fixture(scope="module")
def loaded():
    return LikelihoodBounds("mini", block_size=4)


@pytest.fixture
def run(loaded, monkeypatch, tmp_path):
    monkeypatch.setattr(bound_module, "LikelihoodBounds", lambda model, **options: loaded)
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text("".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(TEXTS)))

    def invoke(*arguments: str):
        result = CliRunner().invoke(main, ["bound", "in.jsonl", "-o", "out.jsonl", "--block-size", "4", *arguments])
        written = Path("out.jsonl")
        return result, [json.loads(line) for line in written.read_text().splitlines()] if written.exists() else None

    return invoke


def test_exact_is_the_default_for_small_blocks(run, loaded):
    result, rows = run()
    assert result.exit_code == 3, result.output
    expected = loaded.exact(TEXTS[:2], autoregressive=True)
    for row, exact, autoregressive in zip(rows, expected.exact, expected.autoregressive, strict=False):
        assert row["lower"] == row["upper"] == row["exact"] == pytest.approx(exact, abs=1e-4)
        assert row["autoregressive"] == pytest.approx(autoregressive, abs=1e-4)
        assert row["interval"] == [row["lower"], row["upper"]] and row["stderr_lower"] == 0
    assert rows[2]["status"] == "empty_text" and rows[2]["lower"] is None and rows[2]["interval"] == [None, None]
    assert "perplexity" in result.output and "autoregressive perplexity" in result.output
    assert "method:exact" in result.output


def test_estimates_carry_intervals_errors_and_comparators(run):
    result, rows = run("--orders", "8", "--surrogate-orders", "8", "--comparators", "--z", "2")
    assert result.exit_code == 3, result.output
    row = rows[0]
    # 16 draws a block: wider than 2 standard errors, by Student's t at 15 degrees of freedom or more.
    for end, expected in ((0, row["lower"] - 2 * row["stderr_lower"]), (1, row["upper"] + 2 * row["stderr_upper"])):
        beyond = (row["interval"][end] - expected) * (-1, 1)[end] / row[("stderr_lower", "stderr_upper")[end]]
        assert 0 < beyond < 0.24
    assert set(row["comparators"]) == {"cubo_2", "tvo_upper", "is_vg_b"} and row["effective_draws"] > 1
    assert "perplexity interval (z = 2)" in result.output and "surrogate:self" in result.output


def test_too_few_orders_give_a_status_and_no_failed_row(run):
    result, rows = run("--orders", "2", "--surrogate-orders", "2")
    assert [row["status"] for row in rows] == ["unreliable", "unreliable", "empty_text"]
    assert "too few independent draws" in rows[0]["message"] and rows[0]["interval"][0] < rows[0]["lower"]
    assert "in 2 texts a block has too few" in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text-column", "body"], "no field 'body'; it has: id, text"),
        (["--orders", "0"], "must be at least 1"),
        (["--method", "exact", "--orders", "4", "--seed", "1"], "--orders, --seed: only for sampled orders"),
        (["--seed", str(2**128)], "must fit in 128 bits"),
        (["--step-probabilities", "1.0"], "belong to parallel generation"),
        (["--steps", "2", "--step-probabilities", "a"], "comma-separated numbers"),
        (["--output-prefix", "", "--text-column", "id", "--steps", "0"], "steps must be at least 1"),
    ],
)
def test_wrong_use_is_refused_and_leaves_nothing(run, arguments, message):
    result, rows = run(*arguments)
    assert result.exit_code == 2 and message in result.output and rows is None
    assert sorted(path.name for path in Path().iterdir()) == ["in.jsonl"]


def test_a_block_too_large_for_the_lattice_is_refused_before_anything_runs(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text('{"text": "a"}\n')
    command = ["bound", "in.jsonl", "-o", "out.jsonl", "--block-size", "16", "--method", "exact"]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 2 and "65,535 states per block" in result.output
    assert not Path("out.jsonl").exists() and not Path("out.jsonl.partial").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--z", "-3"], "z must be a finite number of at least 0"),
        (["--z", "nan"], "z must be a finite number of at least 0"),
        (["--surrogate", "single", "--surrogate-orders", "5"], "--surrogate-orders needs --surrogate self"),
        (["--method", "estimate", "--force"], "--force needs an exact likelihood"),
    ],
)
def test_invalid_options_are_refused(tmp_path, arguments, message):
    (tmp_path / "in.jsonl").write_text('{"text": "It rained."}\n')
    command = ["bound", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"), *arguments]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 2 and message in result.output
    assert not (tmp_path / "out.jsonl").exists()


def test_several_files_make_shards_with_the_bytes_of_each_alone(run, tmp_path):
    alone, _ = run()
    Path("night").mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        Path("night", name).write_text(Path("in.jsonl").read_text())

    def over_night(*options: str):
        return CliRunner().invoke(main, ["bound", "night", "-o", "done", "--block-size", "4", *options])

    whole = over_night()
    assert whole.exit_code == alone.exit_code == 3, whole.output
    for name in ("a.jsonl", "b.jsonl"):
        assert Path("done", name).read_bytes() == Path("out.jsonl").read_bytes()
    of_one, of_both = (
        next(line for line in result.output.splitlines() if "states evaluated" in line) for result in (alone, whole)
    )
    assert int(of_both.split()[-2].replace(",", "")) == 2 * int(of_one.split()[-2].replace(",", ""))
    Path("done", "b.jsonl").unlink()
    resumed = over_night("--resume")
    assert resumed.exit_code == 3 and "3; the numbers below are of the other rows" in resumed.output
    assert Path("done", "b.jsonl").read_bytes() == Path("out.jsonl").read_bytes()
    other = over_night("--resume", "--z", "3")
    assert other.exit_code == 2 and "was made by other options" in other.stderr


def test_a_model_of_one_block_size_needs_no_option(tmp_path):
    """A BD3-LM of block size 8: its exact value by default, an interval that holds it on request."""
    folder = save_dit_model("bd3lm", tmp_path / "model", 8)
    rows = tmp_path / "in.jsonl"
    rows.write_text(json.dumps({"text": TEXTS[0]}) + "\n")
    found = {}
    for method, more in (("exact", []), ("estimate", ["--method", "estimate", "--orders", "64", "--seed", "1"])):
        out = tmp_path / f"{method}.jsonl"
        result = CliRunner().invoke(main, ["bound", str(rows), "-o", str(out), "--model", str(folder), *more])
        assert result.exit_code == 0, result.output
        assert "block_size:8" in "".join(result.output.split())
        found[method] = json.loads(out.read_text())
    low, high = found["estimate"]["interval"]
    assert low < found["exact"]["exact"] < high and high - low < 20
