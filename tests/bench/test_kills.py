"""The short form of `bench.kills`: kills at random moments change no byte of a run over shards."""

from __future__ import annotations

from bench.kills import run_kills


def test_random_kills_of_workers_and_of_the_command_change_no_byte(tmp_path):
    found = run_kills(tmp_path, kills=4, workers=2, seed=3, shards=3, rows=8, longest=6.0)
    assert found.by_victim.total() == 4 and found.runs >= 1
    assert found.different == 0 and found.left_behind == 0
