"""The file of finished scores: what it refuses, and that it stays whole."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from diffscore_fast.errors import InputError
from diffscore_fast.io import score_cache
from diffscore_fast.io.score_cache import ScoreCache, file_system

KEYS = [bytes([number]) * 32 for number in range(4)]


def test_keeps_values_of_any_bytes_and_the_first_of_a_key(tmp_path):
    cache = ScoreCache(tmp_path / "scores")
    cache.add([(KEYS[0], b""), (KEYS[1], bytes(range(256)))])
    cache.add([(KEYS[1], b"later"), (KEYS[2], b"x")])
    cache.close()
    again = ScoreCache(tmp_path / "scores")
    assert again.find(KEYS) == {KEYS[0]: b"", KEYS[1]: bytes(range(256)), KEYS[2]: b"x"}
    many = [number.to_bytes(32, "big") for number in range(1, 2000)]
    again.add((key, key[-2:]) for key in many)
    assert again.find(many) == {key: key[-2:] for key in many}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"source": "s"}\n', "is not a file of scores"),
        (b"SQLite format 3\0" + b"\x07" * 5000, "is damaged|cannot be"),
    ],
)
def test_files_that_are_no_cache_are_refused_and_left_alone(tmp_path, content, said):
    path = tmp_path / "scores"
    path.write_bytes(content)
    with pytest.raises(InputError, match=said):
        ScoreCache(path)
    assert path.read_bytes() == content


def test_files_of_other_programs_and_layouts_are_refused(tmp_path):
    with sqlite3.connect(tmp_path / "other") as other:
        other.execute("CREATE TABLE rows (key BLOB PRIMARY KEY, value BLOB)")
    with pytest.raises(InputError, match="another program"):
        ScoreCache(tmp_path / "other")
    ScoreCache(tmp_path / "later").close()
    with sqlite3.connect(tmp_path / "later") as later:
        later.execute("PRAGMA user_version=99")
    with pytest.raises(InputError, match="has layout 99"):
        ScoreCache(tmp_path / "later")


def test_folders_and_network_file_systems_are_refused(tmp_path, monkeypatch):
    with pytest.raises(InputError, match="folder"):
        ScoreCache(tmp_path)
    with pytest.raises(InputError, match="no such folder"):
        ScoreCache(tmp_path / "missing" / "scores")
    for kind in ("nfs4", "cifs", "fuse.sshfs"):
        monkeypatch.setattr(score_cache, "file_system", lambda folder, kind=kind: kind)
        with pytest.raises(InputError, match=f"network file system .{kind}"):
            ScoreCache(tmp_path / "scores")
    assert not (tmp_path / "scores").exists()


@pytest.mark.skipif(not Path("/proc/self/mountinfo").exists(), reason="no Linux")
def test_the_file_system_of_a_folder_is_that_of_its_own_mount():
    assert file_system(Path("/proc/self")) == "proc"
    assert file_system(Path("/")) not in ("", "proc")


@pytest.mark.parametrize("flip", ["value", "file"])
def test_damage_is_found_and_never_read_as_a_score(tmp_path, flip):
    path = tmp_path / "scores"
    cache = ScoreCache(path)
    value = bytes(range(1, 200))
    cache.add([(KEYS[0], value)])
    cache.close()
    content = path.read_bytes()
    assert content.count(value) == 1
    place = content.index(value) + 50 if flip == "value" else 4096  # where the table's own page begins
    path.write_bytes(content[:place] + bytes([content[place] ^ 255]) + content[place + 1 :])
    with pytest.raises(InputError, match="is damaged .* move it away"):
        ScoreCache(path).find(KEYS)


def test_a_process_that_is_killed_while_it_writes_leaves_whole_rows(tmp_path):
    program = (
        "import os, sys\n"
        "from diffscore_fast.io.score_cache import ScoreCache\n"
        "cache = ScoreCache(sys.argv[1])\n"
        "cache.add([(bytes(32), b'whole')])\n"
        "def rows():\n"
        "    yield bytes([1]) * 32, b'half'\n"
        "    os._exit(9)\n"
        "cache.add(rows())\n"
    )
    done = subprocess.run([sys.executable, "-c", program, tmp_path / "scores"], env=os.environ)
    assert done.returncode == 9
    assert ScoreCache(tmp_path / "scores").find(KEYS) == {bytes(32): b"whole"}


def test_two_at_once_share_a_file_from_its_beginning(tmp_path):
    program = (
        "import sys\n"
        "from diffscore_fast.io.score_cache import ScoreCache\n"
        "cache = ScoreCache(sys.argv[1])\n"
        "for number in range(200):\n"
        "    cache.add([((2 * number + int(sys.argv[2])).to_bytes(32, 'big'), b'x')])\n"
    )
    both = [subprocess.Popen([sys.executable, "-c", program, tmp_path / "scores", str(own)]) for own in (0, 1)]
    assert [process.wait() for process in both] == [0, 0]
    assert len(ScoreCache(tmp_path / "scores").find([number.to_bytes(32, "big") for number in range(500)])) == 400


def test_a_full_or_locked_file_is_said_to_be_so(tmp_path, monkeypatch):
    monkeypatch.setattr(score_cache, "SECONDS_TO_WAIT", 0.05)
    cache = ScoreCache(tmp_path / "scores")
    with sqlite3.connect(tmp_path / "scores", isolation_level=None) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(InputError, match="cannot be used: database is locked"):
            cache.add([(KEYS[0], b"x")])
        other.execute("COMMIT")
    cache.add([(KEYS[0], b"x")])
    assert cache.find(KEYS) == {KEYS[0]: b"x"}
