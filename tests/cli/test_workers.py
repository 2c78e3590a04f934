"""`--workers`: the same bytes as one process, whatever happens to the workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from diffscore_fast.cli import score as score_module
from diffscore_fast.cli.main import main
from diffscore_fast.distributed import scorer_pool
from tests.distributed.test_pool import is_gone

ROOT = Path(__file__).parent.parent.parent
ROWS = [json.loads(line) for line in (ROOT / "examples" / "summaries.jsonl").read_text().splitlines()]


def write_rows(path: Path, first: int, count: int) -> None:
    rows = [ROWS[row % len(ROWS)] for row in range(first, first + count)]
    rows = [
        {**row, "source": row["source"][:200], "candidate": row["candidate"][: 40 + 7 * (index % 9)]}
        for index, row in enumerate(rows)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"source": "s"}\nbroken\n')


@pytest.fixture
def score(score_here):
    """Run `diffscore score in.jsonl --draws 2` over 24 rows, and two that cannot be scored."""
    write_rows(Path("in.jsonl"), 0, 24)
    return lambda *arguments: score_here("in.jsonl", "--draws", "2", *arguments)


@pytest.mark.parametrize(
    ("workers", "threads", "options"),
    [(4, 1, []), (2, 2, ["--target-stderr", "0.2", "--max-draws", "8", "--tokens", "--profile"])],
)
def test_workers_and_threads_change_no_byte(score, monkeypatch, workers, threads, options):
    assert score("-o", "alone.jsonl", *options).exit_code == 3  # two rows are not to be scored
    monkeypatch.setenv("OMP_NUM_THREADS", str(threads))
    done = score("-o", "out.jsonl", *options, "--workers", str(workers))
    assert done.exit_code == 3, done.output
    assert Path("out.jsonl").read_bytes() == Path("alone.jsonl").read_bytes()
    assert done.stderr.startswith(f"{workers} workers: cpu, kernels ")
    signatures = [Path(f"{name}.jsonl.signature.json").read_text() for name in ("out", "alone")]
    assert signatures[0] == signatures[1]


def test_a_killed_worker_changes_no_byte_and_is_not_missed(score, monkeypatch):
    score("-o", "alone.jsonl")
    made, killed = [], []
    opened, added = scorer_pool.ScorerPool.__init__, score_module.Summary.add

    def remembered(self, *given, **options):
        opened(self, *given, **options)
        made.append(self.pool)

    def add(self, *given):
        added(self, *given)
        if made and len(killed) < 2:
            killed.append(made[0].pids[len(killed)])
            os.kill(killed[-1], signal.SIGKILL)

    monkeypatch.setattr(scorer_pool.ScorerPool, "__init__", remembered)
    monkeypatch.setattr(score_module.Summary, "add", add)
    result = score("-o", "out.jsonl", "--workers", "2")
    assert result.exit_code == 3, result.output
    assert len(killed) == 2 and all(map(is_gone, killed))
    assert Path("out.jsonl").read_bytes() == Path("alone.jsonl").read_bytes()


def test_options_about_workers_that_would_do_nothing_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_rows(Path("in.jsonl"), 0, 2)
    for given, needed in (
        (["--allow-mixed"], "needs several --workers"),
        (["--workers", "2", "--profile-run", "x.json"], "needs one process"),
        (["--workers", "0"], "Invalid value"),
    ):
        result = CliRunner().invoke(main, ["score", "in.jsonl", "-o", "out.jsonl", *given])
        assert result.exit_code == 2 and needed in result.output


def test_a_stopped_run_leaves_no_process_and_can_be_resumed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_rows(Path("in.jsonl"), 0, 400)
    command = [
        sys.executable,
        "-m",
        "diffscore_fast.cli.main",
        "score",
        "in.jsonl",
        "-o",
        "out.jsonl",
        "--workers",
        "2",
    ]
    run = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    )
    end = time.monotonic() + 300
    while not Path("out.jsonl.partial").exists() or not Path("out.jsonl.partial").stat().st_size:
        assert run.poll() is None and time.monotonic() < end
        time.sleep(0.05)
    children = [int(pid) for pid in Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()]
    run.send_signal(signal.SIGTERM)
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 128 + signal.SIGTERM and "--resume continues after them" in errors
    assert len(children) == 2 and all(map(is_gone, children))


def test_a_model_that_cannot_be_loaded_is_said_as_without_workers(score):
    Path("model").mkdir()
    done = score("-o", "out.jsonl", "--workers", "2", "--model", "model")
    assert done.exit_code == 2 and "diffscore: " in done.output and "model" in done.output
    assert not Path("out.jsonl.partial").exists()
