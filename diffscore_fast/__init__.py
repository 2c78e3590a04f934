"""Score text with masked-diffusion language models.

>>> from diffscore_fast import DiffScorer, LikelihoodBounds
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from diffscore_fast.version import __version__

if TYPE_CHECKING:
    from diffscore_fast.bounds import LikelihoodBounds
    from diffscore_fast.distributed.batch import BatchScorer
    from diffscore_fast.scoring import DiffScorer

__all__ = ["BatchScorer", "DiffScorer", "LikelihoodBounds", "__version__"]

_HOME = {
    "BatchScorer": "diffscore_fast.distributed.batch",
    "DiffScorer": "diffscore_fast.scoring",
    "LikelihoodBounds": "diffscore_fast.bounds",
}


def __getattr__(name: str) -> object:
    # Importing torch takes seconds; `diffscore --help` and version checks should not.
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
