"""`--engine ray` and `BatchScorer` in Ray Data, with real Ray where it is installed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from diffscore_fast import BatchScorer
from diffscore_fast.cli import score as score_module
from diffscore_fast.cli.main import main

ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")

ROOT = Path(__file__).parent.parent.parent
ROWS = [
    {"id": row, "source": "The cat sat on the mat.", "candidate": None if row == 7 else f"A cat sat {row} times."}
    for row in range(30)
]


@pytest.fixture(scope="module", autouse=True)
def environment():
    """Ray's processes find the package, and are not starved by others of this machine."""
    settings = {
        "PYTHONPATH": str(ROOT),
        "RAY_worker_niceness": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        yield
        ray.shutdown()


@pytest.fixture
def score(mini, monkeypatch, tmp_path):
    monkeypatch.setattr(score_module, "DiffScorer", lambda model, **options: mini)
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))

    def run(*arguments: str):
        return CliRunner().invoke(main, ["score", "in.jsonl", "--draws", "4", "--target-stderr", "0.3", *arguments])

    return run


def test_a_cluster_is_started_by_the_command_and_changes_no_byte(score):
    assert score("-o", "alone.jsonl").exit_code == 3
    done = score("-o", "out.jsonl", "--engine", "ray", "--workers", "2")
    assert done.exit_code == 3, done.output
    assert Path("out.jsonl").read_bytes() == Path("alone.jsonl").read_bytes()
    assert "2 workers: cpu, kernels" in done.stderr
    assert not ray.is_initialized()
    refused = score("-o", "out.jsonl", "--address", "x")
    assert refused.exit_code == 2 and "needs --engine ray" in refused.output


def actors() -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().startswith(b"ray::MapWorker"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def test_a_killed_actor_changes_no_byte(score, monkeypatch):
    score("-o", "alone.jsonl")
    if not ray.is_initialized():
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    monkeypatch.setattr("diffscore_fast.distributed.chunks.FIRST_SHARE", 1 << 30)  # every row a chunk
    added, killed = score_module.Summary.add, []

    def add(self, *given):
        added(self, *given)
        if not killed and actors():
            killed.append(actors()[0])
            os.kill(killed[0], signal.SIGKILL)

    monkeypatch.setattr(score_module.Summary, "add", add)
    done = score("-o", "out.jsonl", "--engine", "ray", "--workers", "2")
    assert done.exit_code == 3, done.output
    assert killed and Path("out.jsonl").read_bytes() == Path("alone.jsonl").read_bytes()
    assert ray.is_initialized(), "a cluster that was there before is left"


def test_map_batches_gives_the_scores_of_one_call():
    if not ray.is_initialized():
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    scored = ray.data.from_items(ROWS).map_batches(
        BatchScorer,
        fn_constructor_kwargs={"draws": 2},
        batch_format="pyarrow",
        batch_size=7,
        compute=ray.data.ActorPoolStrategy(size=1),
    )
    frame = scored.to_pandas().sort_values("id")
    texts = {name: [row[name] for row in ROWS] for name in ("source", "candidate")}
    expected = BatchScorer(draws=2)({name: np.array(column, object) for name, column in texts.items()})
    np.testing.assert_array_equal(frame["score"].astype(float), expected["score"])
    assert frame["status"].tolist() == expected["status"].tolist()
