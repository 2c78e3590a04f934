"""What the throughput bench compares: baselines that compute what they claim, and right counts of operations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from bench.baselines.bartscore import BartScore, bart_like
from bench.baselines.naive import Naive, in_transformers
from bench.baselines.pll import PseudoLogLikelihood
from bench.operations import BertShape, Work, bert_of, count_work, naive_operations, prefix_operations, torch_operations
from bench.tiny_model import tiny_model
from diffscore_fast import DiffScorer
from diffscore_fast.engine.plan import AttentionPattern

SOURCES = ["Two passengers were found dead on a cruise ship.", "The old river falls over the green house at night."]
CANDIDATES = ["Two people died on a ship.", "It rained over the house and over the river."]
GRID: dict[str, Any] = {"draws": 20, "mask_ratios": "grid", "coupling": "independent"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def tiny(folder):
    return DiffScorer(folder, attention=AttentionPattern("full"))


@pytest.fixture(scope="module")
def same_network(tiny):
    return in_transformers(bert_of(tiny))


def masks_of(scorer: DiffScorer, candidates: list[str]) -> list[np.ndarray]:
    return count_work(scorer, lambda: scorer.score(None, candidates, direction="marginal", **GRID)).masks()


def test_naive_is_the_same_score_by_other_means(tiny, same_network):
    sources, candidates = tiny.tokenize(SOURCES), tiny.tokenize(CANDIDATES)
    ours = tiny.score(SOURCES, CANDIDATES, attention="full", **GRID)
    spec = tiny.spec
    for batch in (1, 7):
        naive = Naive(same_network, spec.start_id, spec.mask_id, batch)
        np.testing.assert_allclose(naive.score(sources, candidates, masks_of(tiny, CANDIDATES)), ours.scores, atol=1e-5)


def test_pseudo_log_likelihood_masks_one_token_at_a_time(tiny, same_network):
    sources, candidates = tiny.tokenize(SOURCES), tiny.tokenize(CANDIDATES)
    got = PseudoLogLikelihood(same_network, tiny.spec.start_id, tiny.spec.mask_id, 3).score(sources, candidates)
    one_each = [np.eye(len(item), dtype=bool) for item in candidates]
    naive = Naive(same_network, tiny.spec.start_id, tiny.spec.mask_id, 4)
    np.testing.assert_allclose(got, naive.score(sources, candidates, one_each), atol=1e-6)


def test_bartscore_tuned_equals_published_and_is_minus_the_mean_loss(tiny):
    model = bart_like("equal", tiny.spec.vocab_size)
    parameters = sum(item.numel() for item in model.parameters())
    embedded = sum(item.numel() for item in bert_of(DiffScorer("mini")).parameters())
    assert abs(parameters / embedded - 1) < 0.03
    sources, candidates = (
        tiny.tokenize([*SOURCES, *SOURCES, "Rain."]),
        tiny.tokenize([*CANDIDATES, "A.", *CANDIDATES]),
    )
    published = BartScore(model, tuned=False, batch=2).score(sources, candidates)
    np.testing.assert_allclose(BartScore(model, tuned=True).score(sources, candidates), published, atol=1e-4)
    line = [np.concatenate([[0], item, [2]]).astype(np.int64) for item in (sources[3], candidates[3])]
    with torch.inference_mode():
        loss = model(input_ids=torch.from_numpy(line[0])[None], labels=torch.from_numpy(line[1])[None]).loss
    assert published[3] == pytest.approx(-float(loss), abs=1e-4)


@pytest.mark.parametrize("attention", ["prefix", "full"])
def test_counted_operations_are_those_that_torch_counts(folder, attention):
    # torch counts the operations of its own functions only.
    scorer = DiffScorer(folder, attention=AttentionPattern("full"), implementation="reference")

    def score():
        # One draw: where windows differ in their number of masks, the reference pads the last layer's queries.
        return scorer.score(SOURCES[:1], CANDIDATES[1:], attention=attention, draws=1, mask_ratios="uniform")

    work = count_work(scorer, score)
    assert work.evaluations == 1
    assert work.operations == pytest.approx(torch_operations(score), rel=1e-6)


def test_equal_windows_and_shared_prefixes_are_counted_once(tiny):
    def work(rows: list[int]) -> Work:
        texts = [SOURCES[0]] * len(rows), [CANDIDATES[row] for row in rows]
        return count_work(tiny, lambda: tiny.score(*texts, attention="prefix", **GRID))

    first, second, both = work([0]), work([1]), work([0, 1, 0])
    shape = BertShape.of(bert_of(tiny))
    prefix = prefix_operations(shape, np.array([1 + len(tiny.tokenize(SOURCES)[0])]))
    assert both.evaluations == first.evaluations + second.evaluations
    assert both.operations == pytest.approx(first.operations + second.operations - prefix)


def test_counted_operations_of_naive_are_those_that_torch_counts(tiny, same_network):
    shape = BertShape.of(bert_of(tiny))
    source, candidate = tiny.tokenize(SOURCES)[0], tiny.tokenize(CANDIDATES)[0]
    naive = Naive(same_network, tiny.spec.start_id, tiny.spec.mask_id, 5)
    masks = masks_of(tiny, CANDIDATES[:1])
    counted = naive_operations(shape, np.array([len(source)]), np.array([len(candidate)]), 18)
    assert counted[0] == pytest.approx(torch_operations(lambda: naive.score([source], [candidate], masks)), rel=1e-6)
