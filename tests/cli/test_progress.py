"""Progress lines of a run without a terminal."""

from __future__ import annotations

import re

from tests.support.rows import run_lengths


def test_a_line_has_rows_share_and_speed(tmp_path, capfd):
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n' * 4)
    source = tmp_path / "in.jsonl"
    run_lengths(source, tmp_path / "out.jsonl", quiet=False, progress_seconds=0.0)
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 8  # at each evaluation and each table
    assert all(re.fullmatch(r"\d rows done, \d+ % of the input read, [\d,]+ tokens/s, 0 s", line) for line in lines)
    assert [line.split()[0] for line in lines] == ["0", "1", "1", "2", "2", "3", "3", "4"]
    assert "100 % of the input" in lines[-1]


def test_lines_come_at_their_interval_and_not_when_quiet(tmp_path, capfd):
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n' * 50)
    for options in ({"quiet": False}, {"quiet": True, "progress_seconds": 0.0}):
        run_lengths(tmp_path / "in.jsonl", tmp_path / "out.jsonl", **options)
        assert capfd.readouterr().err == ""


def test_a_closed_standard_error_does_not_end_the_run(tmp_path, monkeypatch):
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n' * 3)

    def closed(*arguments, **options):
        raise BrokenPipeError

    monkeypatch.setattr("diffscore_fast.cli.console.Console.print", closed)
    run = run_lengths(tmp_path / "in.jsonl", tmp_path / "out.jsonl", quiet=False, progress_seconds=0.0)
    assert run.statuses == {"ok": 3}
