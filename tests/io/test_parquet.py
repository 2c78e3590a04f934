"""Parquet: the schema and values of the input come back exactly; damage costs the rows it is in."""

from __future__ import annotations

import datetime
import decimal
import json

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from diffscore_fast.errors import InputError
from diffscore_fast.io.parquet import GROUP_ROWS, ParquetReader
from tests.support.rows import ADDED, LengthTable, run_lengths

TABLE = pyarrow.table(
    {
        "text": ["NA", None, "", "007"],
        "id": pyarrow.array([2**63 - 1, None, -1, 0], pyarrow.int64()),
        "unsigned": pyarrow.array([2**64 - 1, 0, 0, 0], pyarrow.uint64()),
        "kind": pyarrow.array(["a", "b", None, "a"]).dictionary_encode(),
        "at": pyarrow.array([1, 2, None, 4], pyarrow.timestamp("ns", "UTC")),
        "took": pyarrow.array([1, 2, 3, None], pyarrow.duration("us")),
        "price": pyarrow.array([decimal.Decimal("1.10"), None, decimal.Decimal("-2.00"), decimal.Decimal("0.00")]),
        "nested": pyarrow.array([{"days": [datetime.date(2020, 1, 1)], "x": 0.1}, None, {"days": None, "x": None}, {}]),
        "bytes": pyarrow.array([b"\xff\0", b"", None, b"a"]),
        "map": pyarrow.array([[("k", 1)], [], None, []], pyarrow.map_(pyarrow.string(), pyarrow.int8())),
        "pair": pyarrow.array([[1, 2], None, [3, 4], [5, 6]], pyarrow.list_(pyarrow.int8(), 2)),
        "small": pyarrow.array([0.1, float("inf"), None, 0.0], pyarrow.float32()),
        "large": pyarrow.array(["x", "y", "z", None], pyarrow.large_string()),
        "nothing": pyarrow.nulls(4),
    }
).replace_schema_metadata({"made by": "a test"})


def test_columns_and_schema_come_back_exactly_with_typed_ones_behind(tmp_path):
    parquet.write_table(TABLE, tmp_path / "in.parquet", row_group_size=3)
    run_lengths(tmp_path / "in.parquet", tmp_path / "out.parquet")
    before, after = parquet.read_table(tmp_path / "in.parquet"), parquet.read_table(tmp_path / "out.parquet")
    kept = after.select(TABLE.column_names)
    assert kept.equals(before) and kept.schema.equals(before.schema, check_metadata=True)
    added = {name: str(after.schema.field(name).type) for name in ADDED}
    assert added == {
        "score": "double",
        "tokens": "int64",
        "status": "string",
        "message": "string",
        "profile": "map<string, double ('profile')>",
        "interval": "list<element: double>",
        "token_scores": "list<element: struct<start: int64, end: int64, log_prob: double>>",
    }
    assert after["status"].to_pylist() == ["ok", "missing", "empty_text", "ok"]
    assert after["score"].to_pylist() == [-2.0, None, None, -3.0]
    assert after["profile"].to_pylist()[0] == [("0.1", -2.0), ("0.2", None)]
    assert after["token_scores"].to_pylist()[:2] == [
        [{"start": 0, "end": 1, "log_prob": -2.0}, {"start": 1, "end": 2, "log_prob": None}],
        None,
    ]


def test_values_in_json_lines_are_exact_or_text(tmp_path):
    parquet.write_table(TABLE, tmp_path / "in.parquet")
    run_lengths(tmp_path / "in.parquet", tmp_path / "out.jsonl")
    first, second = (json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()[:2])
    assert {name: first[name] for name in TABLE.column_names} == {
        "text": "NA",
        "id": 2**63 - 1,
        "unsigned": 2**64 - 1,
        "kind": "a",
        "at": "1970-01-01 00:00:00.000000001Z",
        "took": "1",
        "price": "1.10",
        "nested": {"days": ["2020-01-01"], "x": 0.1},
        "bytes": "/wA=",
        "map": [["k", 1]],
        "pair": [1, 2],
        "small": 0.10000000149011612,
        "large": "x",
        "nothing": None,
    }
    assert second["text"] is None and second["small"] == "inf" and second["status"] == "missing"


