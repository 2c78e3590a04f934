from __future__ import annotations

import csv
import json

import torch

from bench.records import append_record, append_rows

CIRCUMSTANCES = ["threads", "load", "machine", "torch", "version"]


def read(path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file, strict=True))


def test_rows_are_kept_with_their_circumstances(tmp_path):
    path = tmp_path / "made" / "rows.csv"
    append_rows(path, [{"name": "a, b", "value": 1}, {"name": "c", "value": 2}])
    append_rows(path, [{"name": "d", "value": 3}])
    rows = read(path)
    assert list(rows[0]) == ["date", "name", "value", *CIRCUMSTANCES]
    assert [(row["name"], row["value"]) for row in rows] == [("a, b", "1"), ("c", "2"), ("d", "3")]
    assert {row["threads"] for row in rows} == {str(torch.get_num_threads())}


def test_an_older_file_gets_the_columns_it_lacks_and_keeps_its_rows(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text('date,left,name,torch\n2020-01-01,7,"a, b",1.0\n')
    append_rows(path, [{"name": "c", "ratio": 2}])
    append_rows(path, [{"name": "d", "ratio": 3}])
    first, second, third = read(path)
    assert set(first) == {"date", "left", "name", "ratio", *CIRCUMSTANCES}
    assert {key: value for key, value in first.items() if value} == {
        "date": "2020-01-01",
        "left": "7",
        "name": "a, b",
        "torch": "1.0",
    }
    assert [(row["name"], row["ratio"], row["left"]) for row in (second, third)] == [("c", "2", ""), ("d", "3", "")]
    assert {row["torch"] for row in (second, third)} == {torch.__version__}
    assert [item.name for item in tmp_path.iterdir()] == ["rows.csv"]


def test_records_are_lines_of_plain_json(tmp_path):
    path = tmp_path / "made" / "records.jsonl"
    for value in (float("nan"), 0.5):
        append_record(path, name="a", results=[{"value": value}], low=value)

    def refuse(name: str) -> None:
        raise AssertionError(name)

    first, second = (json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines())
    assert list(first) == ["date", "name", "results", "low", *CIRCUMSTANCES]
    assert (first["results"], first["low"]) == ([{"value": None}], None)
    assert (second["results"], second["low"]) == ([{"value": 0.5}], 0.5)
