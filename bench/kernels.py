"""`python -m bench.kernels`: CPU kernels against what a user would otherwise call, in one run.

pytest-benchmark times every call. One test is one turn of one implementation. All implementations take a turn before
any takes its next one, so that a slow minute of a shared machine hits all of them. Times are medians over turns; ratios
are medians of the ratios within a turn. Rows go to bench/results/kernels.csv.
"""

from __future__ import annotations

import functools
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
import torch

from bench.kernel_cases import OURS, Case, all_cases
from bench.records import RESULTS, append_rows, machine
from bench.timing import ratio, spread


@functools.lru_cache(maxsize=1)  # one case's tensors at a time
def calls_of(case: Case) -> dict[str, Callable[[], object]]:
    return case.make()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    turns = [
        pytest.param(case, turn, name, id=f"{case.title} | {turn} | {name}")
        for case in all_cases(metafunc.config.getoption("small"))
        for turn in range(case.turns)
        for name in case.names
    ]
    metafunc.parametrize(("case", "turn", "name"), turns)


def test_turn(benchmark, case: Case, turn: int, name: str) -> None:  # type: ignore[no-untyped-def]
    call = calls_of(case)[name]
    benchmark.extra_info.update(title=case.title, name=name)
    with torch.no_grad():
        benchmark.pedantic(call, rounds=1, warmup_rounds=int(turn == 0))


class Collector:
    """A pytest plugin: adds this module's option, and collects the seconds of every turn after all have run."""

    def __init__(self) -> None:
        self.seconds: dict[str, dict[str, list[float]]] = {}

    def pytest_addoption(self, parser: pytest.Parser) -> None:
        parser.addoption("--small", action="store_true")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        for item in session.config._benchmarksession.benchmarks:  # type: ignore[attr-defined]
            turns = self.seconds.setdefault(item.extra_info["title"], {})
            turns.setdefault(item.extra_info["name"], []).extend(item.stats.data)


@click.command()
@click.argument("words", nargs=-1)
@click.option("--small", is_flag=True, help="Tiny shapes and no record: only to see that the benchmark runs.")
def main(words: tuple[str, ...], small: bool) -> None:
    """Time the CPU kernels: the cases whose name contains one of WORDS (masked_logprob, bfloat16), or all cases."""
    print(f"{machine()}; torch {torch.__version__}, {torch.get_num_threads()} threads", flush=True)
    collector = Collector()
    options = ["-q", "--no-header", "-p", "no:cacheprovider", "--benchmark-quiet", *["--small"] * small]
    if words:
        options += ["-k", " or ".join(words)]
    code = pytest.main([str(Path(__file__)), *options], plugins=[collector])
    for case in all_cases(small):
        if case.title in collector.seconds:
            seconds = collector.seconds[case.title]
            rows = table(case, seconds)
            if not small:
                append_rows(RESULTS / "kernels.csv", rows)
            with torch.no_grad():
                case.report(seconds)
            for row in rows:
                if row["ratio"] is not None:
                    print(f"  {row['ratio']} times {row['implementation']}")
    sys.exit(int(code))


def table(case: Case, seconds: dict[str, list[float]]) -> list[dict[str, object]]:
    """One row per implementation. `ratio`: its time divided by the time of this project's kernel, median over turns."""
    return [
        {
            "kernel": case.kernel,
            "implementation": name,
            "shape": case.shape,
            "dtype": str(case.dtype).removeprefix("torch."),
            "median_s": f"{statistics.median(values):.6f}",
            "spread_s": f"{spread(values):.6f}",
            "rounds": len(values),
            "ratio": None if name == OURS else f"{ratio(seconds, name, OURS):.3f}",
        }
        for name, values in seconds.items()
    ]


if __name__ == "__main__":
    main()
