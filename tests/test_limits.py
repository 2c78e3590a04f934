"""Counts above their limits are refused by name, in Python, and on the command line before a model is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from diffscore_fast.bounds.config import BoundsConfig
from diffscore_fast.bounds.orders import Generation
from diffscore_fast.cli import bound as bound_module
from diffscore_fast.cli import calibrate as calibrate_module
from diffscore_fast.cli import compare as compare_module
from diffscore_fast.cli import score as score_module
from diffscore_fast.cli.main import main
from diffscore_fast.errors import InputError
from diffscore_fast.scoring.compare import check_resampling
from diffscore_fast.scoring.config import ReconstructionConfig
from diffscore_fast.scoring.mask_design import MaskDesign


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MaskDesign(10_001), "draws must be at most 10,000, not 10,001"),
        (lambda: MaskDesign(levels=1_001), "levels must be at most 1,000, not 1,001"),
        (lambda: MaskDesign(replicates=10**9), "replicates must be at most 10,000"),
        (lambda: ReconstructionConfig(max_draws=10**9), "max draws must be at most 10,000"),
        (lambda: ReconstructionConfig(full_draws=10**9), "from 2 to the 8 draws"),
        (lambda: BoundsConfig(orders=10**6), "orders must be at most 100,000"),
        (lambda: BoundsConfig(surrogate_orders=10**6), "surrogate orders must be at most 100,000"),
        (lambda: BoundsConfig(folds=10**9), "folds must be at least 2 and divide the 64"),
        (lambda: BoundsConfig(folds=2.5), "folds must be a whole number"),
        (lambda: Generation(10**16), "steps must be at most 1,000,000,000,000,000"),
        (lambda: check_resampling(10**9, 0.95), "resamples must be at most 1,000,000"),
    ],
)
def test_python_refuses_counts_above_their_limits(make, message):
    with pytest.raises(InputError, match=message):
        make()


def test_counts_at_their_limits_are_taken():
    assert MaskDesign(10_000, levels=1_000).num_draws == 10_000
    assert BoundsConfig(orders=100_000, surrogate_orders=100_000).draws == 200_000


@pytest.mark.parametrize(
    ("command", "option", "value"),
    [
        ("score", "--draws", "100000"),
        ("score", "--levels", "1000000000"),
        ("score", "--replicates", "100000"),
        ("score", "--max-draws", "1000000"),
        ("score", "--full-draws", "1000000"),
        ("compare", "--draws", "100000"),
        ("compare", "--resamples", "1000000000"),
        ("bound", "--orders", "1000000000"),
        ("bound", "--folds", "1000000"),
        ("bound", "--surrogate-orders", "1000000000"),
        ("bound", "--steps", "1" + 16 * "0"),
        ("bound", "--z", "100"),
        ("calibrate", "--draws", "100000"),
        ("calibrate", "--rows", "1000000000"),
    ],
)
def test_the_command_line_refuses_them_before_a_model_is_loaded(monkeypatch, tmp_path, command, option, value):
    def loads(*arguments, **options):
        raise AssertionError("a model was loaded")

    for module in (score_module, compare_module, calibrate_module):
        monkeypatch.setattr(module, "DiffScorer", loads)
    monkeypatch.setattr(bound_module, "LikelihoodBounds", loads)
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text('{"source": "It rained.", "candidate": "Rain.", "text": "Rain."}\n')
    files = {
        "score": ["in.jsonl", "-o", "out.jsonl"],
        "bound": ["in.jsonl", "-o", "out.jsonl"],
        "compare": ["in.jsonl", "in.jsonl"],
        "calibrate": ["in.jsonl"],
    }[command]
    extra = {"--max-draws": ["--target-stderr", "0.1"], "--full-draws": ["--attention", "corrected"]}.get(option, [])
    result = CliRunner().invoke(main, [command, *files, option, value, *extra])
    assert result.exit_code == 2 and option.strip("-").replace("-", " ") in result.output.replace("-", " ")
    assert not Path("out.jsonl").exists()
