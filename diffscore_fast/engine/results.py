"""What packs give, collected while the next pack is computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
from torch import Tensor

from diffscore_fast.ops.transfer import Arriving


class Results:
    """Results by wanted row. Those of a pack are read when the next one has been launched: a GPU computes meanwhile.

    Parameters
    ----------
    values : [M]
        Where results go, by wanted row.
    progress : callable, optional
        Is given each pack's window tokens when its results are there.
    """

    def __init__(self, values: np.ndarray, progress: Callable[[int], None] | None = None) -> None:
        self.values, self._progress = values, progress
        self._arriving: deque[tuple[np.ndarray, Arriving, int]] = deque()

    def add(self, rows: np.ndarray, values: Tensor, tokens: int) -> None:
        """Results of the wanted rows `rows` int64 [m], from windows of `tokens` tokens."""
        self._arriving.append((rows, Arriving(values), tokens))

    def collect(self, keep: int = 0) -> None:
        """Wait for the results of all packs but the last `keep`."""
        while len(self._arriving) > keep:
            rows, values, tokens = self._arriving.popleft()
            self.values[rows] = values.numpy()
            if self._progress is not None:
                self._progress(tokens)
