"""`BatchScorer`: from a batch of rows to the same rows with scores, for Ray, Spark and Hugging Face datasets."""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from diffscore_fast.backbones.config import EMBEDDED_MODELS
from diffscore_fast.engine.session import ScoringModel
from diffscore_fast.errors import InputError
from diffscore_fast.options import DTYPES
from diffscore_fast.scoring.scorer import DiffScorer
from diffscore_fast.signature import Signature

if TYPE_CHECKING:
    import pandas
    import pyarrow

_MODEL_OPTIONS = frozenset(inspect.signature(ScoringModel.__init__).parameters) - {"self", "model", "attention"}
_OF_ROWS = {"self", "sources", "candidates", "references", "items", "token_scores", "progress"}
_SCORE_OPTIONS = frozenset(inspect.signature(DiffScorer.score).parameters) - _OF_ROWS

# Models of this process, by their arguments. A `BatchScorer` is pickled without its model and arrives many times in a
# process of Spark or Ray; the model is loaded the first time.
_loaded: dict[str, DiffScorer] = {}
_loading = threading.Lock()


def _after_fork() -> None:
    global _loading
    _loading = threading.Lock()  # a thread that held it does not exist here


os.register_at_fork(after_in_child=_after_fork)


class BatchScorer:
    """Adds scores to batches of rows: `BatchScorer(**options)(batch)`.

    Made once and called with any number of batches, in any process: it is pickled as its arguments alone, and every
    process loads the model once, at the first batch. A score depends on its row and the options, not on the batch.

    Parameters
    ----------
    model : str or Path
        As for `DiffScorer`.
    source_column, candidate_column : str
        Columns that hold the texts. `marginal` reads no source.
    references_column : str, optional
        Column with a list of references per row, which take the place of the source.
    item_column : str, optional
        Column with the item of each row, within which masks are shared; may be the source's.
    output_prefix : str
        Prefix of the names of the added columns.
    options
        Keyword arguments of `DiffScorer` (device, dtype, memory, ...) and of `DiffScorer.score` (direction, draws,
        seed, ...). A dtype may be named: "bfloat16".

    Raises
    ------
    InputError
        For an unknown option.

    Examples
    --------
    >>> scorer = BatchScorer(draws=1)
    >>> rows = scorer({"source": ["The cat sat on the mat."], "candidate": ["A cat sat."]})
    >>> rows["status"]
    ['ok']
    """

    def __init__(
        self,
        model: str | Path = "mini",
        *,
        source_column: str = "source",
        candidate_column: str = "candidate",
        references_column: str | None = None,
        item_column: str | None = None,
        output_prefix: str = "",
        **options: Any,
    ) -> None:
        unknown = sorted(options.keys() - _MODEL_OPTIONS - _SCORE_OPTIONS)
        if unknown:
            known = ", ".join(sorted(_MODEL_OPTIONS | _SCORE_OPTIONS))
            raise InputError(f"BatchScorer has no option {unknown[0]!r}; it has {known}")
        if str(model) not in EMBEDDED_MODELS and Path(model).is_dir():
            model = str(Path(model).resolve())  # the same folder in a process with another working folder
        dtype = options.get("dtype")
        if isinstance(dtype, str):
            if dtype not in DTYPES:
                raise InputError(f"dtype {dtype!r} is unknown; use {', '.join(DTYPES)}")
            options["dtype"] = getattr(torch, dtype)
        self._model = {"model": str(model), **{name: options[name] for name in options if name in _MODEL_OPTIONS}}
        self._options = {name: options[name] for name in options if name in _SCORE_OPTIONS}
        self._prefix = output_prefix
        self._candidates, self._references, self._items = candidate_column, references_column, item_column
        self._sources = source_column if options.get("direction") != "marginal" else None

    def __call__(self, batch: Any) -> Any:
        """The batch with the columns score, stderr, tokens, draws, status and message.

        Parameters
        ----------
        batch : pyarrow.Table, pyarrow.RecordBatch, pandas.DataFrame, or mapping from names to columns
            Columns of a mapping are lists or numpy arrays.

        Returns
        -------
        The same kind of batch (a dict for a mapping), of as many rows in the same order
            A row without a score has a null: None in lists, NaN in numpy and pandas. message is "" for status "ok".

        Raises
        ------
        InputError
            If a column is missing, or the name of an added column is taken.
        """
        if isinstance(batch, Mapping):
            return self._score_mapping(batch)
        if hasattr(batch, "column_names") or hasattr(batch, "to_pylist"):
            return self._score_arrow(batch)
        if hasattr(batch, "iloc") and hasattr(batch, "columns"):
            return self._score_frame(batch)
        raise InputError(
            f"a batch is a pyarrow.Table, a pandas.DataFrame, or a mapping of columns, not {type(batch).__name__}"
        )

    @property
    def signature(self) -> Signature:
        """Everything that the scores depend on besides their rows; loads the model."""
        empty: list[Any] = []
        read = {"references": empty} if self._references is not None else {"sources": empty}
        if self._items is not None:
            read["items"] = empty
        return self._scorer().score(**{"sources": None, "candidates": empty, **read, **self._options}).signature

    def _score_mapping(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        self._check_names(batch)
        added = self._scored({name: [_plain(value) for value in batch[name]] for name in self._columns()})
        rows = {name: batch[name] for name in batch}
        if all(isinstance(batch[name], np.ndarray) for name in self._columns()):
            return {**rows, **{name: np.asarray(column) for name, column in added.items()}}
        return {**rows, **{name: _with_none(column) for name, column in added.items()}}

    def _score_arrow(self, batch: pyarrow.Table | pyarrow.RecordBatch) -> Any:
        import pyarrow

        names = batch.schema.names
        self._check_names(names)
        added = self._scored({name: batch.column(name).to_pylist() for name in self._columns()})
        arrays = [pyarrow.array(column, from_pandas=True) for column in added.values()]
        if isinstance(batch, pyarrow.RecordBatch):
            schema = batch.schema
            for name, array in zip(added, arrays, strict=True):
                schema = schema.append(pyarrow.field(name, array.type))
            return pyarrow.RecordBatch.from_arrays([*batch.columns, *arrays], schema=schema)
        for name, array in zip(added, arrays, strict=True):
            batch = batch.append_column(name, array)
        return batch

    def _score_frame(self, batch: pandas.DataFrame) -> pandas.DataFrame:
        self._check_names(list(batch.columns))
        texts = {}
        for name in self._columns():
            present = batch[name].notna()
            texts[name] = [
                _plain(value) if is_there else None for value, is_there in zip(batch[name], present, strict=True)
            ]
        return batch.assign(**self._scored(texts))

    def _columns(self) -> list[str]:
        """Names of the columns that are read."""
        read = [self._references or self._sources, self._candidates, self._items]
        return list(dict.fromkeys(name for name in read if name is not None))

    def _check_names(self, names: Iterable[str]) -> None:
        names = list(names)
        for name in self._columns():
            if name not in names:
                raise InputError(f"the batch has no column {name!r}; it has: {', '.join(map(str, names))}")
        for name in ("score", "stderr", "tokens", "draws", "status", "message"):
            if self._prefix + name in names:
                raise InputError(f"the batch already has the column {self._prefix + name!r}; give an output_prefix")

    def _scored(self, texts: dict[str, list[Any]]) -> dict[str, Any]:
        """The added columns."""
        candidates = texts[self._candidates]
        if self._references is not None:
            read: dict[str, Any] = {"sources": None, "references": texts[self._references]}
        else:
            read = {"sources": None if self._sources is None else texts[self._sources]}
        if self._items is not None:
            read["items"] = texts[self._items]
        table = self._scorer().score(**read, candidates=candidates, **self._options)
        columns = {
            "score": table.scores,
            "stderr": table.stderr,
            "tokens": table.num_tokens,
            "draws": table.num_draws,
            "status": table.status,
            "message": table.messages,
        }
        return {self._prefix + name: column for name, column in columns.items()}

    def _scorer(self) -> DiffScorer:
        key = repr(sorted(self._model.items()))
        with _loading:
            if key not in _loaded:
                _loaded[key] = DiffScorer(**self._model)
            return _loaded[key]


def _plain(value: Any) -> Any:
    """A list for an array, as Ray and pandas hand lists of references."""
    return value.tolist() if isinstance(value, np.ndarray) else value


def _with_none(column: Any) -> list[Any]:
    """A column as a list, with None for NaN."""
    if isinstance(column, list):
        return column
    return [None if value != value else value for value in column.tolist()]
