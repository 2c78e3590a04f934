"""Fixtures that several folders share."""

from __future__ import annotations

import pytest

from diffscore_fast import DiffScorer


@pytest.fixture(scope="session")
def mini() -> DiffScorer:
    """The embedded model, loaded once."""
    return DiffScorer("mini")
