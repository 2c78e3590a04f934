"""DiffScore: text evaluation by masked reconstruction (arXiv 2605.11601)."""

from diffscore_fast.scoring.config import ScoreConfig
from diffscore_fast.scoring.mask_design import MaskDesign
from diffscore_fast.scoring.reconstruction import ReconstructionConfig
from diffscore_fast.scoring.scorer import DiffScorer
from diffscore_fast.scoring.table import ScoreTable, TokenScores

__all__ = ["DiffScorer", "MaskDesign", "ReconstructionConfig", "ScoreConfig", "ScoreTable", "TokenScores"]
