"""SDAR and A2D: what is read of their checkpoints. `test_own_code.py` compares their numbers with their own files."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from diffscore_fast import DiffScorer, LikelihoodBounds
from diffscore_fast.backbones.loader import load_model
from diffscore_fast.engine.plan import AttentionPattern, MaskPlan, Sequences
from diffscore_fast.engine.windows import split_at_blocks
from diffscore_fast.errors import CheckpointError, UnsupportedPatternError
from tests.support.block_checkpoints import FAMILIES, save_block_model
from tests.support.checkpoints import PADDED_ROWS

SOURCES = ["The cat sat on the mat.", "Two people died.", "Ça coûte 3 €."]
CANDIDATES = ["A cat sat.", "Two people died on a cruise ship.", "3 €, non?"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("block")
    return {family: save_block_model(family, root / family) for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_spec_of_each_family(folders, family):
    loaded = load_model(folders[family])
    spec = loaded.backbone.spec
    assert loaded.tokenizer.token_name(spec.mask_id) == FAMILIES[family][0]
    assert spec.vocab_size == loaded.tokenizer.vocab_size + PADDED_ROWS and spec.excluded_ids == ()
    assert spec.logit_shift == 0 and spec.start_id is None and spec.family == family
    block = spec.patterns["block"]
    assert not block.blocks_from_target and block.prefix_mask == "bidirectional"
    assert spec.head_dim == (16 if family in ("sdar", "a2d-qwen3") else 8)
    if family == "sdar":
        assert list(spec.patterns) == ["block"] and spec.default_pattern == "block"
        assert block.default_block_size == 4
    else:
        assert list(spec.patterns) == ["full", "block"] and spec.default_pattern == "full"
        assert block.default_block_size == 32


def test_block_sizes_come_from_the_file_then_from_the_name(tmp_path):
    named = load_model(save_block_model("sdar", tmp_path / "SDAR-1.7B-Chat-b32")).backbone.spec
    assert named.patterns["block"].default_block_size == 32 and named.pattern("block", 64)
    stated = load_model(save_block_model("sdar", tmp_path / "SDAR-4B-b16", block_size=8)).backbone.spec
    assert stated.patterns["block"].block_sizes == (8,)
    with pytest.raises(UnsupportedPatternError, match="not trained with block size 4; it has: 8"):
        stated.pattern("block", 4)
    a2d = load_model(save_block_model("a2d-qwen3", tmp_path / "Qwen3-0.6B-diffusion-bd3lm-v0.1")).backbone.spec
    assert a2d.default_pattern == "block"
    with pytest.raises(CheckpointError, match="block_size must be a whole number above 0, not '4'"):
        load_model(save_block_model("sdar", tmp_path / "text", block_size="4"))


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_do_not_depend_on_neighbours(folders, family):
    scorer = DiffScorer(folders[family], dtype=torch.float32)
    for direction in ("conditional", "pmi"):
        together = scorer.score(SOURCES, CANDIDATES, direction=direction, attention="block", block_size=8, draws=9)
        assert together.status == ["ok"] * 3 and together.signature.block_size == 8
        for row in range(3):
            rows = slice(row, row + 1)
            alone = scorer.score(
                SOURCES[rows], CANDIDATES[rows], direction=direction, attention="block", block_size=8, draws=9
            )
            np.testing.assert_allclose(alone.scores, together.scores[row], atol=1e-6)


def test_the_grid_begins_at_the_line_not_at_the_candidate(folders):
    """Spans of a plan end at multiples of the block size in the line, whatever the context's length."""
    loaded = load_model(folders["sdar"])
    attention, target = AttentionPattern("block", 4), np.arange(10, dtype=np.int32)
    for context in range(6):
        sequences = Sequences.build([np.arange(context, dtype=np.int32)], np.zeros(1, int), [target])
        plan = MaskPlan(np.zeros(1, int), np.zeros(1, int), np.full(1, 10), np.ones(10, bool))
        split = split_at_blocks(loaded.backbone.spec, attention, sequences, plan)
        assert ((split.start[1:] + context) % 4 == 0).all() and (split.stop[:-1] == split.start[1:]).all()
        assert split.stop[0] == 4 - context % 4


def test_bounds_hold_the_exact_value(folders):
    scorer = LikelihoodBounds(folders["sdar"], block_size=4)
    exact = scorer.exact(CANDIDATES).exact
    table = scorer.estimate(CANDIDATES, orders=64, surrogate_orders=64)
    assert (table.lower - 4 * table.stderr_lower <= exact).all()
    assert (table.upper + 4 * table.stderr_upper >= exact).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["SDARMoeForCausalLM"]}, "SDARMoeForCausalLM is a mixture of experts"),
        ({"attention_bias": True}, "attention_bias = True: not supported in models of type 'sdar'"),
        ({"use_sliding_window": True}, "use_sliding_window = True"),
        ({"head_dim": 8}, "wants"),
        ({"head_dim": "16"}, "head_dim must be a whole number above 0, not '16'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "only plain rotary positions"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(tmp_path, changes, message):
    with pytest.raises(CheckpointError, match=message):
        load_model(save_block_model("sdar", tmp_path / "model", **changes))
