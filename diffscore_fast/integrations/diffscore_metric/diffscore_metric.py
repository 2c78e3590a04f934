"""DiffScore for Hugging Face evaluate: `evaluate.load(path of this folder)`; nothing is downloaded."""

import datasets
import evaluate

from diffscore_fast.integrations.rows import RowScorer

_DESCRIPTION = "DiffScore: how well a masked-diffusion language model reconstructs a candidate from its source."
_INPUTS = """
Args:
    predictions: list of str, the candidates
    references: list of str (the source of each), or list of lists of str (its references)
    model, and further options: as for diffscore_fast.BatchScorer
Returns:
    score: mean over rows with a score, in nats per token, or None
    scores: list of float or None
    statuses: list of str
    signature: what the scores depend on besides their rows
"""
_CITATION = "DiffScore, arXiv 2605.11601"


class DiffScore(evaluate.Metric):
    """The metric that `evaluate.load` finds."""

    def _info(self):
        text = datasets.Value("string")
        many = getattr(datasets, "List", datasets.Sequence)
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=[
                datasets.Features({"predictions": text, "references": text}),
                datasets.Features({"predictions": text, "references": many(text)}),
            ],
        )

    def _compute(self, predictions, references, model="mini", **options):
        scorer = RowScorer(model, **options)
        rows = scorer(predictions, references)
        scored = [row.score for row in rows if row.score is not None]
        return {
            "score": sum(scored) / len(scored) if scored else None,
            "scores": [row.score for row in rows],
            "statuses": [row.status for row in rows],
            "signature": scorer.signature,
        }
