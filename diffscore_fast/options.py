"""Choices, limits and defaults, each stated once, for the command line, the Python calls and the configurations."""

from __future__ import annotations

# Largest counts that are taken. All are far above what a score needs; a larger one is a slip of the keyboard, and would
# end in a lack of memory instead of an error that names it.
MAX_DRAWS = 10_000
MAX_LEVELS = 1_000
MAX_ORDERS = 100_000
MAX_STEPS = 10**15
MAX_RESAMPLES = 1_000_000
MAX_SAMPLED_ROWS = 1_000_000
