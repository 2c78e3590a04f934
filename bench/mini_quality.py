"""Quality of the models `mini` and `small`: held-out losses, perplexities, agreement with human judgements, two checks.

`python -m bench.mini_quality` prints everything with 95% bootstrap intervals and appends it, with the model's checksum,
to bench/results/MODEL_quality.jsonl. The options set which model and which sections run, and how many rows are read.
"""

from __future__ import annotations

import lzma
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from bench.judgement_sets import JudgedSet, agreement, baseline_scores, load_sets, summarised_documents
from bench.records import RESULTS, append_record
from diffscore_fast import DiffScorer, LikelihoodBounds
from diffscore_fast.backbones.llama import LlamaBackbone
from diffscore_fast.backbones.loader import LoadedModel, load_model
from diffscore_fast.engine.plan import AttentionPattern, MaskPlan, Observation, Sequences
from diffscore_fast.options import DTYPES
from diffscore_fast.training.__main__ import HELD_OUT
from diffscore_fast.training.adaptation import adaptation_losses
from diffscore_fast.training.corpus import Corpus, prepare_corpus, read_articles
from diffscore_fast.training.evaluation import Measured, difference_interval, held_out_losses

LEAD_CHARACTERS = 500
ORDERS = 12  # K and M of the bounds: with 4 the upper bound of a long block says nothing
SECTIONS = ("losses", "perplexities", "judgements", "wmt", "checks")


@click.command()
@click.option(
    "--data",
    type=click.Path(path_type=Path, exists=True),
    required=True,
    help="Folder with judgements/ and corpus/wiki_en.txt.xz.",
)
@click.option("--model", default="mini", show_default=True, help="mini, small, or a folder of such a model.")
@click.option("--sequences", default=60, show_default=True, help="Held-out sequences per loss.")
@click.option("--texts", default=8, show_default=True, help="Held-out texts whose likelihood is bounded.")
@click.option("--documents", default=10, show_default=True, help="SummEval documents (16 systems each).")
@click.option("--rows", default=60, show_default=True, help="Rows of QAGS-CNN and of each data-to-text set.")
@click.option("--pairs", default=60, show_default=True, help="Pairs of Rank19 and of each WMT set.")
@click.option("--checks", default=30, show_default=True, help="Documents of the shuffling and fluency checks.")
@click.option("--draws", default=10, show_default=True, help="Mask draws per text.")
@click.option(
    "--block-sizes",
    default="",
    help="Also DiffScore by blocks of these sizes, separated by commas; 0: the whole window.",
)
@click.option("--dtype", type=click.Choice(DTYPES), default="float32", show_default=True)
@click.option("--threads", default=2, show_default=True, help="Threads of torch.")
@click.option("--only", type=click.Choice(SECTIONS), multiple=True, help="Sections to run; default all.")
@click.option("--note", default="", help="Recorded with the results (which checkpoint, how long trained).")
def main(
    data: Path,
    model: str,
    sequences: int,
    texts: int,
    documents: int,
    rows: int,
    pairs: int,
    checks: int,
    draws: int,
    block_sizes: str,
    dtype: str,
    threads: int,
    only: tuple[str, ...],
    note: str,
) -> None:
    """Measure the embedded model."""
    torch.set_num_threads(threads)
    started = time.monotonic()
    loaded = load_model(model, dtype=torch.float32)
    scorer = DiffScorer(model, dtype=getattr(torch, dtype))
    report = Report(model=model, weights_sha256=loaded.weights_sha256, note=note, draws=draws, dtype=dtype)
    sizes = [int(size) for size in block_sizes.split(",") if size]
    wanted = only or SECTIONS
    if "losses" in wanted or "perplexities" in wanted:
        articles = held_out_articles(data / "corpus" / "wiki_en.txt.xz")
    if "losses" in wanted:
        measure_losses(report, loaded, as_corpus(articles, loaded), sequences)
        if not isinstance(loaded.backbone, LlamaBackbone):
            draw_losses(report.rows, RESULTS / "mini_losses.png")
    if "perplexities" in wanted:
        measure_perplexities(report, model, articles, texts)
    sets = load_sets(data / "judgements", documents, rows, pairs) if {"judgements", "wmt"} & set(wanted) else []
    for judged in sets:
        if ("wmt" if judged.name.startswith("WMT") else "judgements") in wanted:
            measure_agreement(report, judged, scorer, draws, sizes)
    if "checks" in wanted:
        read = summarised_documents(data / "judgements", checks)
        check_shuffled(report, read, scorer, draws)
        check_fluency(report, read, scorer, draws)
    report.finish(time.monotonic() - started)


