"""How a command ends: every error and signal becomes a message of one line and an exit code."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import click

from diffscore_fast.cli.terminal import EXIT_UNUSABLE, in_words
from diffscore_fast.errors import DiffScoreError, is_out_of_memory
from diffscore_fast.process import spare_garbage_collector

EXIT_SOME_FAILED = 3
EXIT_INTERRUPTED = 130


def run_and_exit(command: Callable[..., bool | None], *arguments: Any) -> None:
    """Run a command, which returns whether some rows failed, and exit.

    A closed pipe passes as `BrokenPipeError`: `terminal.Command` answers it.
    """
    spare_garbage_collector()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # under nohup SIGHUP is ignored, and must stay so
            signal.signal(number, _terminate)
    try:
        failed = command(*arguments)
    except BrokenPipeError:
        raise
    except (DiffScoreError, OSError) as error:
        _say(in_words(error) if isinstance(error, OSError) else str(error))
        sys.exit(EXIT_UNUSABLE)
    except _Terminated as stopped:
        sys.exit(128 + stopped.args[0])
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        _say(f"memory ran out ({reason}); give less with --memory, use a smaller model, or leave out very long rows")
        sys.exit(EXIT_UNUSABLE)
    sys.exit(EXIT_SOME_FAILED if failed else 0)


class _Terminated(KeyboardInterrupt):
    """A signal that ends the process; as with Ctrl-C, a run keeps its finished rows."""


def _terminate(number: int, frame: Any) -> None:
    raise _Terminated(number)


def _say(message: str) -> None:
    with suppress(OSError):  # standard error may be closed, or its disk full
        click.echo(f"diffscore: {message}", err=True)
