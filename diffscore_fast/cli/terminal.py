"""How the command meets its streams: closed pipes, full disks, and terminals that cannot show every character."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import click

EXIT_UNUSABLE = 2
EXIT_CLOSED_PIPE = 128 + signal.SIGPIPE
_FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "your quota of disk space is used up",
    errno.EFBIG: "the file would be larger than the system allows",
}


class Command(click.Group):
    """The group of all commands. A reader that closes its pipe ends it quietly, wherever it was; `head` is no fault."""

    def main(self, *arguments: Any, **options: Any) -> Any:
        show_every_character()
        with _streams():
            try:
                return super().main(*arguments, **options)
            finally:
                # Here, where it can be answered, and not when the interpreter shuts down.
                for stream in (sys.stdout, sys.stderr):
                    if stream is not None:
                        stream.flush()

    def make_context(self, *arguments: Any, **options: Any) -> click.Context:
        """As in click; --help and --version are printed here, and click makes a closed pipe an error of its own."""
        with _streams():
            return super().make_context(*arguments, **options)

    def invoke(self, context: click.Context) -> Any:
        with _streams():
            return super().invoke(context)


def show_every_character() -> None:
    """Characters that standard output has no code for (ASCII, Latin-1) become "?" in place of an exception."""
    for stream in (sys.stdout, sys.stderr):
        if getattr(stream, "errors", None) in ("strict", "surrogateescape"):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]


def in_words(error: OSError) -> str:
    """What is wrong with a file, and what to do, where the system's own words may not be enough."""
    if error.errno not in _FULL:
        return str(error)
    place = f"cannot write {error.filename}" if error.filename else "cannot write"
    return f"{place}: {_FULL[error.errno]} ({error.strerror}); make room, or write to another place"


@contextmanager
def _streams() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        _end(EXIT_CLOSED_PIPE)
    except OSError as error:
        with suppress(OSError):
            click.echo(f"diffscore: {in_words(error)}", err=True)
        _end(EXIT_UNUSABLE)


def drop_unwritten() -> None:
    """What a stream still holds and cannot write goes nowhere, or Python would try once more at the end."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):  # a stream of a test has no descriptor
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)
        except AttributeError:  # closed from the start
            pass


def _end(code: int) -> NoReturn:
    drop_unwritten()
    sys.exit(code)
