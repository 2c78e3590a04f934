"""`--cache`: the same bytes as without it, from fewer rows scored."""

from __future__ import annotations

import json
import re
import sqlite3
from pathlib import Path

import pytest

from tests.cli.test_workers import write_rows


@pytest.fixture
def score(score_here):
    """Run `diffscore score` where in.jsonl has 12 rows, and two that cannot be scored."""
    write_rows(Path("in.jsonl"), 0, 12)
    return score_here


def hits(result) -> tuple[int, int]:
    found = re.search(r"from the cache\W+(\d+) of (\d+) rows", result.output)
    assert found, result.output
    return int(found[1]), int(found[2])


def texts(path: str) -> list[tuple[str, str]]:
    """Source and candidate of the rows that can be scored."""
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()[:-2]]
    return [(row["source"], row["candidate"]) for row in rows]


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--tokens", "--profile"],
        ["--direction", "pmi"],
        ["--direction", "bidirectional", "--tokens"],
        ["--target-stderr", "0.2", "--max-draws", "8"],
        ["--item-column", "source"],
        ["--attention", "corrected"],
    ],
    ids=" ".join,
)
def test_the_same_bytes_as_without(score, options):
    options = ["in.jsonl", "--draws", "2", *options]
    assert score("-o", "without.jsonl", *options).exit_code == 3
    cold = score("-o", "cold.jsonl", *options, "--cache", "kept")
    warm = score("-o", "warm.jsonl", *options, "--cache", "kept")
    assert cold.exit_code == warm.exit_code == 3
    # Two of the 14 rows cannot be scored; their statuses are found anew.
    assert hits(cold) == (0, 14) and hits(warm) == (12, 14)
    for name in ("cold", "warm"):
        assert Path(f"{name}.jsonl").read_bytes() == Path("without.jsonl").read_bytes()


def test_references_and_truncated_sources_come_back_whole(score):
    rows = [
        {"references": ["A dog ran.", "It rained all day.", ""], "candidate": "A dog was running."},
        {"references": ["One."], "candidate": "Two."},
        {"references": ["word " * 3000], "candidate": "A word."},
    ]
    Path("in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["in.jsonl", "--draws", "2", "--references-column", "references", "--overlength", "truncate-source"]
    score("-o", "without.jsonl", *options)
    cold = score("-o", "cold.jsonl", *options, "--cache", "kept")
    warm = score("-o", "warm.jsonl", *options, "--cache", "kept")
    assert hits(cold) == (0, 3) and hits(warm) == (3, 3)
    statuses = [json.loads(line)["status"] for line in Path("warm.jsonl").read_text().splitlines()]
    assert set(statuses) == {"ok", "skipped_reference", "truncated_source"}
    assert Path("warm.jsonl").read_bytes() == Path("cold.jsonl").read_bytes() == Path("without.jsonl").read_bytes()


def test_only_new_rows_are_scored_and_every_option_counts(score):
    assert hits(score("in.jsonl", "-o", "a.jsonl", "--draws", "2", "--cache", "kept")) == (0, 14)
    write_rows(Path("more.jsonl"), 0, 30)
    more = score("more.jsonl", "-o", "b.jsonl", "--draws", "2", "--cache", "kept")
    known, rows = set(texts("in.jsonl")), texts("more.jsonl")
    assert hits(more) == (sum(row in known for row in rows), 32) and not known.issuperset(rows)
    score("more.jsonl", "-o", "without.jsonl", "--draws", "2")
    assert Path("b.jsonl").read_bytes() == Path("without.jsonl").read_bytes()
    for number, other in enumerate((["--seed", "1"], ["--draws", "3"], ["--tokens"], ["--direction", "marginal"])):
        options = ["--draws", "2"] if "--draws" not in other else []
        result = score("in.jsonl", "-o", f"{number}.jsonl", *options, *other, "--cache", "kept")
        assert hits(result)[0] == 0, other


def test_with_resume_workers_and_shards(score):
    Path("night").mkdir()
    write_rows(Path("night") / "a.jsonl", 0, 12)
    write_rows(Path("night") / "b.jsonl", 6, 12)
    assert score("night", "-o", "plain", "--draws", "2").exit_code == 3
    first = score("night", "-o", "first", "--draws", "2", "--cache", "kept", "--workers", "2")
    assert first.exit_code == 3, first.output
    again = score("night", "-o", "again", "--draws", "2", "--cache", "kept")
    assert hits(again) == (24, 28)
    (Path("again") / "b.jsonl").unlink()
    resumed = score("night", "-o", "again", "--draws", "2", "--cache", "kept", "--resume")
    assert hits(resumed) == (12, 14)
    for folder in ("first", "again"):
        for name in ("a.jsonl", "b.jsonl"):
            assert (Path(folder) / name).read_bytes() == (Path("plain") / name).read_bytes()


def test_a_cache_that_cannot_be_used_ends_the_run_before_it_scores(score):
    for path, said in (("in.jsonl", "another file of the run"), ("none/kept", "no such folder")):
        result = score("in.jsonl", "-o", "out.jsonl", "--cache", path)
        assert result.exit_code == 2 and said in result.output
    Path("text").write_text("no scores")
    result = score("in.jsonl", "-o", "out.jsonl", "--cache", "text")
    assert result.exit_code == 2 and "is not a file of scores" in result.output
    assert sorted(path.name for path in Path().iterdir()) == ["in.jsonl", "text"]


def test_texts_are_not_stored(score):
    score("in.jsonl", "-o", "out.jsonl", "--draws", "2", "--tokens", "--cache", "kept")
    words = {word for line in Path("in.jsonl").read_text().splitlines() for word in re.findall(r"[a-z]{8,}", line)}
    content = Path("kept").read_bytes()
    assert words and not any(word.encode() in content for word in words)
    with sqlite3.connect("kept") as file:
        assert file.execute("SELECT count(*) FROM rows").fetchone() == (len(set(texts("in.jsonl"))),)
