"""`diffscore score` and `diffscore info`, run as a user runs them."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from pyarrow import parquet

from diffscore_fast.cli import score as score_module
from diffscore_fast.cli.main import main
from diffscore_fast.errors import CheckpointError
from diffscore_fast.scoring import scorer as scorer_module

ROWS = [
    {"id": 7, "source": "The cat sat on the mat.", "candidate": "A cat sat."},
    {"id": 8, "source": "The cat sat on the mat.", "candidate": "It rained.", "extra": {"x": [1, None]}},
    {"id": 9, "source": "It rained all day.", "candidate": "It rained."},
]


@pytest.fixture
def run(mini, monkeypatch, tmp_path):
    """Run `diffscore score` in this process, with the model that is already loaded."""
    monkeypatch.setattr(score_module, "DiffScorer", lambda model, **options: mini)
    monkeypatch.chdir(tmp_path)

    def invoke(*arguments: str, rows=ROWS, content: bytes | None = None, name: str = "in.jsonl"):
        lines = "".join(json.dumps(row) + "\n" for row in rows).encode() if content is None else content
        Path(name).write_bytes(lines)
        result = CliRunner().invoke(main, ["score", name, "-o", "out.jsonl", "--draws", "1", *arguments])
        written = Path("out.jsonl").read_text().splitlines() if Path("out.jsonl").exists() else None
        return result, None if written is None else [json.loads(line) for line in written]

    return invoke


def test_rows_come_back_in_order_with_scores_and_all_their_fields(run, mini):
    result, rows = run()
    assert result.exit_code == 0, result.output
    expected = mini.score([row["source"] for row in ROWS], [row["candidate"] for row in ROWS], draws=1)
    for row, before, score in zip(rows, ROWS, expected.scores, strict=True):
        assert {key: row[key] for key in before} == before
        assert row["status"] == "ok" and row["stderr"] is None and row["tokens"] > 0
        assert row["score"] == pytest.approx(score, abs=1e-5)
    assert "rows ok" in result.output and "mean score" in result.output
    assert "signature version:" in result.output and "direction:conditional" in result.output


def test_profile_tokens_and_prefix_of_the_added_names(run):
    result, rows = run("--profile", "--tokens", "--output-prefix", "d_", "--direction", "pmi", "--draws", "10")
    assert result.exit_code == 0, result.output
    assert list(rows[0]["d_profile"]) == [f"0.{k}" for k in range(1, 10)]
    assert [item[:2] for item in rows[0]["d_token_scores"]] == [[0, 1], [2, 5], [6, 9], [9, 10]]
    assert rows[0]["d_stderr"] > 0 and "score" not in rows[0]


def test_draws_of_a_row_are_reported(run):
    short = {"source": "It rained all day.", "candidate": "Rain."}  # 2 tokens, 3 masks
    result, rows = run("--draws", "8", "--attention", "corrected", "--full-draws", "4", rows=[ROWS[0], short])
    assert result.exit_code == 0, result.output
    assert [(row["draws"], row["full_draws"], row["stderr"] > 0) for row in rows] == [(8, 4, True), (3, 0, False)]
    assert "coupling:balanced" in result.output and "full_draws:4" in result.output
    result, rows = run("--draws", "4", "--target-stderr", "0.3", "--max-draws", "4")
    assert result.exit_code == 0 and rows[0]["draws"] == 4 and "target_stderr:0.3|max_draws:4" in result.output
    result, _ = run("--attention", "corrected", "--full-draws", "few")
    assert result.exit_code == 2 and "neither a whole number nor auto" in result.output


BAD = [
    (b'{"source": "s", "candidate": ""}', "empty_candidate", "no tokens"),
    (b'{"source": "", "candidate": "c"}', "empty_source", "no tokens"),
    (b'{"source": "s"}', "missing", "candidate is missing"),
    (b'{"source": "s", "candidate": null}', "missing", "candidate is missing"),
    (b'{"source": "s", "candidate": 5}', "invalid_text", "is a number, not text"),
    (b'{"source": ["s"], "candidate": "c"}', "invalid_text", "is a list, not text"),
    (b'{"source": "s", "candidate": "\\ud800"}', "invalid_text", "lone surrogate"),
    (b'{"source": "s", "candidate": "c"', "invalid_record", "line 2 is not JSON"),
    (b'{"source": "s", "source": "t", "candidate": "c"}', "invalid_record", "key 'source' twice"),
    (b'{"source": "s", "candidate": "\xff"}', "invalid_record", "not UTF-8"),
]


@pytest.mark.parametrize(("line", "status", "message"), BAD, ids=lambda item: str(item)[:40])
def test_a_bad_row_gets_a_status_and_its_neighbours_their_scores(run, line, status, message):
    good = json.dumps(ROWS[0]).encode()
    _, alone = run(content=good)
    result, rows = run(content=good + b"\n" + line + b"\n" + good)
    assert result.exit_code == 3
    assert [row["status"] for row in rows] == ["ok", status, "ok"]
    assert rows[1]["score"] is None and rows[1]["tokens"] == 0 and message in rows[1]["message"]
    assert rows[0]["score"] == pytest.approx(alone[0]["score"], abs=1e-5)
    if status == "invalid_record":
        assert rows[1]["line"] == 2 and rows[1]["raw"] == line.decode("utf-8", "backslashreplace")
    assert f"rows {status}" in result.output


def test_a_file_of_one_bad_row_is_a_file_of_failed_rows(run):
    for name, line in (
        ("in.jsonl", b"{"),
        ("in.csv", b'source,candidate\n"a"b,c\n'),
        ("in.tsv", b"source\tcandidate\n\xff"),
    ):
        result, rows = run(content=line, name=name)
        assert result.exit_code == 3 and [row["status"] for row in rows] == ["invalid_record"]
        assert f"{name}: the only row fails: line " in result.stderr


def test_remarks_about_rows_are_in_the_summary(run):
    result, rows = run(content=b'source\tcandidate\tid\nIt rained.\tIt "rained.\n', name="in.tsv")
    assert result.exit_code == 0 and rows[0]["candidate"] == 'It "rained.' and rows[0]["id"] == ""
    assert re.search("rows with fewer fields *│ 1, the missing ones are empty", result.output)
    row = {"source": "It rained.\nAll day.", "candidate": "Rain."}
    result, rows = run("-o", "out.tsv", rows=[row])
    assert result.exit_code == 0 and "to be read with --quoting escaped" in result.output
    assert Path("out.tsv").read_text().splitlines()[1].startswith(r"It rained.\nAll day." + "\tRain.\t-")


def test_rows_that_are_too_long_fail_are_skipped_or_cut(run):
    rows = [*ROWS, {"source": "word " * 2100, "candidate": "A word."}]
    result, out = run(rows=rows)
    assert result.exit_code == 3 and out[3]["status"] == "too_long" and out[3]["score"] is None
    result, out = run("--overlength", "skip", rows=rows)
    assert result.exit_code == 0 and out[3]["status"] == "too_long"


def test_splitting_the_file_changes_no_score(run):
    _, together = run()
    apart = [run(rows=[row])[1][0] for row in ROWS]
    for row, alone in zip(together, apart, strict=True):
        assert row["score"] == pytest.approx(alone["score"], abs=1e-5)


def test_a_wrong_column_name_lists_the_columns_of_the_file(run):
    result, rows = run("--candidate-column", "hypothesis")
    assert result.exit_code == 2 and rows is None
    assert "no field 'hypothesis'; it has: id, source, candidate, extra" in result.output
    assert "--candidate-column" in result.output


def test_a_field_that_would_be_overwritten_is_refused(run):
    result, rows = run(rows=[{**ROWS[0], "score": 1}])
    assert result.exit_code == 2 and rows is None and "already has the field score" in result.output
    late = [ROWS[0]] * 120 + [{**ROWS[0], "score": 1}]
    result, rows = run(rows=late)
    assert result.exit_code == 3 and len(rows) == 121 and rows[120]["status"] == "invalid_record"
    assert rows[120]["score"] is None and json.loads(rows[120]["raw"])["score"] == 1


def test_unusable_paths_are_found_before_the_model_loads(run, monkeypatch):
    def never(model, **options):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(score_module, "DiffScorer", never)
    for name, text in (("in.jsonl", json.dumps(ROWS[0])), ("out.jsonl.partial", json.dumps(ROWS[0]))):
        Path(name).write_text(text)
    before = {path.name: path.read_text() for path in Path().iterdir()}
    for arguments, message in [
        (["in.jsonl", "-o", "no/folder/out.jsonl"], "cannot write"),
        (["none.jsonl", "-o", "out.jsonl"], "cannot read none.jsonl: No such file"),
        (["in.jsonl", "-o", "in.jsonl"], "would write over the input"),
        (["out.jsonl.partial", "-o", "out.jsonl"], "would write over the input"),
        (["in.jsonl", "-o", "out.jsonl", "--delimiter", ";"], "--delimiter is for CSV and TSV"),
        (["in.jsonl", "-o", "out.csv", "--delimiter", "ab"], "give one ASCII character"),
        (["in.jsonl", "-o", "out.jsonl", "--draws", "0"], "draws must be at least 1"),
        (["in.jsonl", "-o", "out.jsonl", "--estimator", "weighted", "--level-weights", "a,b"], "comma-separated"),
        (["in.jsonl", "-o", "out.jsonl", "--estimator", "weighted"], "needs them"),
    ]:
        result = CliRunner().invoke(main, ["score", *arguments])
        assert result.exit_code == 2 and message in result.output, result.output
    assert {path.name: path.read_text() for path in Path().iterdir()} == before


def test_a_model_that_cannot_be_loaded_leaves_no_file(run, monkeypatch):
    def broken(model, **options):
        raise CheckpointError("no model 'x'")

    monkeypatch.setattr(score_module, "DiffScorer", broken)
    result, rows = run()
    assert result.exit_code == 2 and "no model" in result.output and rows is None
    assert not Path("out.jsonl.partial").exists()
    assert not Path("out.jsonl.partial.state").exists()


def test_empty_file_standard_streams_and_gzip(run):
    result, rows = run(content=b"\n \n")
    assert result.exit_code == 0 and rows == [] and "blank lines skipped" in result.output
    line = json.dumps(ROWS[0]).encode()
    result = CliRunner().invoke(main, ["score", "-", "-o", "-", "--draws", "1"], input=line)
    assert result.exit_code == 0
    assert json.loads(result.stdout)["status"] == "ok" and "signature" in result.stderr
    Path("in.jsonl.gz").write_bytes(gzip.compress(line))
    result = CliRunner().invoke(main, ["score", "in.jsonl.gz", "-o", "out.jsonl.gz", "--draws", "1", "--quiet"])
    assert result.exit_code == 0 and result.output == ""
    assert json.loads(gzip.decompress(Path("out.jsonl.gz").read_bytes()))["status"] == "ok"


def test_an_interrupted_run_keeps_the_rows_that_were_finished(run, mini, monkeypatch):
    monkeypatch.setattr(scorer_module, "TOKENS_CHUNK", 1)  # every row a batch of its own
    score_batch, done = mini._score_batch, []

    def stopped(*arguments):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(1)
        return score_batch(*arguments)

    monkeypatch.setattr(mini, "_score_batch", stopped)
    result, rows = run()
    assert result.exit_code == 130 and rows is None
    assert f"2 finished rows are in {Path('out.jsonl.partial').resolve()}" in result.output
    kept = [json.loads(line) for line in Path("out.jsonl.partial").read_text().splitlines()]
    assert [row["status"] for row in kept] == ["ok", "ok"]
    result, rows = run()
    assert result.exit_code == 2 and "continue with --resume, or move it away" in result.output and rows is None


@pytest.mark.parametrize("name", ["out.jsonl", "out.csv"])
def test_a_resumed_run_ends_with_the_bytes_of_one_that_was_not_stopped(run, mini, monkeypatch, name):
    monkeypatch.setattr(scorer_module, "TOKENS_CHUNK", 1)
    run(content=b"\n".join(json.dumps(row).encode() for row in ROWS))
    arguments = ["score", "in.jsonl", "-o", name, "--draws", "2"]
    invoke = CliRunner().invoke
    invoke(main, arguments)
    whole = Path(name).read_bytes()
    signature = json.loads(Path(f"{name}.signature.json").read_text())
    Path(name).unlink()
    score_batch, done = mini._score_batch, []

    def stopped(*arguments):
        done.append(1)
        if len(done) == 3:
            raise KeyboardInterrupt
        return score_batch(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(mini, "_score_batch", stopped)
        assert invoke(main, arguments).exit_code == 130
    partial = Path(f"{name}.partial")
    partial.write_bytes(partial.read_bytes() + b'{"source": "cut sho')  # what a killed run leaves
    for other in (["--seed", "1"], ["--tokens"], ["--output-format", "tsv"]):
        refused = invoke(main, [*arguments, "--resume", *other])
        assert refused.exit_code == 2 and "made by other options, or of other columns" in refused.output
    for option in (["--show", "1"], ["--heatmap", "page.html"]):
        refused = invoke(main, [*arguments, "--resume", *option])
        assert refused.exit_code == 2 and "need the first rows, which an earlier run has finished" in refused.output
    changed = Path("in.jsonl").read_bytes()
    Path("in.jsonl").write_bytes(changed.replace(b"cat", b"cow"))
    refused = invoke(main, [*arguments, "--resume"])
    assert refused.exit_code == 2 and "the input is not the one" in refused.output
    Path("in.jsonl").write_bytes(changed)
    result = invoke(main, [*arguments, "--resume"])
    assert "rows of the stopped run" in result.output, result.output
    assert Path(name).read_bytes() == whole
    assert json.loads(Path(f"{name}.signature.json").read_text()) == signature
    assert not partial.exists() and not Path(f"{partial}.state").exists()


def test_runs_that_cannot_be_resumed_are_refused(run):
    result, rows = run("--resume")  # nothing to resume: from the start
    assert result.exit_code == 0 and rows == run()[1]
    for name in ("out.jsonl.gz", "out.parquet", "-"):
        refused = CliRunner().invoke(main, ["score", "in.jsonl", "-o", name, "--resume"])
        assert refused.exit_code == 2 and "--resume needs an output in JSON Lines, CSV or TSV" in refused.output
    Path("new.jsonl.partial").write_text("rows of something else\n")
    refused = CliRunner().invoke(main, ["score", "in.jsonl", "-o", "new.jsonl", "--resume"])
    assert refused.exit_code == 2 and "is gone or damaged" in refused.output
    for damaged in (
        "[]",
        "null",
        "{",
        '{"rows": 1}',
        '{"rows": "1", "bytes": 0, "statuses": {}, "input": "", "identity": ""}',
        '{"rows": -1, "bytes": 0, "statuses": {}, "input": "", "identity": ""}',
    ):
        Path("new.jsonl.partial.state").write_text(damaged)
        refused = CliRunner().invoke(main, ["score", "in.jsonl", "-o", "new.jsonl", "--resume"])
        assert refused.exit_code == 2 and "is gone or damaged" in refused.output
    assert Path("new.jsonl.partial").read_text() == "rows of something else\n"


def test_a_profile_of_the_run_is_printed_and_written(run):
    result, _ = run("--profile-run", "run.json")
    assert result.exit_code == 0 and "time by stage" in result.stderr
    named = {event["name"] for event in json.loads(Path("run.json").read_text())["traceEvents"]}
    assert {"read", "tokenise", "plan", "prefix", "windows", "attention", "head", "reduce", "write"} <= named
    for taken in ("in.jsonl", "./out.jsonl"):
        result, _ = run("--profile-run", taken)
        assert result.exit_code == 2 and "would write over" in result.output
    result, _ = run("--profile-run", "no/folder/run.json")
    assert result.exit_code == 2 and "no such folder" in result.output


def test_a_memory_size_reaches_the_scorer(run, mini, monkeypatch):
    given = []

    def scorer(model, **options):
        given.append(options["memory"])
        return mini

    monkeypatch.setattr(score_module, "DiffScorer", scorer)
    assert run("--memory", "800M")[0].exit_code == 0 and given == [800 << 20]
    result, _ = run("--memory", "much")
    assert result.exit_code == 2 and "'much' is not understood" in result.output


def test_the_signature_lies_beside_the_output(run, mini):
    result, _ = run("--quiet", "--seed", "3")
    about = json.loads(Path("out.jsonl.signature.json").read_text())
    assert result.output == "" and about["rows"] == {"ok": 3} and about["kind"] == "mean log-prob"
    assert about["signature"]["seed"] == 3 and about["signature"]["weights"] == mini._identity["weights"]


def test_a_name_that_looks_like_markup_is_printed_as_it_is(run, mini, monkeypatch):
    monkeypatch.setattr(scorer_module, "TOKENS_CHUNK", 1)
    score_batch, done = mini._score_batch, []

    def stopped(*arguments):
        if done:
            raise OSError(28, "No space left on device")
        done.append(1)
        return score_batch(*arguments)

    monkeypatch.setattr(mini, "_score_batch", stopped)
    Path("[").mkdir()
    result, _ = run("-o", "[/b].jsonl")
    assert result.exit_code == 2 and "1 finished row is in" in result.output and "No space left" in result.output


def test_rows_are_shown_without_escape_sequences(run):
    rows = [{"source": "s", "candidate": "A\x1b]0;title\x07 cat."}, {"source": "s", "candidate": "\ud800"}]
    result, written = run("--show", "2", rows=rows)
    assert result.exit_code == 3 and [row["status"] for row in written] == ["ok", "invalid_text"]
    assert "\x1b" not in result.output and "\x07" not in result.output and "cat." in result.output


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        (["--alpha", "0.3"], "bidirectional"),
        (["--aggregate", "mean"], "--references-column"),
        (["--max-draws", "9"], "--target-stderr"),
        (["--tagger", "x"], "--mask-words"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(run, arguments, needed):
    result, rows = run(*arguments)
    assert result.exit_code == 2 and needed in result.output and rows is None


def test_info_names_versions_models_and_implementations():
    result = CliRunner().invoke(main, ["info"])
    assert result.exit_code == 0
    for expected in ("torch", "model mini", "masked_logprob on cpu", "prefix_attention on cpu", "float32"):
        assert expected in result.output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_keeps_the_finished_rows_like_an_interrupt(run, mini, monkeypatch, number):
    monkeypatch.setattr(scorer_module, "TOKENS_CHUNK", 1)
    score_batch, done = mini._score_batch, []

    def stopped(*arguments):
        done.append(1)
        if len(done) == 2:
            os.kill(os.getpid(), number)
        return score_batch(*arguments)

    monkeypatch.setattr(mini, "_score_batch", stopped)
    before = signal.signal(number, signal.SIG_DFL)  # nohup would have a hangup ignored
    try:
        result, rows = run("--output-format", "parquet")
    finally:
        signal.signal(number, before)
    assert result.exit_code == 128 + number and rows is None
    assert parquet.read_table("out.jsonl.partial").num_rows == 1
    assert "1 finished row is in" in result.output


def test_standard_output_by_its_other_names_is_not_replaced_by_a_file(tmp_path):
    (tmp_path / "in.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    command = f"{sys.executable} -m diffscore_fast.cli.main score in.jsonl --draws 1 --quiet -o"
    script = f"echo before > out.txt; {command} /dev/stdout >> out.txt; {command} /dev/fd/3 3>> out.txt"
    script += "; echo after >> out.txt"
    subprocess.run(["bash", "-c", script], cwd=tmp_path, check=True, capture_output=True)
    lines = (tmp_path / "out.txt").read_text().splitlines()
    assert (lines[0], lines[-1], len(lines)) == ("before", "after", 4)
    assert lines[1] == lines[2] and json.loads(lines[1])["status"] == "ok"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.txt"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--show", "-1"], "Invalid value for '--show'"),
        (["--show", "3", "--quiet"], "--show needs the summary"),
        (["--direction", "marginal", "--source-column", "x"], "--source-column needs a direction that reads sources"),
        (["--heatmap", "out.jsonl.signature.json"], "would write over another file of the run"),
        (["--heatmap", "out.jsonl.partial"], "would write over another file of the run"),
    ],
)
def test_invalid_options_are_refused(run, arguments, message):
    result, rows = run(*arguments)
    assert result.exit_code == 2 and message in result.output and rows is None


def test_a_signature_that_cannot_be_written_is_found_before_scoring(run):
    Path("out.jsonl.signature.json").mkdir()
    result, rows = run()
    assert result.exit_code == 2 and "signature.json: it is a folder" in result.output and rows is None


def test_the_rows_are_complete_if_the_summary_cannot_be_printed(tmp_path):
    (tmp_path / "in.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    command = f"{sys.executable} -m diffscore_fast.cli.main score in.jsonl --draws 1 -o out.jsonl > /dev/full"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "the summary could not be printed" in done.stderr, done.stderr
    assert (tmp_path / "out.jsonl").exists() and (tmp_path / "out.jsonl.signature.json").exists()


def test_closed_streams_give_a_message_without_traceback(tmp_path):
    (tmp_path / "in.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    for redirected, stream in (("score in.jsonl -o - --quiet >&-", "output"), ("score - -o out.jsonl <&-", "input")):
        command = f"{sys.executable} -m diffscore_fast.cli.main {redirected}"
        done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 2 and f"standard {stream} is closed" in done.stderr, done.stderr
