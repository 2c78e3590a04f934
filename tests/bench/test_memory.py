from __future__ import annotations

import csv

import pytest
from click.testing import CliRunner

from bench import memory
from tests.support.rows import read_rows


def test_every_format_holds_the_same_distinct_rows(tmp_path):
    for name in memory.NAMES:
        memory.write(tmp_path / name, 40)
    first, *others = ([dict(row) for row in read_rows(tmp_path / name)] for name in memory.NAMES)
    assert list(first[0]) == list(memory.COLUMNS)
    assert all(len({row[name] for row in first}) == 40 for name in ("id", "source", "extra"))
    assert {(len(row["source"].split()), len(row["candidate"].split())) for row in first} == {(31, 4)}
    assert all(rows == first for rows in others)


def test_a_file_of_each_number_of_rows_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "RESULTS", tmp_path)
    done = CliRunner().invoke(memory.main, ["--names", "rows.csv", "--rows", "3,5"], catch_exceptions=False)
    assert done.exit_code == 0
    with (tmp_path / "memory.csv").open(newline="") as file:
        measured = list(csv.DictReader(file))
    assert [(row["file"], row["rows"], row["memory"]) for row in measured] == [
        ("rows.csv", "3", "64M"),
        ("rows.csv", "5", "64M"),
    ]
    assert int(measured[0]["file_bytes"]) < int(measured[1]["file_bytes"])
    # Imported libraries take some hundreds of MiB: a wrong unit would be off by 1,024.
    assert all(100 << 20 < int(row["peak_bytes"]) < 2 << 30 for row in measured)


def test_a_run_that_fails_is_not_measured(tmp_path):
    with pytest.raises(memory.subprocess.CalledProcessError):
        memory.peak_of_command(["score", str(tmp_path / "missing.jsonl"), "-o", str(tmp_path / "out.jsonl")])
