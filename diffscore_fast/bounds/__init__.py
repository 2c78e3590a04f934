"""TUBE: the log-likelihood of block models, bracketed from both sides or exact (arXiv 2605.24292)."""

from diffscore_fast.bounds.config import BoundsConfig
from diffscore_fast.bounds.likelihood import LikelihoodBounds
from diffscore_fast.bounds.surrogates import CausalSurrogate, NetworkSurrogate
from diffscore_fast.bounds.table import BlockBounds, BoundsTable

__all__ = ["BlockBounds", "BoundsConfig", "BoundsTable", "CausalSurrogate", "LikelihoodBounds", "NetworkSurrogate"]