class Report:
    """Prints each line at once, and keeps all lines for the results file."""

    def __init__(self, **about: Any) -> None:
        self.about = about
        self.rows: list[dict[str, Any]] = []

    def add(self, section: str, name: str, value: float, low: float, high: float, **more: Any) -> None:
        self.rows.append(
            {
                "section": section,
                "name": name,
                "value": round(value, 4),
                "low": round(low, 4),
                "high": round(high, 4),
                **more,
            }
        )
        details = "  ".join(f"{key} {item}" for key, item in more.items())
        print(f"{section:<12} {name:<44} {value:>9.4f}  [{low:.4f}, {high:.4f}]  {details}", flush=True)

    def finish(self, seconds: float) -> None:
        path = RESULTS / f"{Path(self.about['model']).name}_quality.jsonl"
        append_record(path, **self.about, seconds=round(seconds), results=self.rows)
        print(f"{seconds:.0f} s; appended to {path}", file=sys.stderr)


def held_out_articles(path: Path) -> list[list[str]]:
    """The articles that training never reads, as lines: the last `HELD_OUT` of the file."""
    with tempfile.TemporaryDirectory() as scratch:
        plain = Path(scratch) / "text.txt"
        plain.write_bytes(lzma.decompress(path.read_bytes()))
        articles = list(read_articles(plain))
    return articles[-round(len(articles) * HELD_OUT) :]


def as_corpus(articles: list[list[str]], loaded: LoadedModel) -> Corpus:
    """The articles tokenised, in memory."""
    with tempfile.TemporaryDirectory() as scratch:
        plain = Path(scratch) / "text.txt"
        plain.write_text("\n\n".join("\n".join(lines) for lines in articles), encoding="utf-8")
        corpus = prepare_corpus(plain, loaded.tokenizer, Path(scratch) / "corpus")
        return Corpus(np.array(corpus.tokens), corpus.sentences, corpus.paragraphs, corpus.articles, 0, corpus.last)


def measure_losses(report: Report, loaded: LoadedModel, held_out: Corpus, sequences: int) -> None:
    """Losses per pattern and mask ratio, perplexities, and the gain from the right prefix."""
    if isinstance(loaded.backbone, LlamaBackbone):
        for item in adaptation_losses(loaded.backbone, loaded.tokenizer, held_out, sequences):
            report.add("loss", f"{item.setting}, nats per token", item.mean, *item.interval(), sequences=sequences)
        return
    measured = {item.setting: item for item in held_out_losses(loaded.bert, held_out, sequences=sequences)}
    for name, item in measured.items():
        if name.endswith(" nelbo"):  # what block-diffusion papers report as perplexity
            values = np.exp([item.mean, *item.interval()])
            report.add("perplexity", f"{name.removesuffix(' nelbo')}, one order per text", *values, sequences=sequences)
        else:
            report.add("loss", f"{name}, nats per masked piece", item.mean, *item.interval(), sequences=sequences)
    gap = difference_interval(measured["wrong prefix"], measured["right prefix"])
    report.add("loss", "wrong minus right prefix, nats", *gap, sequences=sequences)
    for kind, (wrong, right) in by_kind(measured["wrong prefix"], measured["right prefix"]).items():
        report.add("loss", f"  the same, {kind}", *difference_interval(wrong, right), sequences=len(wrong.sums))


