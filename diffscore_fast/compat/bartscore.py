"""BARTScore's class (github.com/neulab/BARTScore, bart_score.py), with masked reconstruction in BART's place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from diffscore_fast.arguments import checked_column
from diffscore_fast.compat.rows import default_device, scores_or_nan
from diffscore_fast.errors import InputError
from diffscore_fast.scoring.scorer import DiffScorer


class BARTScorer:
    """Scores how likely each target is, given its source.

    The numbers are mean log-probabilities of masked tokens, S(target given source), where BARTScore's are the mean
    log-probability read left to right: both negative, higher is better, on different scales.

    Parameters
    ----------
    device : str, optional
        "cuda:0" where there is a GPU, else "cpu", if not given.
    max_length : int
        Most tokens of a source or a target. BARTScore cuts what is longer; here it has no score.
    checkpoint : str
        A masked language model, as for `DiffScorer`. A BART checkpoint is refused: it is another kind of model.
    **options
        Further keyword arguments of `DiffScorer.score`, such as `draws`, `seed` and `direction`.

    Raises
    ------
    CheckpointError
        If the checkpoint is missing or no masked language model.

    Examples
    --------
    >>> scorer = BARTScorer(device="cpu", draws=5)
    >>> scores = scorer.score(["The cat sat on the mat."], ["A cat sat."], batch_size=4)
    >>> len(scores), scores[0] < 0
    (1, True)
    """

    def __init__(
        self, device: str | None = None, max_length: int = 1024, checkpoint: str = "mini", **options: Any
    ) -> None:
        self.device = device or default_device()
        self.max_length = max_length
        self._options = options
        self._scorer = DiffScorer(checkpoint, device=self.device)

    def score(self, srcs: Sequence[str], tgts: Sequence[str], batch_size: int = 4) -> list[float]:
        """Score each target under its source, in nats per token.

        Parameters
        ----------
        srcs, tgts : sequence of str
            Paired one to one.
        batch_size : int
            Accepted and ignored: batches follow a token budget and change no score.

        Returns
        -------
        list of float
            NaN, with a warning, where a row has no score.
        """
        return scores_or_nan(self._scorer, srcs, tgts, self.max_length, **self._options).tolist()

    def multi_ref_score(
        self,
        srcs: Sequence[str],
        tgts: Sequence[Sequence[str]],
        agg: Literal["mean", "max"] = "mean",
        batch_size: int = 4,
    ) -> list[float]:
        """Score each source against several targets.

        Parameters
        ----------
        srcs : sequence of str
        tgts : sequence of sequence of str
            The targets of each source; their number may differ from row to row.
        agg : {"mean", "max"}
            How the scores of a row's targets are combined.
        batch_size : int
            Accepted and not used.

        Returns
        -------
        list of float
            NaN, with a warning, where one of a row's targets has no score, or where there is none.
        """
        if agg not in ("mean", "max"):
            raise InputError(f"agg {agg!r} is unknown; use mean, max")
        srcs = checked_column("srcs", srcs)
        tgts = [checked_column("each row of tgts", targets) for targets in checked_column("tgts", tgts)]
        if len(srcs) != len(tgts):
            raise InputError(f"{len(srcs)} sources but {len(tgts)} rows of targets; they are paired one to one")
        counts = [len(targets) for targets in tgts]
        repeated = [source for source, count in zip(srcs, counts, strict=True) for _ in range(count)]
        flat = [target for targets in tgts for target in targets]
        scores = scores_or_nan(self._scorer, repeated, flat, self.max_length, **self._options)
        rows = np.split(scores, np.cumsum(counts)[:-1]) if counts else []
        reduce = np.mean if agg == "mean" else np.max  # both pass NaN on
        return [float(reduce(row)) if len(row) else float("nan") for row in rows]
