"""A run over a file without a model: a text's score is minus its length, its status that of its value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from diffscore_fast.cli.rows import FileRun
from diffscore_fast.results import EMPTY_TEXT, OK
from diffscore_fast.text.checks import check_text

ADDED = {"score": "number", "tokens": "count", "status": "text", "message": "text", "profile": "named_numbers",
         "token_scores": "spans", "interval": "numbers"}  # fmt: skip


@dataclass(frozen=True)
class LengthTable:
    texts: list[Any]
    status: list[str]
    messages: list[str]


def run_lengths(source, target, column: str = "text", **options: Any) -> FileRun:
    """Read `source`, write `target`."""
    run = FileRun(str(source), str(target), {"--text-column": column}, ADDED, prefix="", quiet=True, **options)

    def batches(rows, progress):
        for (text,) in rows:
            status, message = check_text("text", text)
            if status == OK and not text:
                status, message = EMPTY_TEXT, "no tokens"
            yield LengthTable([text], [status], [message])

    def fields(record, table, row):
        if table.status[row] != OK:
            return {"score": None, "tokens": 0, "profile": None, "token_scores": None, "interval": [None, None]}
        score = -float(len(table.texts[row]))
        return {"score": score, "tokens": 1, "profile": {"0.1": score, "0.2": None},
                "token_scores": [(0, 1, score), (1, 2, None)], "interval": [score, 0.0]}  # fmt: skip

    try:
        run.process(batches, fields)
    except BaseException:
        run.abandon()
        raise
    return run