def measure_perplexities(report: Report, model: str, articles: list[list[str]], count: int) -> None:
    """Autoregressive perplexity, and block-diffusion perplexities from both sides, on the leads of held-out articles.

    Block size 4 is exact as well (15 states per block).
    """
    texts = [lines[1][:LEAD_CHARACTERS].rsplit(" ", 1)[0] for lines in articles if len(lines) > 1][:count]
    for size in (4, 8, 16):
        bounds = LikelihoodBounds(model, block_size=size, dtype=torch.float32)
        if size == 4:
            exact = bounds.exact(texts, autoregressive=True)
            add_perplexity(report, "autoregressive", exact.autoregressive, exact.num_tokens)
            add_perplexity(report, "block 4, exact", exact.exact, exact.num_tokens)
        table = bounds.estimate(texts, orders=ORDERS, surrogate_orders=ORDERS)
        add_perplexity(report, f"block {size}, from the upper bound", table.upper, table.num_tokens)
        add_perplexity(report, f"block {size}, from the lower bound", table.lower, table.num_tokens)


def add_perplexity(report: Report, name: str, log_likelihoods: np.ndarray, num_tokens: np.ndarray) -> None:
    """exp(-sum / tokens), texts resampled."""
    item = Measured(name, -log_likelihoods, num_tokens)
    report.add("perplexity", name, *np.exp([item.mean, *item.interval()]), tokens=int(num_tokens.sum()))


def by_kind(wrong: Measured, right: Measured) -> dict[str, tuple[Measured, Measured]]:
    """Both measurements by pair kind; sequence i has kind i modulo the number of kinds."""
    from diffscore_fast.training.evaluation import PAIR_KINDS

    step = len(PAIR_KINDS)
    return {
        kind: (
            Measured(kind, wrong.sums[i::step], wrong.counts[i::step]),
            Measured(kind, right.sums[i::step], right.counts[i::step]),
        )
        for i, kind in enumerate(PAIR_KINDS)
    }


def measure_agreement(report: Report, judged: JudgedSet, scorer: DiffScorer, draws: int, sizes: list[int]) -> None:
    """Agreement with the human judgements of our score, of the same network left to right, and of the baselines."""
    options: dict[str, Any] = {
        "sources": judged.sources,
        "candidates": judged.candidates,
        "draws": draws,
        "seed": 0,
        "coupling": "independent",
        "overlength": "truncate-source",
    }
    default = scorer.spec.default_pattern
    name = f"DiffScore {default}"
    if default == "block":
        name += f" {scorer.spec.patterns[default].default_block_size}"
    metrics = {name: scorer.score(**options).scores}
    for size in sizes:
        own: dict[str, Any] = {"block_size": size} if size else {"attention": "prefix"}
        metrics[f"DiffScore block {size}" if size else "DiffScore prefix"] = scorer.score(**options, **own).scores
    metrics |= {"left to right": left_to_right_scores(scorer, judged), **baseline_scores(judged)}
    for metric, scores in metrics.items():
        found = agreement(judged, scores)
        label = f"{judged.name} {'accuracy' if judged.statistic == 'pairs' else judged.statistic}, {metric}"
        report.add("judgement", label, found.value, found.low, found.high, rows=len(scores))
        if judged.name.startswith("WMT"):
            # Kendall's tau over pairs: (concordant - discordant) / all, ties as discordant.
            tau = [2 * value - 1 for value in (found.value, found.low, found.high)]
            report.add("judgement", f"{judged.name} Kendall tau, {metric}", *tau, rows=len(scores))


