"""`diffscore compare`, run as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from diffscore_fast.cli import compare as compare_module
from diffscore_fast.cli.main import main
from diffscore_fast.scoring.compare import compare

SOURCES = ["The cat sat on the mat.", "It rained all day.", "Birds sing in spring."]
A = ["A cat sat on a mat.", "It rained.", "Birds sing."]
B = ["It snowed.", "It rained.", "Nothing sings."]
FEW = ("--draws", "1", "--levels", "3")


@pytest.fixture
def run(mini, monkeypatch, tmp_path):
    """Run `diffscore compare` in this process, with the model that is already loaded."""
    monkeypatch.setattr(compare_module, "DiffScorer", lambda model, **options: mini)
    monkeypatch.chdir(tmp_path)

    def invoke(*arguments: str, **files):
        for name, rows in files.items():
            lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
            Path(f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines))
        return CliRunner().invoke(main, ["compare", *arguments, *FEW])

    return invoke


def rows(candidates, ids=(1, 2, 3)):
    return [
        {"id": name, "source": source, "candidate": candidate}
        for name, source, candidate in zip(ids, SOURCES, candidates, strict=True)
    ]


def test_two_files_two_columns_and_python_give_one_result(run, mini):
    options = dict(draws=1, levels=3)
    expected = compare(*(mini.score(SOURCES, texts, items=SOURCES, **options) for texts in (A, B))).to_dict()
    files = run("a.jsonl", "b.jsonl", "--json", a=rows(A), b=rows(B))
    both = [{"source": source, "one": one, "two": two} for source, one, two in zip(SOURCES, A, B, strict=True)]
    columns = run("both.jsonl", "--candidate-columns", "one", "two", "--json", both=both)
    for result in (files, columns):
        assert result.exit_code == 0, result.output
        found = json.loads(result.stdout)
        for name, value in expected.items():
            assert found[name] == pytest.approx(value, abs=1e-5), name
        assert found["ties"] == 1 and found["signature"]["draws"] == 1
        assert [item["row"] for item in found["most_different"]][2] == "line 2"  # the same text: no difference


def test_files_are_joined_by_id(run):
    first = run("a.jsonl", "b.jsonl", "--json", a=rows(A), b=rows(B))
    shuffled = [*rows(B, ("1", "2", "3"))[::-1], {"id": 9, "source": "s", "candidate": "c"}, {"source": "s"}]
    result = run("a.jsonl", "b.jsonl", "--json", "--id-column", "id", a=[*rows(A), "no json"], b=shuffled)
    assert result.exit_code == 0, result.output
    found, before = json.loads(result.stdout), json.loads(first.stdout)
    assert found["difference"] == pytest.approx(before["difference"], abs=1e-5)
    assert found["excluded"] == {"A: no id": 1, "B: no id": 1, "only in B": 1}
    assert found["most_different"][0]["row"] == before["most_different"][0]["row"].removeprefix("line ")


def test_the_table_says_what_was_left_out_and_what_differs(run):
    result = run("a.jsonl", "b.jsonl", a=rows([A[0], None, A[2]]), b=rows([B[0], B[1], ""]))
    assert result.exit_code == 3
    for expected in (
        "rows compared",
        "left out, A: missing",
        "left out, B: empty_candidate",
        "95% interval",
        "p-value",
        "A cat sat on a mat.",
        "It snowed.",
        "signature version:",
    ):
        assert expected in result.output
    result = run("a.jsonl", "b.jsonl", a=["{", json.dumps(rows(A)[1])], b=["{", json.dumps(rows(B)[1])])
    assert result.exit_code == 3 and "left out, A: invalid_record" in result.output


def test_options_of_score_are_options_of_compare(run, mini):
    data = [
        {"refs": [source, "It rained."], "candidate": candidate} for source, candidate in zip(SOURCES, A, strict=True)
    ]
    other = [{**row, "candidate": candidate} for row, candidate in zip(data, B, strict=True)]
    result = run(
        "a.jsonl",
        "b.jsonl",
        "--json",
        "--references-column",
        "refs",
        "--aggregate",
        "mean",
        "--direction",
        "reverse",
        "--template",
        "simplification",
        a=data,
        b=other,
    )
    assert result.exit_code == 0, result.output
    signature = json.loads(result.stdout)["signature"]
    assert (signature["aggregate"], signature["template"], signature["direction"]) == (
        "mean",
        "simplification",
        "reverse",
    )


@pytest.mark.parametrize(
    ("arguments", "files", "message"),
    [
        (["a.jsonl"], {"a": rows(A)}, "give two files, or one file and --candidate-columns"),
        (["a.jsonl", "a.jsonl", "--candidate-columns", "a", "b"], {"a": rows(A)}, "give two files, or one file"),
        (["a.jsonl", "--candidate-columns", "candidate", "x"], {"a": rows(A)}, "no field 'x'; it has: id, source"),
        (["a.jsonl", "b.jsonl"], {"a": rows(A), "b": rows(B)[:2]}, "a.jsonl has 3 rows, b.jsonl has 2; join them"),
        (["a.jsonl", "b.jsonl"], {"a": rows(A), "b": rows(B)[::-1]}, "line 1 of a.jsonl and its partner"),
        (["a.jsonl", "b.jsonl", "--id-column", "id"], {"a": rows(A), "b": rows(B, (1, 2, 1))}, "lines 1 and 3 have"),
        (["a.jsonl", "b.jsonl", "--id-column", "id"], {"a": rows(A), "b": rows(B, (4, 5, 6))}, "no rows to compare"),
        (["a.jsonl", "b.jsonl"], {"a": rows(A), "b": ["csv,text"]}, "b.jsonl has no row that can be read: line 1"),
        (["a.jsonl", "b.jsonl", "--confidence", "1.5"], {"a": rows(A), "b": rows(B)}, "confidence must lie"),
        (["a.jsonl", "none.jsonl"], {"a": rows(A)}, "cannot read none.jsonl"),
    ],
)
def test_files_that_cannot_be_compared_are_refused(run, arguments, files, message):
    result = run(*arguments, **files)
    assert result.exit_code == 2 and message in result.output, result.output


def test_delimited_files_are_read_as_the_options_say(run):
    lines = [f"{source};{candidate}" for source, candidate in zip(SOURCES, A, strict=True)]
    for name in "ab":
        Path(f"{name}.csv").write_text("\n".join(["source;candidate;id", *lines, ""]))
    result = run("a.csv", "b.csv", "--delimiter", ";")
    assert result.exit_code == 0, result.output
    assert "a.csv: rows with fewer fields: 3, the missing ones are empty" in result.stderr
    result = run("a.csv", "b.csv")
    assert result.exit_code == 2 and "or give --delimiter ';'" in result.stderr
    result = run("a.jsonl", "b.jsonl", "--quoting", "none", a=rows(A), b=rows(B))
    assert result.exit_code == 2 and "--quoting is for CSV and TSV" in result.stderr
