"""rich's console, which leaves a closed pipe to the command."""

from __future__ import annotations

import rich.console


class Console(rich.console.Console):
    """As in rich; a closed pipe is a `BrokenPipeError`, where rich would end the process with exit code 1."""

    def on_broken_pipe(self) -> None:
        raise  # noqa: PLE0704, called while the error is handled
