"""What the throughput bench compares: peers that mean what they say, and counts of operations that are right."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig, BertForMaskedLM

from bench.memory import tiny_model
from bench.operations import BertShape, engine_operations, naive_operations
from bench.peers.bartscore import BartScore, bart_like
from bench.peers.naive import Naive
from bench.peers.pll import PseudoLogLikelihood
from diffscore_fast import DiffScorer
from diffscore_fast.engine.random import target_key
from diffscore_fast.engine.runner import Runner
from diffscore_fast.engine.windows import Attention, Sequences, compose
from diffscore_fast.estimators.masks import MaskDesign, draw_masks
from diffscore_fast.estimators.reconstruction import MaskedReconstruction, ReconstructionConfig

SOURCES = ["Two passengers were found dead on a cruise ship.", "The old river falls over the green house at night."]
CANDIDATES = ["Two people died on a ship.", "It rained over the house and over the river."]
GRID = MaskDesign(20, "grid")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return DiffScorer(tiny_model(tmp_path_factory.mktemp("tiny")), attention=Attention("full"))


@pytest.fixture(scope="module")
def in_transformers(tiny, tmp_path_factory):
    return BertForMaskedLM.from_pretrained(tiny_model(tmp_path_factory.mktemp("tiny"))).eval()


def tokens(scorer: DiffScorer, texts: list[str]) -> list[np.ndarray]:
    return [item.ids for item in scorer._tokenizer.encode(texts)]


def masks_of(candidates: list[np.ndarray]) -> list[np.ndarray]:
    lengths = np.array([len(item) for item in candidates])
    keys = np.array([target_key(0, item) for item in candidates], np.uint64)
    drawn = draw_masks(GRID, keys, lengths, fill_empty=True)
    parts = np.split(drawn.masked, np.cumsum(lengths * GRID.num_draws)[:-1])
    return [part.reshape(GRID.num_draws, -1) for part in parts]


def test_naive_is_the_same_score_by_other_means(tiny, in_transformers):
    sources, candidates = tokens(tiny, SOURCES), tokens(tiny, CANDIDATES)
    ours = tiny.score(SOURCES, CANDIDATES, attention="full", draws=20, mask_ratios="grid", seed=0)
    spec = tiny.spec
    for batch in (1, 7):
        naive = Naive(in_transformers, spec.start_id, spec.mask_id, batch)
        np.testing.assert_allclose(naive.score(sources, candidates, masks_of(candidates)), ours.scores, atol=1e-5)


def test_pseudo_log_likelihood_masks_one_token_at_a_time(tiny, in_transformers):
    sources, candidates = tokens(tiny, SOURCES), tokens(tiny, CANDIDATES)
    got = PseudoLogLikelihood(in_transformers, tiny.spec.start_id, tiny.spec.mask_id, 3).score(sources, candidates)
    one_each = [np.eye(len(item), dtype=bool) for item in candidates]
    naive = Naive(in_transformers, tiny.spec.start_id, tiny.spec.mask_id, 4)
    np.testing.assert_allclose(got, naive.score(sources, candidates, one_each), atol=1e-6)


def test_bartscore_tuned_equals_published_and_is_minus_the_mean_loss(tiny):
    model = bart_like("equal", tiny.spec.vocab_size)
    parameters = sum(item.numel() for item in model.parameters())
    embedded = sum(item.numel() for item in DiffScorer("mini")._runner.backbone.parameters())
    assert abs(parameters / embedded - 1) < 0.03
    sources, candidates = tokens(tiny, [*SOURCES, *SOURCES, "Rain."]), tokens(tiny, [*CANDIDATES, "A.", *CANDIDATES])
    published = BartScore(model, tuned=False, batch=2).score(sources, candidates)
    np.testing.assert_allclose(BartScore(model, tuned=True).score(sources, candidates), published, atol=1e-4)
    line = [np.concatenate([[0], item, [2]]).astype(np.int64) for item in (sources[3], candidates[3])]
    with torch.inference_mode():
        loss = model(input_ids=torch.from_numpy(line[0])[None], labels=torch.from_numpy(line[1])[None]).loss
    assert published[3] == pytest.approx(-float(loss), abs=1e-4)


@pytest.mark.parametrize("attention", [Attention("prefix"), Attention("full")], ids=lambda item: item.name)
def test_counted_operations_are_those_that_torch_counts(tiny, attention):
    backbone = tiny._runner.backbone
    source, candidate = tokens(tiny, SOURCES)[0], tokens(tiny, CANDIDATES)[1]
    sequences = Sequences.build([source], np.array([0]), [candidate])
    config = ReconstructionConfig(design=MaskDesign(1, "uniform"))  # one window: the reference pads no queries
    plan = MaskedReconstruction(config, sequences, np.array([5], np.uint64)).plan([])
    prefixes, windows = compose(tiny.spec, attention, sequences, plan)
    runner = Runner(backbone, implementation="reference")
    with FlopCounterMode(display=False) as counter:
        runner.run(prefixes, windows, attention)
    total, count = engine_operations(BertShape.of(backbone), prefixes, windows)
    assert count == 1
    assert total == pytest.approx(counter.get_total_flops(), rel=1e-6)


def test_counted_operations_of_naive_are_those_that_torch_counts(tiny):
    shape = BertShape.of(tiny._runner.backbone)
    config = BertConfig(vocab_size=shape.vocabulary, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                        intermediate_size=32, attn_implementation="eager")  # fmt: skip
    source, candidate = tokens(tiny, SOURCES)[0], tokens(tiny, CANDIDATES)[0]
    naive = Naive(BertForMaskedLM(config).eval(), tiny.spec.start_id, tiny.spec.mask_id, 5)
    with FlopCounterMode(display=False) as counter:
        naive.score([source], [candidate], masks_of([candidate]))
    counted = naive_operations(shape, np.array([len(source)]), np.array([len(candidate)]), GRID.num_draws)
    assert counted[0] == pytest.approx(counter.get_total_flops(), rel=1e-6)
