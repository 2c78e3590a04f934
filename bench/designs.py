"""How much a row's score varies with the seed under each mask design: `python -m bench.designs --data FOLDER`.

Every design scores some rows of four judgement sets under many seeds. The standard deviation over seeds is the noise of
a user's score. All designs have the expectation of the published grid. One line per row and design is appended to
bench/results/designs.csv as soon as it is known, so that an interrupted run keeps what it measured.
"""

from __future__ import annotations

from pathlib import Path

import click
import numpy as np
import torch

from bench.judgement_sets import read_rows
from bench.records import RESULTS, append_rows
from diffscore_fast.backbones.loader import load_model
from diffscore_fast.engine.plan import AttentionPattern, Sequences
from diffscore_fast.engine.random import target_key
from diffscore_fast.engine.runner import Runner
from diffscore_fast.scoring.mask_design import MaskDesign
from diffscore_fast.scoring.reconstruction import MaskedReconstruction, ReconstructionConfig
from diffscore_fast.text.tokenizer import TextTokenizer

SETS = ("SummEval", "REALSumm", "SFRES", "WMT lt-en")
DESIGNS = {
    "grid, K = 20": MaskDesign(draws=20, coupling="independent"),
    "balanced, 2 replicates": MaskDesign(draws=8),
    "balanced, 1 replicate": MaskDesign(draws=8, replicates=1),
}


@click.command()
@click.option("--data", type=click.Path(exists=True, path_type=Path), required=True, help="Folder of judgement sets.")
@click.option("--rows", default=8, show_default=True, help="Rows of each set.")
@click.option("--seeds", default=50, show_default=True, help="Scores of each row under each design.")
@click.option("--max-tokens", default=60, show_default=True, help="Longest candidate.")
@click.option(
    "--min-tokens",
    default=5,
    show_default=True,
    help="Shortest candidate; all masks of shorter ones would be enumerated.",
)
@click.option("--threads", default=2, show_default=True, help="Threads of torch.")
def main(data: Path, rows: int, seeds: int, max_tokens: int, min_tokens: int, threads: int) -> None:
    """Measure, append to designs.csv, and print means over rows and their ratio to the published grid's."""
    torch.set_num_threads(threads)
    loaded = load_model("mini")
    runner = Runner(loaded.backbone)
    chosen = {name: sample(loaded.tokenizer, read_rows(data, name), rows, min_tokens, max_tokens) for name in SETS}
    deviations: dict[tuple[str, str], list[float]] = {}
    for row in range(rows):
        for name in SETS:
            if row >= len(chosen[name]):
                continue
            source, candidate = chosen[name][row]
            sequences = Sequences.build([source], np.zeros(seeds, np.int64), [candidate] * seeds)
            keys = np.array([target_key(seed, candidate) for seed in range(seeds)], np.uint64)
            for label, design in DESIGNS.items():
                estimator = MaskedReconstruction(ReconstructionConfig(design=design), sequences, keys)
                scores = runner.evaluate(estimator, sequences, AttentionPattern("prefix")).scores
                deviations.setdefault((name, label), []).append(scores.std(ddof=1))
                append_rows(
                    RESULTS / "designs.csv",
                    [
                        {
                            "set": name,
                            "row": row,
                            "tokens": len(candidate),
                            "source_tokens": len(source),
                            "design": label,
                            "passes": design.num_draws,
                            "seeds": seeds,
                            "mean": f"{scores.mean():.5f}",
                            "sd": f"{scores.std(ddof=1):.5f}",
                            "weights_sha256": loaded.weights_sha256[:12],
                            "dtype": str(loaded.backbone.dtype).removeprefix("torch."),
                        }
                    ],
                )
    for name in (*SETS, "all"):
        for label in DESIGNS:
            spread, base = (
                np.concatenate([deviations[item, design] for item in SETS if name in (item, "all")])
                for design in (label, next(iter(DESIGNS)))
            )
            print(
                f"{name:10} {label:24} sd {np.sqrt((spread**2).mean()):.3f}, of the grid's "
                f"{np.sqrt((spread**2).mean() / (base**2).mean()):.2f} (root mean square), "
                f"{np.exp(np.log(spread / base).mean()):.2f} (geometric mean), {len(spread)} rows"
            )


def sample(
    tokenizer: TextTokenizer, records: list[dict], rows: int, min_tokens: int, max_tokens: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Token ids of (source, candidate) with suitable candidates, in random order; of a pair, the better text."""
    found: list[tuple[np.ndarray, np.ndarray]] = []
    for index in np.random.default_rng(0).permutation(len(records)):
        record = records[index]
        texts = record.get("reference", record.get("source")), record.get("candidate", record.get("better"))
        source, candidate = (item.ids for item in tokenizer.encode(texts))
        if min_tokens <= len(candidate) <= max_tokens:
            found.append((source, candidate))
        if len(found) == rows:
            break
    return found


if __name__ == "__main__":
    main()
