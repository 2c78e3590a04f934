"""The stages of a run add up to the run."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from diffscore_fast.engine import profile as profile_module
from diffscore_fast.engine.profile import STAGES, profile_run, stage, staged


def test_nested_stages_are_counted_once_and_the_rest_is_other(monkeypatch):
    clock = SimpleNamespace(now=5.0)
    monkeypatch.setattr(profile_module.time, "perf_counter", lambda: clock.now)
    with profile_run() as profile:
        with stage("windows"):
            clock.now += 2
            with stage("attention"):
                clock.now += 30
        clock.now += 400
        assert list(staged("read", "ab")) == ["a", "b"]
    assert (profile.seconds["windows"], profile.seconds["attention"], profile.other_seconds) == (2, 30, 400)
    assert sum(seconds for _, _, seconds in profile.rows()) == pytest.approx(profile.wall_seconds)
    assert [(name, calls) for name, calls, _ in profile.rows()] == [
        ("read", 3),
        ("windows", 1),
        ("attention", 1),
        ("other", 0),
    ]


def test_nothing_is_counted_outside_a_profile_and_an_error_closes_its_stage():
    with profile_run() as profile, pytest.raises(ValueError), stage("plan"):
        raise ValueError
    with stage("plan"):
        pass
    assert profile.calls["plan"] == 1
    with profile_run() as inner, stage("plan"):
        pass
    assert profile.calls["plan"] == 1 and inner.calls["plan"] == 1


def test_scoring_fills_every_stage_and_the_trace_nests(mini, tmp_path):
    with profile_run() as profile:
        mini.score(["The cat sat on the mat."], ["A cat sat."], draws=1)
    assert {name for name in STAGES if not profile.calls[name]} == {"read", "write"}
    profile.write_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    windows = next(event for event in events if event["name"] == "windows")
    attention = [event for event in events if event["name"] == "attention"]
    end = windows["ts"] + windows["dur"]
    inside = [item for item in attention if windows["ts"] <= item["ts"] and item["ts"] + item["dur"] <= end]
    assert len(inside) == mini.spec.num_layers
