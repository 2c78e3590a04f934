"""The command and its streams: closed pipes, full disks, and output that cannot show every character."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

ROW = {"source": "The cat sat on the mat.", "candidate": "A cat “sat” – there…", "other": "It rained.", "text": "Ä."}
COMMAND = f"{sys.executable} -m diffscore_fast.cli.main"
SCORE = "score in.jsonl --draws 1"
COMMANDS = {
    "help": "score --help",
    "info": "info",
    "rows": f"{SCORE} -o - --quiet",
    "heat map": f"{SCORE} -o out.jsonl --heatmap -",
    "bounds": "bound in.jsonl -o - --block-size 4 --text-column candidate --quiet",
    "compare": "compare in.jsonl --candidate-columns candidate other --draws 1 --resamples 20",
    "calibrate": "calibrate in.jsonl --draws 2",
}


def shell(folder, script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "in.jsonl").write_text(json.dumps(ROW) + "\n")
    settings = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(
        ["bash", "-c", script], cwd=folder, capture_output=True, text=True, errors="replace", timeout=300, env=settings
    )


@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS)
def test_a_closed_pipe_ends_every_command_quietly(tmp_path, arguments):
    """The pipe is closed before the first byte, so every write fails."""
    done = shell(tmp_path, f"{COMMAND} {arguments} | true; exit ${{PIPESTATUS[0]}}")
    assert (done.returncode, done.stderr) == (141, "")
    if "out.jsonl" in arguments:  # the rows have nothing to do with the pipe
        assert json.loads((tmp_path / "out.jsonl").read_text())["status"] == "ok"
        assert (tmp_path / "out.jsonl.signature.json").exists()


def test_a_pipe_closed_later_ends_a_run(tmp_path):
    lines = "".join(json.dumps({**ROW, "candidate": f"row {i}"}) + "\n" for i in range(3000))
    (tmp_path / "many.jsonl").write_text(lines)
    done = shell(
        tmp_path,
        f"{COMMAND} {SCORE.replace('in.', 'many.')} --direction marginal -o - --quiet | head -n 1; "
        "exit ${PIPESTATUS[0]}",
    )
    assert (done.returncode, done.stderr) == (141, "") and json.loads(done.stdout)["candidate"] == "row 0"


@pytest.mark.parametrize("arguments", ["nonsense", "score none.jsonl -o -"])
def test_an_error_message_to_a_closed_pipe(tmp_path, arguments):
    done = shell(tmp_path, f"{COMMAND} {arguments} 2>&1 >/dev/null | true; exit ${{PIPESTATUS[0]}}")
    assert done.returncode in (2, 141) and done.stderr == ""


@pytest.mark.parametrize("name", ["help", "rows"])
def test_a_full_disk_gives_a_message(tmp_path, name):
    done = shell(tmp_path, f"{COMMAND} {COMMANDS[name]} > /dev/full")
    assert done.returncode == 2 and "the disk is full (No space left on device); make room" in done.stderr
    assert done.stderr.startswith("diffscore: cannot write") and "Traceback" not in done.stderr


def test_a_full_disk_under_the_output_is_named(tmp_path):
    for name in ("jsonl", "parquet"):
        done = shell(tmp_path, f"{COMMAND} {SCORE} -o /dev/full --output-format {name} --quiet")
        assert done.returncode == 2 and "cannot write /dev/full: the disk is full" in done.stderr, done.stderr
        assert done.stderr.count("\n") <= 2 and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("encoding", "name"), [("ascii", "heat map"), ("latin-1", "heat map"), ("ascii", "compare"), ("ascii", "info")]
)
def test_characters_that_a_terminal_lacks_are_replaced(tmp_path, encoding, name):
    arguments = COMMANDS[name] + (" --show 1" if name == "heat map" else "")
    done = shell(tmp_path, f"{COMMAND} {arguments}", PYTHONIOENCODING=encoding)
    assert done.returncode == 0, done.stderr
    if name == "heat map":
        assert "?sat? ? there?" in done.stdout


def test_messages_reach_a_terminal_of_ascii(tmp_path):
    done = shell(tmp_path, f"{COMMAND} score “none”.jsonl -o -", PYTHONIOENCODING="ascii")
    assert done.returncode == 2 and "No such file" in done.stderr and "Traceback" not in done.stderr
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = shell(tmp_path, f"{COMMAND} {SCORE} -o out.jsonl --heatmap - --show 1", **plain)
    assert done.returncode == 0, done.stderr
