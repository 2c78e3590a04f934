"""`diffscore score` and `diffscore bound` on files of every format."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pytest
from click.testing import CliRunner
from pyarrow import parquet

from diffscore_fast import LikelihoodBounds
from diffscore_fast.cli import bound as bound_module
from diffscore_fast.cli import score as score_module
from diffscore_fast.cli.main import main
from tests.support.rows import NAMES, dialect_of, read_rows, write_rows

ROWS = [
    {"id": "007", "source": "The cat sat on the mat.", "candidate": "A cat sat."},
    {"id": "", "source": 'The cat, which sat on the mat,\nwas "grey".', "candidate": "A grey\u2028cat sat."},
]
ROWS += [{"id": "NA", "source": "It rained.", "candidate": text} for text in ("NA", "null", "", '"A", she\nsaid.')]


@pytest.fixture
def here(mini, monkeypatch, tmp_path):
    monkeypatch.setattr(score_module, "DiffScorer", lambda model, **options: mini)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(*arguments: str, **options):
    return CliRunner().invoke(main, [*arguments, "--quiet"], **options)


def test_the_same_rows_have_the_same_scores_in_every_format(here):
    outputs = {}
    for name in NAMES:
        write_rows(here / name, ROWS, ["id", "source", "candidate"])
        quoting = ["--quoting", dialect_of(name).quoting] if "sv" in name else []
        result = command("score", name, "-o", f"out_{name}", "--draws", "1", "--profile", "--tokens", *quoting)
        assert result.exit_code == 3, result.output  # one candidate is empty
        outputs[name] = read_rows(here / f"out_{name}")
    expected = outputs["rows.jsonl"]
    assert [row["status"] for row in expected] == ["ok"] * 4 + ["empty_candidate", "ok"]
    for name, rows in outputs.items():
        for row, reference in zip(rows, expected, strict=True):
            assert [row[key] for key in ("id", "source", "candidate")] == [
                reference[key] for key in ("id", "source", "candidate")
            ]
            if "jsonl" in name:
                assert row == reference
            elif "parquet" in name:
                assert (row["score"], row["tokens"], row["status"]) == (
                    reference["score"],
                    reference["tokens"],
                    reference["status"],
                )
                assert dict(row["profile"] or []) == (reference["profile"] or {})
                spans = [list(span.values()) for span in row["token_scores"] or []]
                assert spans == (reference["token_scores"] or [])
            else:
                values = {key: json.loads(row[key] or "null") for key in ("score", "tokens", "profile", "token_scores")}
                assert values == {key: reference[key] for key in values}


def test_standard_streams_have_the_format_of_the_options(here):
    line = "candidate\tsource\nIt rained.\tIt rained all day.\n"
    result = command("score", "-", "-o", "-", "--draws", "1", "--format", "tsv", input=line)
    assert result.exit_code == 0
    header, row = (line.split("\t") for line in result.stdout.splitlines())
    assert header == ["candidate", "source", "score", "stderr", "tokens", "draws", "status", "message"]
    assert row[6] == "ok"
    result = command("score", "-", "-o", "-", "--draws", "1", "--format", "tsv", "--output-format", "jsonl", input=line)
    assert json.loads(result.stdout)["score"] == float(row[2])
    result = command("score", "-", "-o", "-", "--format", "parquet", input=line)
    assert result.exit_code == 2 and "cannot be read from standard input" in result.stderr


def test_a_null_is_missing_and_a_number_is_not_text(here):
    table = pyarrow.table({"source": ["s", "s", "s"], "candidate": ["", None, "c"], "n": [1, 2, 3]})
    parquet.write_table(table, "in.parquet")
    command("score", "in.parquet", "-o", "out.parquet", "--draws", "1")
    assert [row["status"] for row in read_rows(Path("out.parquet"))] == ["empty_candidate", "missing", "ok"]
    command("score", "in.parquet", "-o", "out.csv", "--draws", "1", "--candidate-column", "n")
    assert {row["status"] for row in read_rows(Path("out.csv"))} == {"invalid_text"}


def test_bounds_read_and_write_the_same_formats(monkeypatch, tmp_path):
    loaded = LikelihoodBounds("mini", block_size=4)
    monkeypatch.setattr(bound_module, "LikelihoodBounds", lambda model, **options: loaded)
    monkeypatch.chdir(tmp_path)
    write_rows(Path("in.csv"), [{"text": "It rained."}, {"text": ""}], ["text"])
    arguments = ["--block-size", "4", "--orders", "4", "--surrogate-orders", "4", "--comparators"]
    for name in ("out.jsonl", "out.parquet", "out.csv"):
        result = command("bound", "in.csv", "-o", name, *arguments)
        assert result.exit_code == 3, result.output
    lines, columns, text = (read_rows(Path(name)) for name in ("out.jsonl", "out.parquet", "out.csv"))
    for row, other, delimited in zip(lines, columns, text, strict=True):
        assert dict(other.pop("comparators")) == row.pop("comparators")
        other["message"] = other["message"] or ""
        assert other == {"message": "", **row}
        assert json.loads(delimited["interval"]) == row["interval"]
