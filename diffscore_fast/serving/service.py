"""The service itself: a scorer, the queue in front of it, and what every endpoint needs of both."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from diffscore_fast.bounds.likelihood import LikelihoodBounds
from diffscore_fast.errors import DiffScoreError, is_out_of_memory
from diffscore_fast.scoring.config import ScoreConfig, make_config
from diffscore_fast.scoring.scorer import DiffScorer
from diffscore_fast.scoring.table import ScoreTable
from diffscore_fast.serving.answers import RefusedError
from diffscore_fast.serving.batching import QueueClosedError, ScoringQueue, Work
from diffscore_fast.serving.settings import Settings
from diffscore_fast.serving.telemetry import Metrics, make_logger, where
from diffscore_fast.serving.works import ScoreWork, table_of


class Service:
    """What the endpoints share.

    Parameters
    ----------
    scorer : DiffScorer
        The scoring thread alone computes with it.
    settings : Settings
    """

    def __init__(self, scorer: DiffScorer, settings: Settings) -> None:
        self.scorer, self.settings = scorer, settings
        self.metrics, self.logger = Metrics(), make_logger()
        self._bounds: dict[int, LikelihoodBounds] = {}  # by block size: a model has few
        self.dtype = scorer.signature(self.config()).dtype
        self.queue = ScoringQueue(settings.batch_tokens, settings.max_wait, self.metrics.observe)
        self.metrics.queued_requests.set_function(lambda: self.queue.waiting_requests)
        self.metrics.queued_tokens.set_function(lambda: self.queue.waiting_tokens)

    def config(self, **options: Any) -> ScoreConfig:
        """The configuration for options of `make_config`.

        Raises
        ------
        RefusedError
            For options that cannot be used.
        """
        try:
            return self.scorer.complete(make_config(self.scorer.spec.default_pattern, **options))
        except DiffScoreError as error:
            raise RefusedError(400, str(error)) from None

    async def bounds(self, block_size: int) -> LikelihoodBounds:
        """The product that bounds likelihoods in blocks of this size, by the scorer's model; made at its first use.

        Raises
        ------
        RefusedError
            If the model has no such blocks.
        """
        if block_size not in self._bounds:
            try:
                made = await asyncio.to_thread(LikelihoodBounds.sharing, self.scorer, block_size=block_size)
            except DiffScoreError as error:
                raise RefusedError(400, str(error)) from None
            self._bounds.setdefault(block_size, made)
        return self._bounds[block_size]

    async def score(self, rows: Sequence[tuple[Any, ...]], config: ScoreConfig) -> ScoreTable:
        """Scores of rows, computed together with those of other requests; at least one row."""
        return table_of(await self.compute(ScoreWork(self.scorer, config), rows))

    async def compute(self, work: Work, rows: Sequence[Any]) -> list[Any]:
        """The results of rows. If this is cancelled, the rows leave the queue.

        Raises
        ------
        RefusedError
            If the rows are too many, or cannot be computed.
        """
        limits = self.settings.limits
        self.check_rows(len(rows))
        size = sum(work.size(row) for row in rows)
        if size > limits.tokens:
            raise RefusedError(
                413,
                f"the model would read about {size:,} tokens for this request (draws counted), and the limit is "
                f"{limits.tokens:,}; send fewer rows at a time",
            )
        try:
            return await asyncio.wrap_future(self.queue.submit(work, rows))
        except QueueClosedError:
            raise RefusedError(503, "the service is ending; try again", 1) from None
        except DiffScoreError as error:
            if is_out_of_memory(error):
                raise self._no_memory(error) from None
            raise RefusedError(400, str(error)) from None
        except Exception as error:
            if is_out_of_memory(error):
                raise self._no_memory(error) from None
            raise

    def check_rows(self, count: int) -> None:
        """Refuse no rows, or too many."""
        if count < 1:
            raise RefusedError(400, "there are no rows; send at least one")
        if count > self.settings.limits.rows:
            raise RefusedError(
                413, f"there are {count:,} rows, and the limit is {self.settings.limits.rows:,}; send fewer"
            )

    def count(self, status: Sequence[str], tokens: int) -> None:
        """Count rows that are answered."""
        for state in status:
            self.metrics.rows.labels(state).inc()
        self.metrics.tokens.inc(tokens)

    def _no_memory(self, error: BaseException) -> RefusedError:
        self.logger.log(logging.ERROR, "memory ran out", extra={"fields": where(error)})
        return RefusedError(503, "memory ran out for this request; send shorter texts or fewer draws", 5)
