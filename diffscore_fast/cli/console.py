"""rich's console, with closed pipes left to the command."""

from __future__ import annotations

import rich.console


class Console(rich.console.Console):
    """As in rich, but a closed pipe raises `BrokenPipeError`; rich would end the process with exit code 1."""

    def on_broken_pipe(self) -> None:
        raise  # noqa: PLE0704, called while the error is handled
