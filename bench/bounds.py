"""The TUBE paper's table in miniature: bounds, comparators and exact values of the embedded model on held-out text.

`python -m bench.bounds --corpus wiki_en.txt.xz` prints perplexities for block sizes 4, 8 and 16, coverage of the
intervals, the surrogate ablation and the costs, and writes bench/results/bounds.jsonl and bounds.png. For block sizes 4
and 8 all states of the lattice are evaluated once; the exact value, and every number of orders and seeds, is read from
that table. For block size 16 the orders are sampled from the model. `--only` runs one of the three sections.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click
import numpy as np
import torch

from bench.mini_quality import as_corpus, held_out_articles
from bench.records import RESULTS, append_record
from diffscore_fast.backbones.loader import LoadedModel, load_model
from diffscore_fast.bounds import comparators, evidence
from diffscore_fast.bounds.comparators import TVO_PARTITION
from diffscore_fast.bounds.lattice import exact_log_likelihood
from diffscore_fast.bounds.orders import Generation, draw_steps, visible_before
from diffscore_fast.bounds.states import Blocks, Lattice, SampledOrders, cut_blocks
from diffscore_fast.bounds.surrogates import NetworkSurrogate
from diffscore_fast.engine.plan import AttentionPattern, Observation, Sequences
from diffscore_fast.engine.ragged import concatenate
from diffscore_fast.engine.random import target_key
from diffscore_fast.engine.runner import Runner

PAPER_DRAWS = {4: 12, 8: 32, 16: 64}  # K = M of the paper's table
STEPS = (1, 2, 4, 8, 16, None)
FULL_PASSES = 8  # timed as one batch
SECTIONS = ("table", "sixteen", "costs")


@click.command()
@click.option("--corpus", type=click.Path(path_type=Path, exists=True), required=True, help="wiki_en.txt.xz")
@click.option("--model", default="mini", show_default=True, help="Embedded model by name, or a model folder.")
@click.option("--paragraphs", default=50, show_default=True, help="Held-out paragraphs.")
@click.option("--tokens", default=47, show_default=True, help="Word pieces of each.")
@click.option("--seeds", default=20, show_default=True, help="Seeds of coverage and of means.")
@click.option("--blocks-16", default=64, show_default=True, help="Blocks of 16 tokens.")
@click.option("--exact-16", default=0, show_default=True, help="Of these, how many to compute exactly (65,535 states).")
@click.option(
    "--fine-tuned",
    type=click.Path(path_type=Path, exists=True),
    help="Model folder of `python -m diffscore_fast.training surrogate --block-size 8`.",
)
@click.option("--cost-texts", default=2, show_default=True, help="Texts of 127 word pieces for the cost comparison.")
@click.option("--only", type=click.Choice(SECTIONS), multiple=True, help="Sections to run; default all.")
@click.option("--threads", default=2, show_default=True, help="Threads of torch.")
def main(
    corpus: Path,
    model: str,
    paragraphs: int,
    tokens: int,
    seeds: int,
    blocks_16: int,
    exact_16: int,
    fine_tuned: Path | None,
    cost_texts: int,
    only: tuple[str, ...],
    threads: int,
) -> None:
    """Print the table."""
    torch.set_num_threads(threads)
    started = time.monotonic()
    loaded = load_model(model)
    torch.set_grad_enabled(False)
    bench = Bench(loaded, Runner(loaded.backbone), [])
    texts = held_out_paragraphs(corpus, loaded, tokens, paragraphs)
    print(
        f"{len(texts)} held-out paragraphs of {tokens} word pieces; model {loaded.weights_sha256[:12]}, "
        f"{str(loaded.backbone.dtype).removeprefix('torch.')}, {torch.get_num_threads()} threads"
    )
    sections = only or SECTIONS
    if "table" in sections:
        four_and_eight(bench, texts, seeds, fine_tuned)
    if "sixteen" in sections:
        sixteen(bench, texts, blocks_16, exact_16, seeds)
    if "costs" in sections:
        costs(bench, held_out_paragraphs(corpus, loaded, 127, cost_texts))
    seconds = time.monotonic() - started
    append_record(
        RESULTS / "bounds.jsonl",
        model=model,
        weights_sha256=loaded.weights_sha256,
        seconds=round(seconds),
        threads=threads,
        paragraphs=len(texts),
        tokens=tokens,
        seeds=seeds,
        results=bench.rows,
    )
    print(f"{seconds:.0f} s; appended to {RESULTS / 'bounds.jsonl'}")


@dataclass
class StateTables:
    """log p(x_j | x_S) for all states of all blocks. Every estimate and exact value is read from this table."""

    block_size: int
    blocks: Blocks
    keys: np.ndarray  # [texts]
    parts: list[tuple[np.ndarray, np.ndarray]]  # block indices, [b, 2^n, n]

    def exact(self, generation: Generation) -> np.ndarray:
        """log p of each block."""
        out = np.zeros(len(self.blocks.lengths))
        for chosen, table in self.parts:
            out[chosen] = exact_log_likelihood(table, generation)
        return out

    def sample(self, generation: Generation, draws: int, seed: int) -> np.ndarray:
        """log p(x | z) of sampled orders, [B, draws]."""
        out = np.zeros((len(self.blocks.lengths), draws))
        for chosen, table in self.parts:
            length = table.shape[2]
            place = self.blocks.start[chosen][:, None] + np.arange(length)
            keys = self.keys[self.blocks.sequence[chosen]] + np.uint64(seed)
            steps = draw_steps(keys, place, np.ones_like(place, bool), draws, "independent", generation)
            index = np.arange(len(chosen))[:, None, None], visible_before(steps), np.arange(length)
            out[chosen] = table[index].sum(axis=2)
        return out


@dataclass
class Bench:
    """The model, and the rows printed so far."""

    loaded: LoadedModel
    runner: Runner
    rows: list[dict]

    def tables(self, texts: list[np.ndarray], block_size: int) -> StateTables:
        """Evaluate the whole lattice of every block."""
        sequences = Sequences.build([np.zeros(0, np.int32)], np.zeros(len(texts), np.int64), texts)
        blocks = cut_blocks(sequences.target_lengths, block_size, True)
        estimator = CollectTables(blocks, Generation())
        parts = self.runner.evaluate(estimator, sequences, AttentionPattern("block", block_size))
        return StateTables(block_size, blocks, np.array([target_key(0, item) for item in texts], np.uint64), parts)

    def perplexity(self, table: StateTables, per_block: np.ndarray) -> tuple[float, float, float]:
        """Token-weighted perplexity and its 95% bootstrap interval over texts."""
        count = len(table.keys)
        sums = np.bincount(table.blocks.sequence, weights=per_block, minlength=count)
        tokens = np.bincount(table.blocks.sequence, weights=table.blocks.lengths, minlength=count)
        sums, tokens = sums[tokens > 0], tokens[tokens > 0]
        sample = np.random.default_rng(0).integers(len(tokens), size=(1000, len(tokens)))
        spread = np.exp(-sums[sample].sum(1) / tokens[sample].sum(1))
        low, high = np.quantile(spread, [0.025, 0.975])
        return float(np.exp(-sums.sum() / tokens.sum())), float(low), float(high)

    def add(
        self,
        section: str,
        block_size: int,
        steps: int | None,
        name: str,
        value: float,
        low: float = np.nan,
        high: float = np.nan,
        unit: str = "perplexity",
    ) -> None:
        kind = "any-order" if steps is None else f"{steps} steps"
        numbers = {
            key: None if np.isnan(item) else round(item, 5)
            for key, item in (("value", value), ("low", low), ("high", high))
        }
        about = {"section": section, "block_size": block_size, "generation": kind, "name": name, "unit": unit}
        self.rows.append({**about, **numbers})
        interval = "" if np.isnan(low) else f"[{low:.3f}, {high:.3f}]"
        print(f"{section:<10} L'={block_size:<3} {kind:<10} {name:<36} {value:>12.4f} {unit} {interval}", flush=True)


class CollectTables(Lattice):
    """The lattice's whole tables in place of their sums."""

    def reduce(self, observed: list[Observation]) -> list[tuple[np.ndarray, np.ndarray]]:  # type: ignore[override]
        return list(self.tables(observed))


