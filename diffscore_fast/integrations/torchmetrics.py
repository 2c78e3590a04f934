"""DiffScore as a metric of torchmetrics: `DiffScore(draws=8)`; needs the extra `torchmetrics`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from diffscore_fast.integrations.rows import RowScorer


class DiffScore(Metric):
    """Mean score of predictions over all updates and processes, in nats per token; higher is better.

    Parameters
    ----------
    model : str
        As for `DiffScorer`.
    per_row : bool
        `compute` returns the score of every row, in the order of the updates (by process), NaN where there is none;
        not their mean.
    metric_options : dict, optional
        Arguments of `torchmetrics.Metric`.
    options
        As for `BatchScorer`: direction, draws, seed, device, dtype, ...

    Examples
    --------
    >>> metric = DiffScore(draws=1)
    >>> metric.update(["A cat sat."], ["The cat sat on the mat."])
    >>> bool(metric.compute() < 0)
    True
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    scores: list[Tensor]

    def __init__(
        self,
        model: str = "mini",
        *,
        per_row: bool = False,
        metric_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**(metric_options or {}))
        self._rows = RowScorer(model, **options)
        self._per_row = per_row
        self.add_state("scores", default=[], dist_reduce_fx="cat")

    def update(self, preds: Sequence[str], target: Sequence[str] | Sequence[Sequence[str]]) -> None:
        """Score predictions, each with its source, or with its list of references."""
        found = [float("nan") if row.score is None else row.score for row in self._rows(preds, target)]
        self.scores.append(torch.tensor(found, dtype=torch.float64, device=self.device))

    def compute(self) -> Tensor:
        """The mean over rows that have a score (NaN if none has), or the score of every row; float64."""
        nothing = torch.zeros(0, dtype=torch.float64, device=self.device)
        scores = dim_zero_cat(self.scores) if len(self.scores) else nothing
        return scores if self._per_row else scores.nanmean()
