"""`BatchScorer` on every kind of batch, and in the libraries that call it."""

from __future__ import annotations

import multiprocessing
import pickle
from typing import Any

import numpy as np
import pandas
import pyarrow
import pytest

from diffscore_fast import BatchScorer
from diffscore_fast.distributed import batch as batch_module
from diffscore_fast.errors import InputError

SOURCES = ["The cat sat on the mat.", None, "It rained all day.", ""]
CANDIDATES = ["A cat sat.", "A cat sat.", "It rained.", "It rained."]
ADDED = ["score", "stderr", "tokens", "draws", "status", "message"]


@pytest.fixture(autouse=True)
def loaded(mini, monkeypatch):
    """The model that is already loaded, counted."""
    made = []

    def load(**arguments):
        made.append(arguments)
        return mini

    monkeypatch.setattr(batch_module, "DiffScorer", load)
    monkeypatch.setattr(batch_module, "_loaded", {})
    return made


@pytest.fixture(scope="module")
def expected(mini):
    return mini.score(SOURCES, CANDIDATES, draws=2, seed=3)


def test_every_kind_of_batch_comes_back_as_its_kind_with_the_same_scores(expected, loaded):
    scorer = BatchScorer(draws=2, seed=3)
    columns = {"id": [1, 2, 3, 4], "source": SOURCES, "candidate": CANDIDATES}
    lists = scorer(columns)
    assert list(lists) == [*columns, *ADDED] and type(lists["score"]) is list
    assert lists["score"][1] is None and lists["status"] == ["ok", "missing", "ok", "empty_source"]
    assert lists["message"][0] == "" and "missing" in lists["message"][1]
    table = scorer(pyarrow.table(columns))
    assert isinstance(table, pyarrow.Table) and table.column("score").null_count == 2
    record_batch = scorer(pyarrow.RecordBatch.from_pydict(columns))
    assert isinstance(record_batch, pyarrow.RecordBatch)
    assert table.to_pylist() == record_batch.to_pylist() == pyarrow.table(lists).to_pylist()
    arrays = scorer({name: np.array(column, dtype=object) for name, column in columns.items()})
    assert arrays["score"].dtype == np.float64
    frame = scorer(pandas.DataFrame(columns, index=[9, 8, 7, 6]))
    assert list(frame.index) == [9, 8, 7, 6] and list(frame.columns) == [*columns, *ADDED]
    for scores in (arrays["score"], frame["score"], table.column("score").to_numpy()):
        np.testing.assert_array_equal(np.asarray(scores), expected.scores)
    assert frame["status"].tolist() == expected.status
    assert len(loaded) == 1
    assert str(scorer.signature) == str(expected.signature)


def test_splitting_a_batch_changes_no_bit(expected):
    scorer = BatchScorer(draws=2, seed=3)
    whole = pyarrow.table({"source": SOURCES, "candidate": CANDIDATES})
    parts = pyarrow.concat_tables([scorer(whole.slice(first, 1)) for first in range(4)])
    assert parts.equals(scorer(whole).combine_chunks()) or parts.to_pylist() == scorer(whole).to_pylist()
    assert scorer(whole.slice(0, 0)).num_rows == 0


def test_columns_directions_and_references_are_options(mini):
    rows: dict[str, Any] = {"hyp": ["A cat sat.", "Rain."], "refs": [["The cat sat.", "A cat."], ["It rained."]]}
    scorer = BatchScorer(candidate_column="hyp", references_column="refs", draws=1, output_prefix="d_")
    as_arrays = {"hyp": np.array(rows["hyp"], object), "refs": np.array([np.array(r) for r in rows["refs"]], object)}
    expected = mini.score(None, rows["hyp"], references=rows["refs"], draws=1)
    for batch in (rows, as_arrays, pandas.DataFrame(rows), pyarrow.table(rows)):
        found = scorer(batch)
        assert np.asarray(found["d_score"]).tolist() == expected.scores.tolist()
    found = BatchScorer(candidate_column="hyp", direction="marginal", draws=1)(rows)
    assert found["score"] == mini.score(None, rows["hyp"], direction="marginal", draws=1).scores.tolist()


def test_what_cannot_be_used_is_said():
    with pytest.raises(InputError, match="no option 'drawz'"):
        BatchScorer(drawz=3)
    with pytest.raises(InputError, match="dtype 'int3' is unknown"):
        BatchScorer(dtype="int3")
    with pytest.raises(InputError, match="no column 'source'; it has: text"):
        BatchScorer()({"text": ["x"]})
    with pytest.raises(InputError, match="already has the column 'score'; give an output_prefix"):
        BatchScorer()({"source": ["x"], "candidate": ["x"], "score": [1]})
    with pytest.raises(InputError, match="not list"):
        BatchScorer()(["x"])


def test_it_is_pickled_as_its_arguments_alone(loaded):
    scorer = BatchScorer(draws=2, dtype="bfloat16")
    scorer({"source": SOURCES, "candidate": CANDIDATES})
    assert len(pickle.dumps(scorer)) < 600
    again = pickle.loads(pickle.dumps(scorer))
    again({"source": SOURCES, "candidate": CANDIDATES})
    assert len(loaded) == 1, "the process has the model already"
    BatchScorer(draws=2)({"source": SOURCES, "candidate": CANDIDATES})
    assert len(loaded) == 2, "another dtype is another model"


def test_it_goes_to_a_spawned_process():
    batch = {"source": SOURCES, "candidate": CANDIDATES}
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        (found,) = pool.map(BatchScorer(draws=1), [batch])
    assert found == BatchScorer(draws=1)(batch)


def test_as_spark_calls_it(expected):
    """mapInPandas and mapInArrow hand an iterator of batches, and take one."""
    frames = [pandas.DataFrame({"source": SOURCES, "candidate": CANDIDATES})] * 2
    found = list(map(BatchScorer(draws=2, seed=3), iter(frames)))
    assert len(found) == 2
    np.testing.assert_array_equal(found[1]["score"], expected.scores)


def test_in_hugging_face_datasets(expected):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"source": SOURCES, "candidate": CANDIDATES})
    for form in (None, "arrow", "pandas"):
        found = rows.with_format(form).map(BatchScorer(draws=2, seed=3), batched=True, batch_size=3).with_format(None)
        assert found["status"][:] == expected.status and found["score"][1] is None
        assert found["score"][0] == expected.scores[0] and found["score"][2] == expected.scores[2]


def test_an_item_column_shares_masks_within_items(mini):
    columns = {"source": [SOURCES[0]] * 2, "candidate": ["A cat sat on a mat.", "A cat sat on the mat."]}
    scored = BatchScorer(draws=2, item_column="source")(columns)
    expected = mini.score(*columns.values(), draws=2, items=columns["source"])
    assert scored["score"] == expected.scores.tolist()
    assert BatchScorer(draws=2, item_column="source").signature.masks_by == "item"
    with pytest.raises(InputError, match="no column 'doc'"):
        BatchScorer(item_column="doc")(columns)
