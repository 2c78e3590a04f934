"""How much a row's score varies with the seed under each mask design: `python -m bench.designs --data FOLDER`.

For some rows of four judgement sets, every design scores each row under many seeds; the standard deviation over seeds
is what a user's score carries as noise. All designs have the expectation of the published grid. Appends a line a row
and design to bench/results/designs.csv, so that an interrupted run keeps what it measured.
"""

from __future__ import annotations

from pathlib import Path

import click
import numpy as np

from bench.judgement_sets import read_rows
from bench.records import RESULTS, append_rows, embedded_weights
from diffscore_fast import DiffScorer

SETS = ("SummEval", "REALSumm", "SFRES", "WMT lt-en")
DESIGNS = {
    "grid, K = 20": {"draws": 20, "coupling": "independent"},
    "balanced, 2 replicates": {"draws": 8},
    "balanced, 1 replicate": {"draws": 8, "replicates": 1},
}


@click.command()
@click.option("--data", type=click.Path(exists=True, path_type=Path), required=True, help="Folder of judgement sets.")
@click.option("--rows", default=8, show_default=True, help="Rows of each set.")
@click.option("--seeds", default=50, show_default=True, help="Scores of each row under each design.")
@click.option("--most-tokens", default=60, show_default=True, help="Longest candidate.")
@click.option("--least-tokens", default=5, show_default=True, help="Shortest; below it all masks are enumerated.")
def main(data: Path, rows: int, seeds: int, most_tokens: int, least_tokens: int) -> None:
    """Measure, append to designs.csv, and print the root mean square over rows beside the published grid's."""
    scorer, weights = DiffScorer("mini"), embedded_weights()
    chosen = {name: sample(scorer, read_rows(data, name), rows, least_tokens, most_tokens) for name in SETS}
    variances: dict[tuple[str, str], list[float]] = {}
    for row in range(rows):
        for name in SETS:
            if row >= len(chosen[name]):
                continue
            source, candidate = chosen[name][row]
            for design, options in DESIGNS.items():
                tables = [scorer.score([source], [candidate], seed=seed, attention="prefix", **options)
                          for seed in range(seeds)]  # fmt: skip
                scores = np.array([table.scores[0] for table in tables])
                variances.setdefault((name, design), []).append(scores.var(ddof=1))
                append_rows(RESULTS / "designs.csv", [{
                    "set": name, "row": row, "tokens": tables[0].num_tokens[0],
                    "source_tokens": scorer.count_tokens([source])[0], "design": design,
                    "passes": tables[0].num_draws[0], "seeds": seeds, "mean": f"{scores.mean():.5f}",
                    "sd": f"{scores.std(ddof=1):.5f}", "weights_sha256": weights, "dtype": tables[0].signature.dtype,
                }])  # fmt: skip
    published = next(iter(DESIGNS))
    for name in SETS:
        for design in DESIGNS:
            spread, base = (np.sqrt(np.mean(variances[name, item])) for item in (design, published))
            print(f"{name:10} {design:24} sd {spread:.3f}  {spread / base:.2f} of the grid's, "
                  f"{len(variances[name, design])} rows")  # fmt: skip


def sample(scorer: DiffScorer, records: list[dict], rows: int, least: int, most: int) -> list[tuple[str, str]]:
    """(source, candidate) pairs whose candidates have a suitable length, in random order; of pairs, the better text."""
    found: list[tuple[str, str]] = []
    for index in np.random.default_rng(0).permutation(len(records)):
        record = records[index]
        source, candidate = record.get("reference", record.get("source")), record.get("candidate", record.get("better"))
        if least <= scorer.count_tokens([candidate])[0] <= most:
            found.append((source, candidate))
        if len(found) == rows:
            break
    return found


if __name__ == "__main__":
    main()
