"""Marks for tests of products that only some processors can make."""

from __future__ import annotations

import pytest
import torch

from diffscore_fast.ops.extension import brgemm_unavailable


def runs_brgemm(dtype: torch.dtype) -> pytest.MarkDecorator:
    """Skips, with the reason, where oneDNN's brgemm cannot multiply `dtype` here."""
    reason = brgemm_unavailable(dtype)
    return pytest.mark.skipif(reason is not None, reason=str(reason))
