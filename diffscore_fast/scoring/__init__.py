"""DiffScore: text evaluation by masked reconstruction (arXiv 2605.11601).

The files in reading order:

- `scorer`: `DiffScorer`, from rows of texts to a table.
- `config`: what is asked for, checked once.
- `rows`: texts to tokens, and which rows can be scored.
- `mask_design`, `sizes`, `draws`: how masks are drawn, and what each weighs.
- `reconstruction`: the estimator, from mask draws to scores with standard errors.
- `control_variates`, `corrected`, `profile`: its parts: less variance for balanced draws, the corrected estimator of
  the score under `full`, and the mean log-prob by mask ratio.
- `word_classes`: an estimator for one class of words.
- `table`, `references`: the result, and one row for several references.
- `compare`, `calibrate`, `heatmap`: two systems, two attention patterns, and a picture.
"""

from diffscore_fast.scoring.config import ReconstructionConfig, ScoreConfig
from diffscore_fast.scoring.mask_design import MaskDesign
from diffscore_fast.scoring.scorer import DiffScorer
from diffscore_fast.scoring.table import ScoreTable, TokenScores

__all__ = ["DiffScorer", "MaskDesign", "ReconstructionConfig", "ScoreConfig", "ScoreTable", "TokenScores"]
