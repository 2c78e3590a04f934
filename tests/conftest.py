"""Fixtures that several folders share."""

from __future__ import annotations

import pytest
from hypothesis import settings

from diffscore_fast import DiffScorer

# `pytest --hypothesis-profile=thorough` makes the tests with generated files try this many.
settings.register_profile("thorough", max_examples=2000)


@pytest.fixture(scope="session")
def mini() -> DiffScorer:
    """The embedded model, loaded once."""
    return DiffScorer("mini")
