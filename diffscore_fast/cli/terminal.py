"""Standard streams: closed pipes, full disks, and terminals that cannot show every character."""

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
    """The group of all commands. A command whose pipe is closed by its reader (`head`) ends without a message."""

    def main(self, *arguments: Any, **options: Any) -> Any:
        show_every_character()
        with _streams():
            try:
                return super().main(*arguments, **options)
            finally:
                # Flush here, where errors can be handled, and not when the interpreter shuts down.
                for stream in (sys.stdout, sys.stderr):
                    if stream is not None:
                        stream.flush()

    def make_context(self, *arguments: Any, **options: Any) -> click.Context:
        """As in click. --help and --version are printed here, where click would report a closed pipe as an error."""
        with _streams():
            return super().make_context(*arguments, **options)

    def invoke(self, context: click.Context) -> Any:
        with _streams():
            return super().invoke(context)


def show_every_character() -> None:
    """Print "?" for characters that the encoding of a stream lacks (ASCII, Latin-1), instead of raising an error."""
    for stream in (sys.stdout, sys.stderr):
        if getattr(stream, "errors", None) in ("strict", "surrogateescape"):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]


def in_words(error: OSError) -> str:
    """What is wrong with a file; for a full disk also what to do."""
    if error.errno not in _FULL:
        return str(error)
    place = f"cannot write {error.filename}" if error.filename else "cannot write"
    return f"{place}: {_FULL[error.errno]} ({error.strerror}); make room, or write to another place"


@contextmanager
def _streams() -> Iterator[None]:
    """End the process with a message and an exit code if a stream fails."""
    try:
        yield
    except BrokenPipeError:
        _end(EXIT_CLOSED_PIPE)
    except OSError as error:
        with suppress(OSError):
            click.echo(f"diffscore: {in_words(error)}", err=True)
        _end(EXIT_UNUSABLE)


def drop_unwritten() -> None:
    """Discard what a stream cannot write; Python would try again at exit, and fail."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):  # the streams of tests have no descriptor
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)
        except AttributeError:  # closed from the start
            pass


def _end(code: int) -> NoReturn:
    drop_unwritten()
    sys.exit(code)
