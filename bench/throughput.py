"""Speed of scoring on real rows, compared with baselines: `python -m bench.throughput`.

In every round each method takes one turn. A cheap method scores all rows of a set. An expensive one scores as many rows
of about median length as fit in a turn, so that ratios are of seconds per candidate token. Where two methods define the
same score, the bench compares the scores and stops if they differ.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
import transformers
from rich.console import Console
from rich.table import Table

from bench import scaling
from bench.baselines.bartscore import BartScore, bart_like
from bench.baselines.gptscore import GptScore
from bench.baselines.naive import Naive, in_transformers
from bench.baselines.pll import PseudoLogLikelihood
from bench.judgement_sets import read_rows
from bench.operations import BertShape, bert_of, count_work, naive_operations, torch_operations
from bench.records import RESULTS, append_record, embedded_weights
from bench.timing import matrix_rate, spread, timed_with_peak
from diffscore_fast import DiffScorer
from diffscore_fast.cli.job import run_file
from diffscore_fast.cli.score import ScoreJob
from diffscore_fast.options import ATTENTION_OPTIONS as ATTENTIONS

# Rows of each set that are scored (whole groups of one source first), and rows whose operations are counted.
SIZES = {"SummEval": (16, 64), "REALSumm": (8, 50), "SFRES": (40, 200), "WMT lt-en": (40, 100)}
PAPER: dict[str, Any] = {"draws": 20, "mask_ratios": "grid", "coupling": "independent"}  # 18 passes
LIGHT = {**PAPER, "draws": 5}  # the paper's light setting: 9 passes
SECTIONS = ("operations", "baselines", "directions", "account", "scaling")
NAIVE_BATCH, PLL_BATCH = 4, 8
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Rows:
    """Rows of one data set as text and as the embedded model's tokens."""

    sources: list[str]
    candidates: list[str]
    source_ids: list[np.ndarray]
    candidate_ids: list[np.ndarray]

    @staticmethod
    def build(scorer: DiffScorer, sources: list[str], candidates: list[str]) -> Rows:
        return Rows(sources, candidates, scorer.tokenize(sources), scorer.tokenize(candidates))

    def take(self, chosen: np.ndarray) -> Rows:
        return Rows(*([column[i] for i in chosen] for column in vars(self).values()))

    def around_median(self, count: int) -> Rows:
        """`count` rows around the median length."""
        order = np.argsort([len(a) + len(b) for a, b in zip(self.source_ids, self.candidate_ids, strict=True)])
        first = (len(order) - count) // 2
        return self.take(np.sort(order[first : first + count]))

    @property
    def tokens(self) -> int:
        """Of the candidates: what a metric scores."""
        return sum(map(len, self.candidate_ids))


@dataclass(frozen=True)
class Method:
    """One way to score rows.

    run : rows to their scores
    whole : True if it scores all rows, False if only as many as fit in a turn
    work : rows to the operations and evaluations that all of them need
    """

    run: Callable[[Rows], np.ndarray]
    whole: bool
    work: Callable[[Rows], tuple[float, float]]


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    data: Path
    sets: tuple[str, ...]
    rows: int | None
    rounds: int
    turn_seconds: float
    bart_large: bool
    methods: tuple[str, ...]
    dtype: torch.dtype


@click.command()
@click.option("--data", type=click.Path(path_type=Path, exists=True), required=True, help="Folder of judgement sets.")
@click.option("--only", type=click.Choice(SECTIONS), multiple=True, help="Sections to run; default all.")
@click.option("--sets", type=click.Choice(tuple(SIZES)), multiple=True, help="Judgement sets to read; default all.")
@click.option("--rows", type=int, help="Rows of each set, in place of the defaults.")
@click.option("--rounds", default=3, show_default=True, help="Rounds; in each, every method takes one turn.")
@click.option("--turn-seconds", default=6.0, show_default=True, help="Length of a turn of an expensive method.")
@click.option("--bart-large", is_flag=True, help="Also BARTScore at the size of BART-large (slow).")
@click.option("--methods", multiple=True, help="Only baselines whose name contains one of these; default all.")
@click.option("--dtype", type=click.Choice(("float32", "bfloat16")), default="float32", show_default=True)
def main(only: tuple[str, ...], sets: tuple[str, ...], dtype: str, **options: Any) -> None:
    """Time scoring on real rows, compared with baselines. Results are appended to bench/results/throughput.jsonl."""
    transformers.utils.logging.disable_progress_bar()
    bench = Throughput(Options(sets=sets or tuple(SIZES), dtype=getattr(torch, dtype), **options))
    for section in only or SECTIONS:
        getattr(bench, section)()


