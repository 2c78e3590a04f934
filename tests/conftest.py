"""Fixtures that several folders share."""

from __future__ import annotations

import pytest
from hypothesis import settings

from diffscore_fast import DiffScorer
from tests.support.products import force_products

# `pytest --hypothesis-profile=thorough` makes the tests with generated files try this many.
settings.register_profile("thorough", max_examples=2000)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--products",
        choices=["auto", "on", "off", "other"],
        default="auto",
        help="products by units for bfloat16 or their stand-in: as the processor takes them, always, never, "
        "or as it does not",
    )


def pytest_configure(config: pytest.Config) -> None:
    force_products(config.getoption("--products"))


@pytest.fixture(scope="session")
def mini() -> DiffScorer:
    """The embedded model, loaded once."""
    return DiffScorer("mini")
