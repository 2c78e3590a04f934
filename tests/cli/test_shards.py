"""`diffscore score` over several files into a folder of shards."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pyarrow
import pytest
from click.testing import CliRunner
from pyarrow import fs, parquet

from diffscore_fast.cli import score as score_module
from diffscore_fast.cli.main import main
from diffscore_fast.io import remote
from diffscore_fast.scoring import scorer as scorer_module

SOURCE = "The cat sat on the mat."
NAMES = ("a.jsonl", "b.csv", "c.parquet", "d.jsonl.gz")


def write(path: Path, first: int, count: int = 4) -> None:
    rows = [
        {"id": str(row), "source": SOURCE, "candidate": f"A cat sat {row} times."}
        for row in range(first, first + count)
    ]
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".csv":
        path.write_text("".join(",".join(row) + "\n" for row in [rows[0].keys(), *(row.values() for row in rows)]))
    else:
        content = "".join(json.dumps(row) + "\n" for row in rows).encode()
        if path.suffix == ".gz":
            import gzip

            content = gzip.compress(content)
        path.write_bytes(content)


@pytest.fixture
def folder(mini, monkeypatch, tmp_path):
    """A working folder with four files in `in`, and the model that is already loaded."""
    monkeypatch.setattr(score_module, "DiffScorer", lambda model, **options: mini)
    monkeypatch.setattr(scorer_module, "TOKENS_CHUNK", 1)  # every row a batch of its own
    monkeypatch.chdir(tmp_path)
    Path("in").mkdir()
    for place, name in enumerate(NAMES):
        write(Path("in") / name, 4 * place)
    return tmp_path


def score(*arguments: str):
    return CliRunner().invoke(main, ["score", *arguments, "--draws", "1"])


def summary_of(result) -> dict[str, str]:
    cells = (line.split("│") for line in result.output.splitlines() if line.count("│") == 3)
    return {name.strip(): value.strip() for _, name, value, _ in cells}


def contents(folder: str) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file() and "_diffscore" not in path.parts
    }


def test_every_file_has_a_shard_with_the_bytes_of_a_run_of_its_own(folder):
    result = score("in", "-o", "out")
    assert result.exit_code == 0, result.output
    assert summary_of(result)["rows ok"] == "16" and summary_of(result)["shards"] == "4"
    assert sorted(contents("out")) == sorted(NAMES)
    for name in NAMES:
        Path("alone").mkdir(exist_ok=True)
        CliRunner().invoke(main, ["score", f"in/{name}", "-o", f"alone/{name}", "--draws", "1"])
        assert Path("alone", name).read_bytes() == Path(f"out/{name}").read_bytes()
    about = json.loads(Path("out/_diffscore/signature.json").read_text())
    assert about["rows"] == {"ok": 16} and about["kind"] == "mean log-prob"
    assert {path.name for path in Path("out").iterdir()} == {*NAMES, "_diffscore"}


def test_folders_patterns_and_lists_name_the_same_files(folder):
    for place, inputs in enumerate(
        (["in/*"], [f"in/{name}" for name in NAMES], ["in/[ab].*", "in/c.parquet", "in/d*"])
    ):
        assert score(*inputs, "-o", f"out{place}").exit_code == 0
        assert contents(f"out{place}") == contents("out0")
    assert score("in/a.jsonl", "-o", "one/").exit_code == 0  # a slash means a folder
    assert list(contents("one")) == ["a.jsonl"]
    Path("there").mkdir()
    assert score("in/a.jsonl", "-o", "there").exit_code == 0
    assert contents("there") == contents("one")


def test_other_files_of_a_folder_are_passed_over_and_named(folder):
    for name in ("README", "_SUCCESS", ".hidden.jsonl", "a.jsonl.signature.json"):
        Path("in", name).write_text("{}\n")
    Path("in/sub").mkdir()
    result = score("in", "-o", "out")
    assert result.exit_code == 0 and sorted(contents("out")) == sorted(NAMES)
    assert "files passed over, whose names say no format: 1 (in/README)" in result.stderr
    Path("none").mkdir()
    Path("none/README").write_text("")
    for inputs, message in (("none", "none has no file of rows; it has none/README"), ("x*", "x* has no file of rows")):
        result = score(inputs, "-o", "out2")
        assert result.exit_code == 2 and message in result.output


def test_the_output_format_gives_the_shards_their_names(folder):
    assert score("in", "-o", "out", "--output-format", "jsonl").exit_code == 0
    assert sorted(contents("out")) == ["a.jsonl", "b.jsonl", "c.jsonl", "d.jsonl.gz"]
    rows = [json.loads(line) for line in Path("out/b.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == ["4", "5", "6", "7"]


def test_what_would_leave_the_folder_or_mix_shards_is_refused(folder):
    Path("other").mkdir()
    write(Path("other/a.jsonl"), 40)
    Path("outside.jsonl").write_text("precious\n")
    Path("out").mkdir()

    def refused(message: str, *arguments: str) -> None:
        result = score(*arguments)
        assert result.exit_code == 2 and message in result.output, result.output

    refused("would both be the shard a.jsonl", "in", "other/a.jsonl", "-o", "out")
    refused("would both be the shard a.jsonl", "in/a.jsonl", "in/a.jsonl", "-o", "out")
    write(Path("in/a.csv"), 0)
    refused("would both be the shard a.jsonl", "in", "-o", "out", "--output-format", "jsonl")
    Path("in/a.csv").unlink()
    refused("lies in the output folder", "in", "-o", "in")
    refused("lies in the output folder", "in", "-o", ".")
    refused("is a file", "in", "-o", "outside.jsonl")
    refused("cannot be one of several", "in", "-", "-o", "out")
    refused("local folder", "in", "-o", "s3://bucket/out")
    refused("http:// is not read", "http://host/a.jsonl", "-o", "out")
    refused("chained", "simplecache::s3://b/a.jsonl", "-o", "out")
    refused("lies in the output folder", "in", "-o", "out", "--heatmap", "out/page.html")
    for name in ("b.csv", "b.csv.partial", "b.csv.partial.state"):
        os.symlink(folder / "outside.jsonl", Path("out", name))
        refused("is a link", "in", "-o", "out")
        refused("is a link", "in", "-o", "out", "--resume")
        Path("out", name).unlink()
    os.symlink(folder / "other", "out/_diffscore")
    refused("is a link", "in", "-o", "out")
    assert Path("outside.jsonl").read_text() == "precious\n" and list(Path("other").iterdir()) == [
        Path("other/a.jsonl")
    ]


def test_a_fault_in_any_file_is_found_before_the_model_loads(folder, monkeypatch):
    def never(model, **options):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(score_module, "DiffScorer", never)
    Path("in/z.jsonl").write_text('{"text": "x"}\n')
    result = score("in", "-o", "out")
    assert result.exit_code == 2 and "no field 'source'" in result.output, result.output
    assert contents("out") == {}


def stop_after(monkeypatch, mini, batches: int):
    """Interrupt the run at a row."""
    score_batch, done = mini._score_batch, []

    def stopped(*arguments):
        if len(done) == batches:
            raise KeyboardInterrupt
        done.append(1)
        return score_batch(*arguments)

    monkeypatch.setattr(mini, "_score_batch", stopped)


@pytest.mark.parametrize("batches", [0, 2, 4, 10])
def test_a_resumed_run_ends_with_the_bytes_and_the_summary_of_one_that_was_not_stopped(
    folder, mini, monkeypatch, batches
):
    whole = score("in", "-o", "whole")
    with monkeypatch.context() as patch:
        stop_after(patch, mini, batches)
        assert score("in", "-o", "out").exit_code == 130
    finished = batches // 4
    assert sorted(path.name for path in Path("out").glob("?.*") if "partial" not in path.name) == list(NAMES[:finished])
    if batches:
        refused = score("in", "-o", "out")
        assert refused.exit_code == 2 and "--resume" in refused.output
    rows_before = contents("out")
    result = score("in", "-o", "out", "--resume")
    assert result.exit_code == 0, result.output
    assert contents("out") == contents("whole")
    assert all(contents("out")[name] == rows_before[name] for name in NAMES[:finished])
    for line in ("rows ok", "mean score", "median score", "tokens scored"):
        assert summary_of(result)[line] == summary_of(whole)[line]
    assert Path("out/_diffscore/signature.json").read_text() == Path("whole/_diffscore/signature.json").read_text()


def test_nothing_left_to_do_is_success(folder):
    with Path("in/a.jsonl").open("a") as file:
        file.write("broken\n")
    assert score("in", "-o", "out").exit_code == 3
    before = {path: path.stat().st_mtime_ns for path in Path("out").glob("?.*")}
    result = score("in", "-o", "out", "--resume")
    assert result.exit_code == 0 and "of them finished before" in result.output
    assert "rows invalid_record" in result.output
    assert {path: path.stat().st_mtime_ns for path in Path("out").glob("?.*")} == before


def test_a_folder_is_resumed_by_the_same_command_over_the_same_files_only(folder, mini, monkeypatch):
    with monkeypatch.context() as patch:
        stop_after(patch, mini, 6)
        assert score("in", "-o", "out").exit_code == 130
    for other in (["--seed", "1"], ["--tokens"], ["--output-prefix", "x_"]):
        refused = score("in", "-o", "out", "--resume", *other)
        assert refused.exit_code == 2 and "made by other options" in refused.output, refused.output
    refused = score("in", "-o", "out", "--resume", "--show", "1")
    assert refused.exit_code == 2 and "need the first rows" in refused.output
    kept = Path("in/a.jsonl").read_bytes()
    Path("in/a.jsonl").write_bytes(kept + kept)
    refused = score("in", "-o", "out", "--resume")
    assert refused.exit_code == 2 and "has changed since its shard was finished" in refused.output
    Path("out/a.jsonl").unlink()  # moved away: it is scored anew
    assert score("in", "-o", "out", "--resume").exit_code == 0
    assert len(Path("out/a.jsonl").read_text().splitlines()) == 8
    Path("out/_diffscore/shards/a.jsonl.json").write_text("{}")
    refused = score("in", "-o", "out", "--resume")
    assert refused.exit_code == 2 and "gone or damaged" in refused.output
    Path("out/_diffscore/shards/a.jsonl.json").unlink()
    refused = score("in", "-o", "out", "--resume")
    assert refused.exit_code == 2 and "was not written by this command" in refused.output


def test_a_run_killed_between_the_record_and_the_name_is_resumed(folder, mini, monkeypatch):
    """The record is written first: a shard with a name is finished, one without is resumed from its rows."""
    score("in", "-o", "whole")

    def killed(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("diffscore_fast.io.jsonl.JsonlWriter.finish", killed)
        assert score("in", "-o", "out").exit_code == 130
    assert Path("out/_diffscore/shards/a.jsonl.json").exists() and not Path("out/a.jsonl").exists()
    assert score("in", "-o", "out", "--resume").exit_code == 0
    assert contents("out") == contents("whole")


def test_remote_files_are_scored_and_resumed_like_local_ones(folder, mini, monkeypatch):
    system = fs.SubTreeFileSystem(str(folder), fs.LocalFileSystem())
    monkeypatch.setattr(remote, "file_system", lambda url: (system, url.partition("://")[2]))
    assert score("in", "-o", "whole").exit_code == 0
    for place, inputs in enumerate((["s3://in"], ["gs://in/*"], [f"abfs://in/{name}" for name in NAMES])):
        if place == 0:
            with monkeypatch.context() as patch:
                stop_after(patch, mini, 6)
                assert score(*inputs, "-o", f"out{place}").exit_code == 130
        assert score(*inputs, "-o", f"out{place}", "--resume").exit_code == 0
        assert contents(f"out{place}") == contents("whole")
    assert score("hdfs://in/a.jsonl", "-o", "alone.jsonl").exit_code == 0
    assert Path("alone.jsonl").read_bytes() == contents("whole")["a.jsonl"]