class Throughput:
    """The bench: one scorer, and results that are appended as soon as they are known."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._scorer, self._weights = DiffScorer("mini", dtype=options.dtype), embedded_weights()
        self._backbone = bert_of(self._scorer)
        self._shape = BertShape.of(self._backbone)
        self._console = Console(width=150)

    def operations(self) -> None:
        """Counted operations per row; the model does not run."""
        table = Table(title="GFLOP/row (naive's / its), distinct evaluations/row")
        for column in ("", "rows", "naive", "full", "prefix", "prefix, K = 5", "reverse", "pmi"):
            table.add_column(column, justify="left" if not column else "right")
        for name in self._options.sets:
            rows = self._load(name, SIZES[name][1])
            count, naive = len(rows.sources), self._naive_work(rows)[0]
            cells = [name, f"{count}", f"{naive / count / 1e9:.1f}"]
            for options in (
                {**PAPER, "attention": "full"},
                {**PAPER, "attention": "prefix"},
                {**LIGHT, "attention": "prefix"},
                {**PAPER, "attention": "prefix", "direction": "reverse"},
                {**PAPER, "attention": "prefix", "direction": "pmi"},
            ):
                operations, evaluations = self._ours(options).work(rows)
                cells.append(f"{operations / count / 1e9:.1f} ({naive / operations:.1f}), {evaluations / count:.1f}")
            table.add_row(*cells)
        self._console.print(table)

    def baselines(self) -> None:
        """Every method on every data set, under the paper's settings."""
        methods = self._methods()
        for name in self._options.sets:
            self._compare("baselines", name, methods, self._load(name, self._options.rows or SIZES[name][0]))

    def directions(self) -> None:
        """All directions of ours, on summaries and on short rows."""
        methods = {
            direction: self._ours({**PAPER, "direction": direction, "attention": "prefix"})
            for direction in ("conditional", "marginal", "pmi", "reverse", "bidirectional")
        }
        for name, rows in (("SummEval", 4), ("SFRES", 16)):
            if name in self._options.sets:
                self._compare("directions", name, methods, self._load(name, min(rows, self._options.rows or rows)))

    def account(self) -> None:
        """Time by stage of `diffscore score`, from file to file."""
        for name in self._options.sets:
            rows = self._load(name, self._options.rows or SIZES[name][0])
            self._console.print(f"account: {name}, {len(rows.sources)} rows")
            with tempfile.TemporaryDirectory() as folder:
                source, trace = Path(folder) / "rows.jsonl", Path(folder) / "trace.json"
                pairs = zip(rows.sources, rows.candidates, strict=True)
                source.write_text("".join(json.dumps({"source": a, "candidate": b}) + "\n" for a, b in pairs))
                arguments = [
                    "score",
                    str(source),
                    "-o",
                    str(Path(folder) / "out.jsonl"),
                    "--quiet",
                    "--attention",
                    "prefix",
                    "--profile-run",
                    str(trace),
                ]
                run_file(ScoreJob(command_options(arguments)), str(source), str(Path(folder) / "out.jsonl"), "mini")
                times = json.loads(trace.read_text())["otherData"]
            self._record("account", name, rows=len(rows.sources), **times)

    def scaling(self) -> None:
        """Seconds over rows, K, source length and candidate length."""
        scaling.measure(self._scorer, self._weights, self._words(), self._options.rounds, RESULTS)

    def _methods(self) -> dict[str, Method]:
        dtype, spec = self._backbone.dtype, self._scorer.spec
        embedded = in_transformers(self._backbone)
        naive = Naive(embedded, spec.start_id, spec.mask_id, NAIVE_BATCH)  # type: ignore[arg-type]
        pll = PseudoLogLikelihood(embedded, spec.start_id, spec.mask_id, PLL_BATCH)  # type: ignore[arg-type]

        def published(rows: Rows) -> np.ndarray:
            return naive.score(rows.source_ids, rows.candidate_ids, self._masks(rows))

        methods = {
            "prefix": self._ours({**PAPER, "attention": "prefix"}),
            "prefix, K = 5": self._ours({**LIGHT, "attention": "prefix"}),
            "prefix, default masks": self._ours({"attention": "prefix"}),
            "full": self._ours({**PAPER, "attention": "full"}, whole=False),
            "naive": Method(published, False, self._naive_work),
            "pll": _baseline(_by_ids(pll.score), False, lambda rows: rows.tokens),
        }
        if "corrected" in ATTENTIONS:
            methods["corrected"] = self._ours({**PAPER, "attention": "corrected"}, whole=False)
        barts = {"bartscore": bart_like("equal", spec.vocab_size)}
        if self._options.bart_large:
            barts["bartscore large"] = bart_like("large", spec.vocab_size)
        for name, bart in barts.items():
            plain = BartScore(bart, tuned=False)
            tuned = BartScore(bart.to(dtype=dtype) if dtype == torch.bfloat16 else bart, tuned=True)  # type: ignore[call-arg]
            for kind, baseline in (("as published", plain), ("tuned", tuned)):
                methods[f"{name}, {kind}"] = _baseline(_by_ids(baseline.score), name == "bartscore")
        try:
            gpt = GptScore(dtype=dtype)
            methods["gptscore"] = _baseline(lambda rows: gpt.score(rows.sources, rows.candidates), False)
        except ModuleNotFoundError as error:
            self._console.print(f"gptscore left out: {error}")
        words = self._options.methods or ("",)
        return {name: method for name, method in methods.items() if any(word in name for word in words)}

    def _ours(self, options: dict[str, Any], whole: bool = True) -> Method:
        def run(rows: Rows) -> np.ndarray:
            self._scorer.clear_cache()  # every turn computes its own prefixes
            return self._scorer.score(rows.sources, rows.candidates, **options).scores

        def work(rows: Rows) -> tuple[float, float]:
            counted = count_work(self._scorer, lambda: run(rows))
            return counted.operations, float(counted.evaluations)

        return Method(run, whole, work)

    def _naive_work(self, rows: Rows) -> tuple[float, float]:
        draws = np.array([len(masks) for masks in self._masks(rows)])
        sources, candidates = (np.array(list(map(len, ids))) for ids in (rows.source_ids, rows.candidate_ids))
        return float(naive_operations(self._shape, sources, candidates, draws).sum()), float(draws.sum())

    def _masks(self, rows: Rows) -> list[np.ndarray]:
        options = {**PAPER, "attention": "full"}
        return count_work(self._scorer, lambda: self._scorer.score(rows.sources, rows.candidates, **options)).masks()

    def _compare(self, section: str, name: str, methods: dict[str, Method], every: Rows) -> None:
        taken: dict[str, Rows] = {}
        work: dict[str, tuple[float, float]] = {}
        times: dict[str, list[float]] = {label: [] for label in methods}
        peaks = dict.fromkeys(methods, 0)
        for label, method in methods.items():
            first = every.around_median(1)
            each = timed_with_peak(lambda: method.run(first))[0]  # noqa: B023
            affordable = max(1, min(len(every.sources), int(self._options.turn_seconds / each)))
            taken[label] = every if method.whole else every.around_median(affordable)
            work[label] = method.work(taken[label])
        scores: dict[str, np.ndarray] = {}
        limits = []
        for _ in range(self._options.rounds):
            limits.append(matrix_rate(self._backbone.dtype, rounds=3))
            for label, method in methods.items():

                def turn() -> None:
                    scores[label] = method.run(taken[label])  # noqa: B023

                seconds, peak = timed_with_peak(turn)
                times[label].append(seconds)
                peaks[label] = max(peaks[label], peak)
        limit = statistics.median(limits)
        table = Table(title=f"{section}: {name}, {len(every.sources)} rows; matmul limit {limit / 1e9:.0f} GFLOP/s")
        for column in (
            "",
            "rows",
            "rows/s",
            "spread",
            "tokens/s",
            "evaluations/row",
            "GFLOP/row",
            "of limit",
            "MiB",
            "naive's time / its",
        ):
            table.add_column(column, justify="left" if not column else "right")
        for label, rows in taken.items():
            number, tokens = len(rows.sources), rows.tokens
            seconds = statistics.median(times[label])
            operations, evaluations = work[label]
            faster = float("nan")
            if "naive" in methods:
                per_token = [[item / taken[who].tokens for item in times[who]] for who in ("naive", label)]
                faster = statistics.median(a / b for a, b in zip(*per_token, strict=True))
            found = {
                "rows": number,
                "rows_per_second": number / seconds,
                "spread": spread([number / item for item in times[label]]),
                "tokens_per_second": tokens / seconds,
                "evaluations_per_row": evaluations / number,
                "gflop_per_row": operations / number / 1e9,
                "of_limit": operations / seconds / limit,
                "peak_bytes": peaks[label],
                "naive_time_ratio": faster,
            }
            shown = [
                f"{number}",
                *(
                    f"{found[key]:.3g}"
                    for key in (
                        "rows_per_second",
                        "spread",
                        "tokens_per_second",
                        "evaluations_per_row",
                        "gflop_per_row",
                        "of_limit",
                    )
                ),
                f"{peaks[label] / 2**20:.0f}",
                f"{faster:.3g}",
            ]
            table.add_row(label, *(item.replace("nan", "-") for item in shown))
            self._record(section, name, method=label, limit=limit, **found)
        self._console.print(table)
        if "naive" in methods and "full" in methods:
            self._check_equal(name, taken["naive"], scores["naive"], methods["full"])

    def _check_equal(self, name: str, rows: Rows, naive: np.ndarray, full: Method) -> None:
        difference = float(np.abs(full.run(rows) - naive).max())
        if not difference < TOLERANCE[self._backbone.dtype]:
            raise SystemExit(f"{name}: naive and full differ by {difference:.3g} nats per token")
        self._console.print(f"naive and full agree to {difference:.1e} nats per token\n")

    def _load(self, name: str, count: int) -> Rows:
        found = read_rows(self._options.data, name)
        if "candidate" not in found[0]:  # pairs of translations, read beside the reference
            found = [
                {"id": i, "source": row["reference"], "candidate": row[side]}
                for i, row in enumerate(found)
                for side in ("better", "worse")
            ]
        else:
            first = {row["id"]: at for at, row in reversed(list(enumerate(found)))}
            found.sort(key=lambda row: first[row["id"]])  # whole groups, in order of appearance
        # Shorter candidates have so few masks that this package enumerates them where the baselines draw.
        sizes = self._scorer.count_tokens([row["candidate"] for row in found[: 2 * count]])
        found = [row for row, size in zip(found, sizes, strict=False) if size >= 5][:count]
        return Rows.build(self._scorer, [row["source"] for row in found], [row["candidate"] for row in found])

    def _words(self) -> list[str]:
        return " ".join(self._load(self._options.sets[0], 16).sources).split()

    def _record(self, section: str, name: str, **found: Any) -> None:
        append_record(
            RESULTS / "throughput.jsonl",
            section=section,
            data=name,
            **found,
            weights_sha256=self._weights,
            dtype=str(self._backbone.dtype).removeprefix("torch."),
            transformers=transformers.__version__,
        )


def _baseline(
    run: Callable[[Rows], np.ndarray], whole: bool, evaluations: Callable[[Rows], int] = lambda rows: len(rows.sources)
) -> Method:
    """A baseline. torch counts its operations, on all rows or on one of median length."""

    def work(rows: Rows) -> tuple[float, float]:
        counted = rows if whole else rows.around_median(1)
        operations = torch_operations(lambda: run(counted))
        return operations * len(rows.sources) / len(counted.sources), float(evaluations(rows))

    return Method(run, whole, work)


def _by_ids(score: Callable[[list[np.ndarray], list[np.ndarray]], np.ndarray]) -> Callable[[Rows], np.ndarray]:
    return lambda rows: score(rows.source_ids, rows.candidate_ids)


def command_options(arguments: list[str]) -> dict[str, Any]:
    """The options of `diffscore score` as the command line reads them."""
    from diffscore_fast.cli.main import score

    parameters = dict(score.make_context("score", arguments[1:]).params)
    return {name: value for name, value in parameters.items() if name not in ("input_paths", "output_path", "model")}


if __name__ == "__main__":
    main()