def left_to_right_scores(scorer: DiffScorer, judged: JudgedSet) -> np.ndarray:
    """Mean log-probability of the candidate's tokens, left to right after the source: the network at block size 1."""
    attention = AttentionPattern("block", 1)
    pattern = scorer.spec.pattern("block", 1)
    limit = pattern.position_limit - 1 - len(pattern.separator_ids)
    ids = dict(
        zip(texts := list(dict.fromkeys([*judged.sources, *judged.candidates])), scorer.tokenize(texts), strict=True)
    )
    targets = [ids[text] for text in judged.candidates]
    contexts = [ids[text][: limit - len(target)] for text, target in zip(judged.sources, targets, strict=True)]
    rows = np.flatnonzero([len(target) for target in targets])
    sequences = Sequences.build(contexts, np.arange(len(contexts)), targets)
    lengths = sequences.target_lengths[rows]
    plan = MaskPlan(rows, np.zeros_like(rows), lengths, np.ones(int(lengths.sum()), dtype=bool))
    log_probs = scorer.runner.evaluate(OneRound(plan), sequences, attention)
    scores = np.full(len(targets), np.nan)
    scores[rows] = np.add.reduceat(log_probs.astype(np.float64), np.cumsum(lengths) - lengths) / lengths
    return scores


class OneRound:
    """An estimator of one plan, whose result is its log-probabilities."""

    def __init__(self, plan: MaskPlan) -> None:
        self._plan = plan

    def plan(self, observed: list[Observation]) -> MaskPlan | None:
        return None if observed else self._plan

    def reduce(self, observed: list[Observation]) -> np.ndarray:
        return observed[0].log_probs


def check_shuffled(report: Report, documents: list[dict], scorer: DiffScorer, draws: int) -> None:
    """How often a summary scores higher after its own document than after the next document, with the same masks."""
    sources, summaries = ([row[field] for row in documents] for field in ("source", "candidate"))
    right = scored(scorer, sources, summaries, "conditional", draws)
    wrong = scored(scorer, following(sources), summaries, "conditional", draws)
    add_mean(report, "check", "own document beats another's, share", (right > wrong).astype(float))
    add_mean(report, "check", "own minus another document, nats per token", right - wrong)


def check_fluency(report: Report, documents: list[dict], scorer: DiffScorer, draws: int) -> None:
    """Marginal, conditional and pmi for a document's reference summary, another's, and its own with words shuffled."""
    rng = np.random.default_rng(0)
    sources, summaries = [row["source"] for row in documents], [row["references"][0] for row in documents]
    candidates = {
        "related": summaries,
        "fluent but unrelated": following(summaries),
        "related, words shuffled": [" ".join(rng.permutation(text.split())) for text in summaries],
    }
    for kind, texts in candidates.items():
        conditional = scored(scorer, sources, texts, "conditional", draws)
        marginal = scored(scorer, sources, texts, "marginal", draws)
        add_mean(report, "fluency", f"{kind}: marginal", marginal)
        add_mean(report, "fluency", f"{kind}: conditional", conditional)
        add_mean(report, "fluency", f"{kind}: pmi", conditional - marginal)


def following(texts: list[str]) -> list[str]:
    """The next document's text for each, the first's for the last."""
    return [*texts[1:], *texts[:1]]


def scored(scorer: DiffScorer, sources: list[str], texts: list[str], direction: Any, draws: int) -> np.ndarray:
    return scorer.score(
        sources,
        texts,
        direction=direction,
        draws=draws,
        coupling="independent",
        overlength="truncate-source",
    ).scores


def add_mean(report: Report, section: str, name: str, values: np.ndarray) -> None:
    """A mean over documents with its bootstrap interval."""
    rows = np.random.default_rng(0).integers(len(values), size=(1000, len(values)))
    low, high = np.quantile(values[rows].mean(axis=1), [0.025, 0.975])
    report.add(section, name, float(values.mean()), float(low), float(high), documents=len(values))


def draw_losses(rows: list[dict[str, Any]], path: Path) -> None:
    """Held-out losses with their intervals as a bar chart."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    losses = [row for row in rows if row["section"] == "loss" and "@" in row["name"]]
    names = [row["name"].split(",")[0] for row in losses]
    values = np.array([row["value"] for row in losses])
    errors = np.abs(np.array([[row["low"], row["high"]] for row in losses]).T - values)
    figure, axis = pyplot.subplots(figsize=(9, 4))
    axis.bar(names, values, yerr=errors, capsize=3)
    axis.set_ylabel("held-out nats per masked word piece")
    axis.tick_params(axis="x", rotation=45)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