def held_out_paragraphs(corpus: Path, loaded: LoadedModel, tokens: int, count: int) -> list[np.ndarray]:
    """The beginnings of `count` paragraphs that training never saw, spread evenly over the held-out articles."""
    held_out = as_corpus(held_out_articles(corpus), loaded)
    found = []
    for paragraph in range(len(held_out.paragraphs) - 1):
        first, last = held_out.paragraph_tokens(paragraph, paragraph + 1)
        if last - first >= tokens:
            found.append(held_out.tokens[first : first + tokens].astype(np.int32))
    return found[:: max(1, len(found) // count)][:count]


def four_and_eight(bench: Bench, texts: list[np.ndarray], seeds: int, fine_tuned: Path | None) -> None:
    """Everything that the whole lattice gives for block sizes 4 and 8, and the autoregressive perplexity."""
    autoregressive = bench.tables(texts, 1)
    bench.add("table", 1, None, "autoregressive", *bench.perplexity(autoregressive, autoregressive.exact(Generation())))
    for block_size in (4, 8):
        table = bench.tables(texts, block_size)
        for steps in STEPS:
            compare(bench, table, Generation(steps), PAPER_DRAWS[block_size], seeds)
        surrogates = {"TUBE, autoregressive": autoregressive.exact(Generation())}
        if fine_tuned is not None and block_size == 8:
            surrogates["TUBE, autoregressive, fine-tuned"] = np.concatenate(NetworkSurrogate(fine_tuned)(texts))
        ablate(bench, table, surrogates, seeds)
        if block_size == 8:
            draw_interval(table, RESULTS / "bounds.png")


def compare(bench: Bench, table: StateTables, generation: Generation, draws: int, seeds: int) -> None:
    """One row group of the paper's table, and the coverage of the default interval."""
    exact = table.exact(generation)
    samples = [table.sample(generation, 2 * draws, seed) for seed in range(seeds)]
    first = samples[0]
    psi = evidence.log_mean_exp(first[:, :draws]).value
    named = {
        "CUBO_2 (biased)": comparators.cubo(first, 2.0),
        "TVO upper (biased)": comparators.tvo_upper(first, np.array(TVO_PARTITION)),
        "IS-VG-B (biased)": comparators.is_vg_b(first),
        "TUBE": evidence.tangent_upper(first[:, draws:], psi).value,
        "TUBE, cross-fitted": evidence.cross_fitted_upper(first, 2 * draws).value,
        "exact": exact,
        "ELBO_K": evidence.log_mean_exp(first[:, draws:]).value,
        "ELBO_{K+M}": evidence.log_mean_exp(first).value,
        "ELBO_1": first.mean(axis=1),  # what block-diffusion papers report
    }
    for name, values in named.items():
        bench.add("table", table.block_size, generation.steps, name, *bench.perplexity(table, values))
    inside, lower, upper = [], [], []
    for log_p in samples:
        low, high = evidence.log_mean_exp(log_p), evidence.cross_fitted_upper(log_p, 2 * draws)
        below, above = interval(low, high)
        inside.append((below <= exact + 1e-9) & (exact <= above + 1e-9))
        lower.append(low.value.sum())
        upper.append(high.value.sum())
    bench.add(
        "coverage",
        table.block_size,
        generation.steps,
        "exact in [lower - 3 se, upper + 3 se]",
        float(np.mean(inside)),
        unit="of blocks",
    )
    for name, values in (("mean lower - exact", lower), ("mean upper - exact", upper)):
        gaps = (np.array(values) - exact.sum()) / table.blocks.lengths.sum()
        error = 2 * gaps.std(ddof=1) / np.sqrt(seeds)
        bench.add(
            "coverage",
            table.block_size,
            generation.steps,
            name,
            gaps.mean(),
            gaps.mean() - error,
            gaps.mean() + error,
            "nats per token",
        )


def interval(low: evidence.Estimate, high: evidence.Estimate) -> tuple[np.ndarray, np.ndarray]:
    """lower - 3 se and upper + 3 se of each block."""
    return low.value - 3 * low.stderr, high.value + 3 * high.stderr


def ablate(bench: Bench, table: StateTables, surrogates: dict[str, np.ndarray], seeds: int) -> None:
    """Any-order upper bound by surrogate, mean over seeds. `surrogates`: autoregressive log-probs per token."""
    draws = PAPER_DRAWS[table.block_size]

    def add(name: str, upper: Callable[[np.ndarray], evidence.Estimate], count: int) -> None:
        values = [upper(table.sample(Generation(), draws + count, seed)).value for seed in range(seeds)]
        bench.add("surrogate", table.block_size, None, name, *bench.perplexity(table, np.mean(values, axis=0)))

    def self_upper(log_p: np.ndarray, count: int) -> evidence.Estimate:
        return evidence.tangent_upper(log_p[:, count:], evidence.log_mean_exp(log_p[:, :count]).value)

    for count in (1, 2, 12, 32):
        name = "TUBE, single order" if count == 1 else f"TUBE, self M = {count}"
        add(name, partial(self_upper, count=count), count)
    first = np.concatenate([[0], np.cumsum(table.blocks.lengths)])
    for name, per_token in surrogates.items():
        edges = np.concatenate([[0], np.cumsum(per_token)])
        add(name, partial(evidence.tangent_upper, log_psi=edges[first[1:]] - edges[first[:-1]]), 0)


def sixteen(bench: Bench, texts: list[np.ndarray], count: int, exact: int, seeds: int) -> None:
    """Block size 16: sampled orders of the first blocks; optionally also the whole lattice of a few of them."""
    draws = PAPER_DRAWS[16]
    sequences = Sequences.build([np.zeros(0, np.int32)], np.zeros(len(texts), np.int64), texts)
    every = cut_blocks(sequences.target_lengths, 16, True)
    full = np.flatnonzero(every.lengths == 16)[:count]
    if not len(full):
        return
    blocks = Blocks(every.sequence[full], every.start[full], every.stop[full])
    keys = np.array([target_key(0, item) for item in texts], np.uint64)
    table = StateTables(16, blocks, keys, [])
    for generation in map(Generation, STEPS):
        estimator = SampledOrders(blocks, keys, generation, 2 * draws, "independent")
        log_p = bench.runner.evaluate(estimator, sequences, AttentionPattern("block", 16)).log_p
        psi = evidence.log_mean_exp(log_p[:, :draws]).value
        for name, values in {
            "CUBO_2 (biased)": comparators.cubo(log_p, 2.0),
            "TVO upper (biased)": comparators.tvo_upper(log_p, np.array(TVO_PARTITION)),
            "IS-VG-B (biased)": comparators.is_vg_b(log_p),
            "TUBE": evidence.tangent_upper(log_p[:, draws:], psi).value,
            "TUBE, cross-fitted": evidence.cross_fitted_upper(log_p, 2 * draws).value,
            "ELBO_K": evidence.log_mean_exp(log_p[:, draws:]).value,
            "ELBO_1": log_p.mean(axis=1),
        }.items():
            bench.add("table", 16, generation.steps, name, *bench.perplexity(table, values))
    if not exact:
        return
    few = Blocks(blocks.sequence[:exact], blocks.start[:exact], blocks.stop[:exact])
    parts = bench.runner.evaluate(CollectTables(few, Generation()), sequences, AttentionPattern("block", 16))
    known = StateTables(16, few, keys, parts)
    values = known.exact(Generation())
    samples = [known.sample(Generation(), 2 * draws, seed) for seed in range(seeds)]
    edges = np.array(
        [interval(evidence.log_mean_exp(log_p), evidence.cross_fitted_upper(log_p, 2 * draws)) for log_p in samples]
    )
    for index, value in enumerate(values):
        bench.add(
            "exact 16",
            16,
            None,
            f"block {index}, beside the interval of seed 0",
            float(value),
            float(edges[0, 0, index]),
            float(edges[0, 1, index]),
            unit="nats",
        )
    inside = (edges[:, 0] <= values) & (values <= edges[:, 1])
    bench.add(
        "exact 16",
        16,
        None,
        f"exact in its interval, {len(values)} blocks, {seeds} seeds",
        float(inside.mean()),
        unit="of intervals",
    )


def costs(bench: Bench, texts: list[np.ndarray]) -> None:
    """States and seconds on texts of 128 places: shared states, unshared states, exact, and full forward passes."""
    sequences = Sequences.build([np.zeros(0, np.int32)], np.zeros(len(texts), np.int64), texts)
    keys = np.array([target_key(0, item) for item in texts], np.uint64)
    for block_size in (4, 8):
        draws, attention = 2 * PAPER_DRAWS[block_size], AttentionPattern("block", block_size)
        blocks = cut_blocks(sequences.target_lengths, block_size, True)
        sampled = SampledOrders(blocks, keys, Generation(), draws, "independent")
        # Full passes are short. They are timed between the others, so that a slow minute does not hit only them.
        full = [FullPasses(bench, texts[0], block_size, every_row=every_row) for every_row in (False, True)]
        for item in full:
            item.time()
        shared, seconds = timed(bench.runner.evaluate, sampled, sequences, attention)
        for item in full:
            item.time()
        _, exact_seconds = timed(bench.runner.evaluate, Lattice(blocks, Generation()), sequences, attention)
        # Every step of every trajectory on its own: as many windows as visited states, all of them different.
        repeats = int(np.ceil(shared.visited_states.sum() / shared.distinct_states.sum()))
        spread, where = concatenate([np.roll(item, shift) for item in texts for shift in range(repeats)])
        no_context = np.zeros(0, np.int32), np.zeros(2, np.int64)
        apart = Sequences(*no_context, np.zeros(len(where) - 1, np.int64), spread, where)
        apart_blocks = cut_blocks(apart.target_lengths, block_size, True)
        unshared = SampledOrders(apart_blocks, np.repeat(keys, repeats), Generation(), draws, "independent")
        _, unshared_seconds = timed(bench.runner.evaluate, unshared, apart, attention)
        for item in full:
            item.time()
        steps = draws * block_size
        whole = blocks.lengths == block_size
        for name, value, unit in (
            (f"distinct states per block, {draws} draws", float(shared.distinct_states[whole].mean()), "states"),
            ("visited states per block", float(shared.visited_states[whole].mean()), "states"),
            ("estimate, states shared", seconds, "s"),
            ("exact", exact_seconds, "s"),
            (f"estimate, states not shared ({repeats} x windows)", unshared_seconds, "s"),
            (f"full passes ({steps} per text, from {FULL_PASSES} timed)", full[0].seconds * steps * len(texts), "s"),
            ("full passes, logits of every noisy row", full[1].seconds * steps * len(texts), "s"),
        ):
            bench.add("cost", block_size, None, name, value, unit=unit)


class FullPasses:
    """A batch of FULL_PASSES passes over clean and noisy text side by side, all blocks at one step each.

    `every_row`: the vocabulary projection and log-softmax of all noisy rows, as public block-diffusion code evaluates a
    text; otherwise of the masked rows only, which a full pass needs at least.
    """

    def __init__(self, bench: Bench, text: np.ndarray, block_size: int, *, every_row: bool) -> None:
        self._run = batch_of_passes(bench, text, block_size, every_row)
        self._run()
        self._taken: list[float] = []

    def time(self) -> None:
        self._taken.append(timed(self._run)[1])

    @property
    def seconds(self) -> float:
        """Seconds of one pass: the median batch divided by its number of passes."""
        return statistics.median(self._taken) / FULL_PASSES


def batch_of_passes(bench: Bench, text: np.ndarray, block_size: int, every_row: bool) -> Callable[[], object]:
    from diffscore_fast.training.objective import masked_losses
    from diffscore_fast.training.patterns import hidden_at, lay_block, pack_layouts

    generator, backbone = np.random.default_rng(0), bench.loaded.bert
    masks = generator.random((FULL_PASSES, len(text))) < 0.5
    layouts = [lay_block(text.astype(np.int64), mask, block_size, backbone.spec) for mask in masks]
    pack = pack_layouts(layouts)

    def project_every_row() -> torch.Tensor:
        noisy = [
            torch.arange(start + spans[-1].start, start + spans[-1].stop)
            for start, spans in zip(np.cumsum([0, *pack.lengths[:-1]]), pack.spans, strict=True)
        ]
        hidden = backbone.head_transform(hidden_at(backbone, pack, torch.cat(noisy)))
        logits = torch.nn.functional.linear(hidden, backbone.vocabulary_weight, backbone.vocabulary_bias)
        return torch.log_softmax(logits.float(), dim=1)

    return project_every_row if every_row else partial(masked_losses, backbone, pack)


def timed(run: Callable, *arguments: object) -> tuple:
    """Result and seconds."""
    started = time.perf_counter()
    result = run(*arguments)
    return result, time.perf_counter() - started


def draw_interval(table: StateTables, path: Path) -> None:
    """Draw how the default interval closes on the exact value as orders are added."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tokens, exact = table.blocks.lengths.sum(), table.exact(Generation()).sum()
    counts, low, high = [16, 32, 64, 128, 256, 512], [], []
    for count in counts:
        log_p = table.sample(Generation(), count, 0)
        lower, upper = evidence.log_mean_exp(log_p), evidence.cross_fitted_upper(log_p, count)
        low.append((lower.value.sum() - 3 * np.sqrt((lower.stderr**2).sum())) / tokens)
        high.append((upper.value.sum() + 3 * np.sqrt((upper.stderr**2).sum())) / tokens)
    figure, axis = pyplot.subplots(figsize=(6, 3.5))
    axis.fill_between(counts, low, high, alpha=0.3, label="[lower - 3 se, upper + 3 se]")
    axis.axhline(exact / tokens, color="black", label="exact")
    axis.set_xscale("log", base=2)
    axis.set_xlabel("orders")
    axis.set_ylabel(f"log-likelihood, nats per token (L' = {table.block_size})")
    axis.legend()
    figure.tight_layout()
    RESULTS.mkdir(exist_ok=True)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