def test_large_files_keep_their_rows_through_row_groups_and_changing_dictionaries(tmp_path):
    count = GROUP_ROWS + 1000
    parts = [
        pyarrow.table(
            {"text": [f"t{i}" for i in part], "kind": pyarrow.array([str(i // 7) for i in part]).dictionary_encode()}
        )
        for part in (range(count // 2), range(count // 2, count))
    ]
    with parquet.ParquetWriter(tmp_path / "in.parquet", parts[0].schema) as writer:
        for part in parts:
            writer.write_table(part)
    run_lengths(tmp_path / "in.parquet", tmp_path / "out.parquet")
    before, after = parquet.read_table(tmp_path / "in.parquet"), parquet.read_table(tmp_path / "out.parquet")
    assert after["text"].equals(before["text"])
    assert after["kind"].cast("string").to_pylist() == before["kind"].cast("string").to_pylist()
    assert after["score"].to_pylist() == [-float(len(text)) for text in before["text"].to_pylist()]


def not_utf_8(kind: pyarrow.DataType) -> pyarrow.Array:
    """Four strings; the third holds bytes that are no UTF-8."""
    large = pyarrow.types.is_large_string(kind)
    raw = pyarrow.array(
        [b"good", b"fine", b"a\xff\xc3", b"\xc3\xa9"], pyarrow.large_binary() if large else pyarrow.binary()
    )
    return pyarrow.Array.from_buffers(pyarrow.large_string() if large else pyarrow.string(), 4, raw.buffers())


@pytest.mark.parametrize("column", ["text", "id"])
@pytest.mark.parametrize("form", ["string", "large_string"])
def test_text_that_is_not_utf_8_fails_its_row_and_no_other(tmp_path, column, form):
    """Whether the column is scored or not; the output holds valid text, U+FFFD for what is none."""
    bad = not_utf_8(pyarrow.large_string() if form == "large_string" else pyarrow.string())
    other = "id" if column == "text" else "text"
    schema = pyarrow.schema([pyarrow.field(column, bad.type, nullable=False), pyarrow.field(other, pyarrow.string())])
    parquet.write_table(pyarrow.table({column: bad, other: ["a", "b", "c", "d"]}, schema), tmp_path / "in.parquet")
    run_lengths(tmp_path / "in.parquet", tmp_path / "out.parquet")
    after = parquet.read_table(tmp_path / "out.parquet")
    after.validate(full=True)
    assert after["status"].to_pylist() == ["ok", "ok", "invalid_record", "ok"]
    assert f"row 3: the column {column!r} holds what is not UTF-8" in after["message"][2].as_py()
    assert after[column].to_pylist() == ["good", "fine", "a\ufffd\ufffd", "é"]
    assert after[other].to_pylist() == ["a", "b", "c", "d"] and after.schema.field(column).type == bad.type
    run_lengths(tmp_path / "in.parquet", tmp_path / "out.jsonl")
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    assert [json.loads(line)["status"] for line in lines] == ["ok", "ok", "invalid_record", "ok"]


def test_a_column_of_categories_that_is_not_utf_8_costs_its_row_group(tmp_path):
    """pyarrow checks the categories of a row group all at once."""
    kinds = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0, 1, 2, 3]), not_utf_8(pyarrow.string()))
    table = pyarrow.table({"text": ["a", "b", "c", "d"], "kind": kinds})
    parquet.write_table(table, tmp_path / "in.parquet", row_group_size=2)
    run_lengths(tmp_path / "in.parquet", tmp_path / "out.parquet")
    after = parquet.read_table(tmp_path / "out.parquet")
    after.validate(full=True)
    assert after.num_rows == 4 and set(after["status"].to_pylist()) <= {"ok", "invalid_record"}
    assert "cannot be read: Invalid UTF8" in after["message"][2].as_py()


def test_text_inside_lists_structs_and_maps_that_is_not_utf_8_fails_its_row(tmp_path):
    bad = not_utf_8(pyarrow.string())
    ends = pyarrow.array([0, 1, 2, 3, 4], pyarrow.int32())
    table = pyarrow.table(
        {
            "text": ["a", "b", "c", "d"],
            "list": pyarrow.ListArray.from_arrays(ends, bad),
            "struct": pyarrow.StructArray.from_arrays([bad], ["x"]),
            "map": pyarrow.MapArray.from_arrays(ends, pyarrow.array(["k"] * 4), bad),
        }
    )
    parquet.write_table(table, tmp_path / "in.parquet")
    run_lengths(tmp_path / "in.parquet", tmp_path / "out.parquet")
    after = parquet.read_table(tmp_path / "out.parquet")
    after.validate(full=True)
    assert after["status"].to_pylist() == ["ok", "ok", "invalid_record", "ok"]
    assert after["list"].to_pylist() == [["good"], ["fine"], None, ["é"]]
    assert after["struct"].to_pylist() == [{"x": "good"}, {"x": "fine"}, None, {"x": "é"}]
    assert after["map"].to_pylist() == [[("k", "good")], [("k", "fine")], None, [("k", "é")]]


def damaged(tmp_path, table):
    """A file of three row groups whose second one is overwritten with noise."""
    path = tmp_path / "in.parquet"
    parquet.write_table(table, path, row_group_size=10, compression="zstd", use_dictionary=False)
    content = bytearray(path.read_bytes())
    column = parquet.ParquetFile(path).metadata.row_group(1).column(0)
    content[column.data_page_offset : column.data_page_offset + column.total_compressed_size] = (
        b"\xaa" * column.total_compressed_size
    )
    path.write_bytes(content)
    return path


def test_a_row_group_that_cannot_be_read_costs_its_rows(tmp_path):
    path = damaged(tmp_path, pyarrow.table({"text": [f"text {i}" for i in range(30)]}))
    for name in ("out.parquet", "out.jsonl", "out.csv"):
        run = run_lengths(path, tmp_path / name)
        assert run.statuses == {"ok": 20, "invalid_record": 10}
    after = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert [row["text"] for row in after[:10]] == [f"text {i}" for i in range(10)]
    assert after[10]["text"] is None and "row 11: row group 1 cannot be read" in after[10]["message"]
    assert after[20]["text"] == "text 20" and after[20]["status"] == "ok"


def test_a_column_without_nulls_cannot_hold_an_unreadable_row(tmp_path):
    schema = pyarrow.schema([pyarrow.field("text", pyarrow.string(), nullable=False)])
    path = damaged(tmp_path, pyarrow.table({"text": [f"text {i}" for i in range(30)]}, schema=schema))
    with pytest.raises(InputError, match="null in the column 'text', which allows no null"):
        run_lengths(path, tmp_path / "out.parquet")
    assert not (tmp_path / "out.parquet").exists()


def test_files_that_cannot_be_used_are_refused(tmp_path):
    parquet.write_table(pyarrow.table({"a": [1]}), tmp_path / "whole.parquet")
    content = (tmp_path / "whole.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(content[:-5])
    (tmp_path / "text.parquet").write_bytes(b'{"text": "a"}\n')
    (tmp_path / "empty.parquet").write_bytes(b"")
    twice = pyarrow.Table.from_arrays([pyarrow.array([1]), pyarrow.array([2])], names=["a", "a"])
    parquet.write_table(twice, tmp_path / "twice.parquet")
    for name, message in [
        ("cut", "as Parquet"),
        ("text", "as Parquet"),
        ("empty", "as Parquet"),
        ("twice", "'a' twice"),
        ("none", "No such file"),
    ]:
        with pytest.raises(InputError, match=f"{name}.parquet.*{message}"):
            ParquetReader(str(tmp_path / f"{name}.parquet"))
    with pytest.raises(InputError, match="standard input"):
        ParquetReader("-")
    with pytest.raises(InputError, match="leave out the last ending"):
        run_lengths(tmp_path / "whole.parquet", tmp_path / "out.parquet.gz", column="a")
    with pytest.raises(InputError, match="no field 'text'; it has: a"):
        run_lengths(tmp_path / "whole.parquet", tmp_path / "out.parquet")


def test_a_stopped_run_leaves_a_file_that_can_be_read(tmp_path, monkeypatch):
    parquet.write_table(pyarrow.table({"text": ["a", "b", "c"]}), tmp_path / "in.parquet")
    real, made = LengthTable.__init__, []

    def stopped(self, *values):
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append(1)
        real(self, *values)

    monkeypatch.setattr(LengthTable, "__init__", stopped)
    with pytest.raises(KeyboardInterrupt):
        run_lengths(tmp_path / "in.parquet", tmp_path / "out.parquet")
    assert parquet.read_table(tmp_path / "out.parquet.partial")["text"].to_pylist() == ["a", "b"]
    assert not (tmp_path / "out.parquet").exists()


@settings(deadline=None)
@given(data=st.data(), compression=st.sampled_from(["none", "snappy", "zstd"]))
def test_whatever_is_damaged_every_row_has_a_place(tmp_path_factory, data, compression):
    path = tmp_path_factory.mktemp("damage") / "in.parquet"
    parquet.write_table(TABLE, path, row_group_size=2, compression=compression)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.sampled_from([None, len(content) // 2, len(content) - 1]))])
    try:
        reader = ParquetReader(str(path))
    except InputError as error:
        assert str(path) in str(error)
        return
    records = list(reader)
    assert len(records) == reader.size
    for record in records:
        assert record.problem if record.fields is None else json.dumps(record.json_fields())


@pytest.mark.parametrize(
    ("column", "problem"),
    [
        (pyarrow.array([0], pyarrow.int64()).cast(pyarrow.timestamp("us", tz="Nope/Zone")), "Nope/Zone"),
        (
            pyarrow.StructArray.from_arrays([pyarrow.array([1]), pyarrow.array([2])], ["a", "a"]),
            "two fields of one name",
        ),
    ],
)
def test_a_column_without_a_form_in_text_is_refused_before_the_run(tmp_path, column, problem):
    table = pyarrow.table({"text": ["a"], "odd": column})
    parquet.write_table(table, tmp_path / "in.parquet")
    with pytest.raises(InputError, match=f"the column 'odd'.*{problem}"):
        run_lengths(tmp_path / "in.parquet", tmp_path / "out.jsonl")
    (tmp_path / "out.parquet.partial").write_bytes(b"what a killed run has left")
    with pytest.raises(InputError, match="rows of a run that was stopped are in .*out.parquet.partial; move it away"):
        run_lengths(tmp_path / "in.parquet", tmp_path / "out.parquet")
    (tmp_path / "out.parquet.partial").unlink()
    run_lengths(tmp_path / "in.parquet", tmp_path / "out.parquet")
    assert parquet.read_table(tmp_path / "out.parquet").column("odd").type == column.type
