"""Adapters for evaluation harnesses and libraries, each over `RowScorer`; see docs/integrations.md."""

from __future__ import annotations

from pathlib import Path

# For Hugging Face evaluate: evaluate.load(str(EVALUATE_FOLDER)).
EVALUATE_FOLDER = Path(__file__).parent / "diffscore_metric"
