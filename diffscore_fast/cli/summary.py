"""What a run over files prints and writes at its end: counts, a few numbers, time, and the signature."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from rich.table import Table

from diffscore_fast.cli.console import Console
from diffscore_fast.cli.terminal import drop_unwritten, in_words
from diffscore_fast.signature import BoundsSignature, Signature
from diffscore_fast.status import SCORED


def write_signature(path: str, kind: str, signature: Signature | BoundsSignature, statuses: Counter[str]) -> None:
    """Write what the numbers are, what they depend on, and the number of rows by status."""
    about = {"kind": kind, "signature": signature.to_dict(), "rows": dict(statuses)}
    Path(path).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def print_summary(
    statuses: Counter[str],
    lines: list[tuple[str, str]],
    signature: Signature | BoundsSignature,
    first: Table | None,
    *,
    quiet: bool,
    to_stderr: bool,
) -> None:
    """Print the number of rows by status, `lines` and the signature.

    If the rows went to standard output (`to_stderr`), the summary goes to stderr; the signature does so even if quiet.
    """
    try:
        console = Console(stderr=to_stderr)
        if quiet:
            if to_stderr:
                console.print(f"signature {signature}", soft_wrap=True, highlight=False, markup=False)
            return
        if first is not None:
            console.print(first)
        table = Table(show_header=False, title="summary")
        for status, count in sorted(statuses.items(), key=lambda item: (item[0] not in SCORED, item[0])):
            table.add_row(f"rows {status}", f"{count:,}")
        if not statuses:
            table.add_row("rows", "0")
        for name, value in lines:
            table.add_row(name, value)
        console.print(table)
        console.print(f"signature {signature}", soft_wrap=True, highlight=False, markup=False)
    except BrokenPipeError:
        raise
    except OSError as error:  # a full disk; the rows are complete
        message = f"the summary could not be printed: {in_words(error)}"
        Console(stderr=True).print(message, soft_wrap=True, highlight=False, markup=False)
        drop_unwritten()


def speed_lines(evaluated: int, seconds: float) -> list[tuple[str, str]]:
    """The last lines of a summary: tokens evaluated, and time."""
    return [
        ("tokens evaluated", f"{evaluated:,} ({evaluated / seconds:,.0f} per second)"),
        ("time", f"{seconds:.1f} s"),
    ]
