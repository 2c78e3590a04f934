"""Messages for errors of the operating system."""

from __future__ import annotations

import errno
import os

import pytest

from diffscore_fast.cli.terminal import in_words
from diffscore_fast.io import journal
from diffscore_fast.io.jsonl import JsonlWriter
from tests.support.rows import run_lengths


@pytest.mark.parametrize(("code", "words"), [(errno.ENOSPC, "the disk is full"), (errno.EDQUOT, "your quota")])
@pytest.mark.parametrize("where", ["rows", "journal"])
def test_a_full_disk_is_named_and_finished_rows_stay(tmp_path, monkeypatch, capfd, code, words, where):
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n' * 5)
    calls = []

    def full(real):
        def write(*arguments):
            calls.append(1)
            if len(calls) == 3:
                raise OSError(code, os.strerror(code))
            return real(*arguments)

        return write

    if where == "rows":
        monkeypatch.setattr(JsonlWriter, "_write", full(JsonlWriter._write))
    else:
        monkeypatch.setattr(journal.Journal, "save", full(journal.Journal.save))
    with pytest.raises(OSError) as caught:
        run_lengths(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    assert words in in_words(caught.value) and "make room" in in_words(caught.value)
    if where == "rows":
        assert in_words(caught.value).startswith(f"cannot write {tmp_path / 'out.jsonl'}: ")
        assert (tmp_path / "out.jsonl.partial").read_text().count("\n") == 2
    assert "2 finished rows are in" in capfd.readouterr().err


def test_other_errors_keep_the_message_of_the_system():
    assert in_words(OSError(errno.EIO, "Input/output error", "in.jsonl")) == "[Errno 5] Input/output error: 'in.jsonl'"
