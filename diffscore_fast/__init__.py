"""Score text with masked-diffusion language models.

>>> from diffscore_fast import DiffScorer, LikelihoodBounds
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from diffscore_fast.version import __version__

if TYPE_CHECKING:
    from diffscore_fast.bounds import LikelihoodBounds
    from diffscore_fast.scorer import DiffScorer

__all__ = ["DiffScorer", "LikelihoodBounds", "__version__"]


def __getattr__(name: str) -> object:
    # Importing torch takes seconds; `diffscore --help` and version checks should not.
    if name == "DiffScorer":
        from diffscore_fast.scorer import DiffScorer

        return DiffScorer
    if name == "LikelihoodBounds":
        from diffscore_fast.bounds import LikelihoodBounds

        return LikelihoodBounds
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
