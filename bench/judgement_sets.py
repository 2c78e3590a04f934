"""Judgement sets, baseline metrics for the embedded model, and agreement with human judgements."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.stats import pearsonr, spearmanr

# Name of each set, and its file name without the ending.
SETS = {
    "SummEval": "sum_summeval",
    "REALSumm": "sum_realsumm",
    "QAGS-CNN": "sum_qags_cnn",
    "Rank19": "sum_rank19",
    "BAGEL": "d2t_bagel",
    "SFHOT": "d2t_sfhot",
    "SFRES": "d2t_sfres",
    "WMT gu-en": "wmt_gu_en",
    "WMT kk-en": "wmt_kk_en",
    "WMT lt-en": "wmt_lt_en",
}
SUMMEVAL_DIMENSIONS = ("coherence", "consistency", "fluency", "relevance")
RESAMPLES = 1000


@dataclass(frozen=True)
class JudgedSet:
    """Rows of one judgement set as columns.

    groups : document of each row; whole groups are resampled
    within : True where correlations are computed inside each group and averaged
    judgements : human scores float64 [n] by name
    statistic : "spearman", "pearson" or "pairs" (rows 2i and 2i + 1 are the better and the worse of a pair)
    """

    name: str
    statistic: str
    within: bool
    sources: list[str]
    candidates: list[str]
    references: list[list[str]]
    groups: np.ndarray
    judgements: dict[str, np.ndarray]


@dataclass(frozen=True)
class Agreement:
    """A statistic with its bootstrap interval (95%)."""

    value: float
    low: float
    high: float


def load_sets(folder: Path, documents: int, rows: int, pairs: int, seed: int = 0) -> list[JudgedSet]:
    """All sets, sampled: `documents` of SummEval, `rows` of QAGS and data-to-text, `pairs` of the pair sets."""
    rng = np.random.default_rng(seed)
    sets = []
    summeval = read_rows(folder, "SummEval")
    names = list(dict.fromkeys(row["id"] for row in summeval))
    kept = {names[i] for i in rng.permutation(len(names))[:documents]}
    sets.append(_judged("SummEval", "spearman", True, [row for row in summeval if row["id"] in kept]))
    qags = read_rows(folder, "QAGS-CNN")
    sets.append(_judged("QAGS-CNN", "pearson", False, _sample(qags, rows, rng)))
    for name in ("BAGEL", "SFHOT", "SFRES"):
        sets.append(_judged(name, "spearman", False, _sample(read_rows(folder, name), rows, rng)))
    by_id: dict[str, dict[str, dict]] = {}
    for row in read_rows(folder, "Rank19"):
        by_id.setdefault(row["id"], {})[row["system"]] = row
    rank19 = [
        {
            "source": pair["correct"]["source"],
            "references": [pair["correct"]["source"]],
            "better": pair["correct"]["candidate"],
            "worse": pair["incorrect"]["candidate"],
        }
        for pair in by_id.values()
    ]
    sets.append(_paired("Rank19", _sample(rank19, pairs, rng)))
    for name in ("WMT gu-en", "WMT kk-en", "WMT lt-en"):
        data = _sample(read_rows(folder, name), pairs, rng)
        data = [{**row, "source": row["reference"], "references": [row["reference"]]} for row in data]
        sets.append(_paired(name, data))
    return sets


def summarised_documents(folder: Path, count: int) -> list[dict]:
    """One row of each of the first `count` documents of SummEval and REALSumm (200 in all; two of them are in both)."""
    first: dict[tuple[str, str], dict] = {}
    for name in ("SummEval", "REALSumm"):
        for row in read_rows(folder, name):
            first.setdefault((name, row["id"]), row)
    return list(first.values())[:count]


def read_rows(folder: Path, name: str) -> list[dict]:
    """All rows of a set."""
    with gzip.open(folder / f"{SETS[name]}.jsonl.gz", "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def agreement(judged: JudgedSet, scores: np.ndarray, seed: int = 0) -> Agreement:
    """The set's statistic between scores and judgements, averaged over human dimensions; rows or groups are resampled.

    "pairs": share of pairs whose better text scores higher. Ties and missing scores count against the metric.
    """
    if judged.statistic == "pairs":
        return _resampled((scores[0::2] > scores[1::2]).astype(float), np.mean, seed)
    correlate: Callable = pearsonr if judged.statistic == "pearson" else spearmanr
    known = np.isfinite(scores)
    if judged.within:
        values = []
        for group in np.unique(judged.groups):
            chosen = (judged.groups == group) & known
            of_group = [
                correlate(scores[chosen], human[chosen])[0]
                for human in judged.judgements.values()
                if np.ptp(human[chosen]) > 0
            ]
            if of_group:
                values.append(np.mean(of_group))
        return _resampled(np.array(values), np.mean, seed)
    humans = list(judged.judgements.values())

    def mean_correlation(chosen: np.ndarray) -> float:
        return float(np.mean([correlate(scores[chosen], human[chosen])[0] for human in humans]))

    return _resampled(np.flatnonzero(known), mean_correlation, seed)


def baseline_scores(judged: JudgedSet) -> dict[str, np.ndarray]:
    """BLEU, chrF (sacrebleu, sentence level) and ROUGE-L (rouge-score, F1, best reference) of every row."""
    import sacrebleu
    from rouge_score.rouge_scorer import RougeScorer

    rouge = RougeScorer(["rougeL"], use_stemmer=True)
    rows = list(zip(judged.candidates, judged.references, strict=True))
    return {
        "BLEU": np.array([sacrebleu.sentence_bleu(text, references).score for text, references in rows]),
        "chrF": np.array([sacrebleu.sentence_chrf(text, references).score for text, references in rows]),
        "ROUGE-L": np.array(
            [
                max(rouge.score(reference, text)["rougeL"].fmeasure for reference in references)
                for text, references in rows
            ]
        ),
    }


def _resampled(values: np.ndarray, statistic: Callable[[np.ndarray], float], seed: int) -> Agreement:
    rows = np.random.default_rng(seed).integers(len(values), size=(RESAMPLES, len(values)))
    drawn = [statistic(values[row]) for row in rows]
    low, high = np.nanquantile(drawn, [0.025, 0.975])
    return Agreement(float(statistic(values)), float(low), float(high))


def _judged(name: str, statistic: str, within: bool, rows: Sequence[dict]) -> JudgedSet:
    dimensions = SUMMEVAL_DIMENSIONS if name == "SummEval" else tuple(rows[0]["scores"])
    return JudgedSet(
        name,
        statistic,
        within,
        [row["source"] for row in rows],
        [row["candidate"] for row in rows],
        [row["references"] for row in rows],
        np.array([row["id"] for row in rows]),
        {dimension: np.array([row["scores"][dimension] for row in rows], float) for dimension in dimensions},
    )


def _paired(name: str, pairs: Sequence[dict]) -> JudgedSet:
    return JudgedSet(
        name,
        "pairs",
        False,
        [pair["source"] for pair in pairs for _ in range(2)],
        [pair[side] for pair in pairs for side in ("better", "worse")],
        [pair["references"] for pair in pairs for _ in range(2)],
        np.repeat(np.arange(len(pairs)), 2),
        {},
    )


def _sample(rows: Sequence[dict], count: int, rng: np.random.Generator) -> list[dict]:
    return [rows[i] for i in np.sort(rng.permutation(len(rows))[:count])]
