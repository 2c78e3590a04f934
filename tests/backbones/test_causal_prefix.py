"""Llama with a causal clean prefix and a bidirectional window, against transformers' Llama under the same mask."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from diffscore_fast import DiffScorer, LikelihoodBounds
from diffscore_fast.backbones.loader import load_model
from diffscore_fast.backbones.spec import PatternSpec
from diffscore_fast.engine.plan import AttentionPattern, MaskPlan, Sequences
from diffscore_fast.engine.runner import Runner
from diffscore_fast.engine.windows import compose, split_at_blocks
from diffscore_fast.errors import CheckpointError, UnsupportedPatternError
from diffscore_fast.training.objective import masked_losses
from diffscore_fast.training.patterns import lay_left_to_right, lay_prefix, pack_layouts
from tests.support.checkpoints import save_causal_prefix_model

SOURCES = ["The cat sat on the mat.", "Two people died.", "", "The cat sat on the mat."]
CANDIDATES = ["A cat sat.", "Two people died on a cruise ship.", "Ça coûte 3 €.", "The mat was sat on."]
PREFIX = AttentionPattern("prefix")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_causal_prefix_model(tmp_path_factory.mktemp("causal") / "model")


@pytest.fixture(scope="module")
def loaded(folder):
    return load_model(folder, dtype=torch.float32)


def encoded(loaded, texts):
    return [item.ids.astype(np.int64) for item in loaded.tokenizer.encode(texts)]


def twin_log_probs(folder, spec, context, target, masked, block_size=None):
    """One line, one explicit boolean mask [1, 1, n, n], all logits, by transformers; line by line for each block."""
    if block_size is not None:
        found = []
        for start in range(0, len(target), block_size):
            own = masked[start : start + block_size]
            separator = spec.pattern("prefix").separator_ids if len(context) else ()
            before = [*context, *separator, *target[:start]]
            if own.any():
                spec_of_part = replace_separator(spec)
                found.append(twin_log_probs(folder, spec_of_part, before, target[start : start + block_size], own))
        return np.concatenate(found)
    import transformers

    network = transformers.LlamaForCausalLM.from_pretrained(folder / "twin", attn_implementation="eager").eval()
    separator = spec.pattern("prefix").separator_ids if len(context) else ()
    line = [spec.start_id, *context, *separator, *target]
    base = len(line) - len(target)
    ids = [spec.mask_id if place >= base and masked[place - base] else token for place, token in enumerate(line)]
    sees = torch.ones(len(line), len(line), dtype=torch.bool).tril()
    sees[base - 1 :] = True  # the window begins with the row that predicts its first token
    blind = torch.zeros(len(line), len(line)).masked_fill(~sees, torch.finfo(torch.float32).min)
    with torch.no_grad():
        logits = network(torch.tensor([ids]), attention_mask=blind[None, None]).logits[0]
    logits[:, spec.mask_id] = -torch.inf
    log_probs = logits.double().log_softmax(-1)
    return np.array([float(log_probs[base + i - 1, target[i]]) for i in np.flatnonzero(masked)])


def replace_separator(spec):
    """The spec without a separator: what stands before a block is then its context as it is."""
    pattern = replace(spec.pattern("prefix"), separator_ids=())
    return replace(spec, patterns={"prefix": pattern})


def plan_of(targets, masks):
    rows, lengths = np.arange(len(targets)), np.array([len(item) for item in targets])
    return MaskPlan(rows, np.zeros_like(rows), lengths, np.concatenate(masks))


@pytest.mark.parametrize("implementation", ["auto", "reference"])
def test_log_probs_equal_those_of_transformers_under_the_same_mask(folder, loaded, implementation):
    spec = loaded.backbone.spec
    contexts, targets = encoded(loaded, SOURCES), encoded(loaded, CANDIDATES)
    masks = [np.arange(len(item)) % 3 != 1 for item in targets]
    laid_out = compose(spec, PREFIX, Sequences.build(contexts, np.arange(4), targets), plan_of(targets, masks))
    got = Runner(loaded.backbone, token_budget=20, implementation=implementation).run(*laid_out, PREFIX)
    expected = [twin_log_probs(folder, spec, *row) for row in zip(contexts, targets, masks, strict=True)]
    assert np.concatenate(expected).std() > 0.1
    np.testing.assert_allclose(got, np.concatenate(expected), atol=2e-5)


@pytest.mark.parametrize("block_size", [2, 4, 64])
def test_blocks_equal_transformers_with_everything_before_the_block_as_its_prefix(folder, loaded, block_size):
    spec, attention = loaded.backbone.spec, AttentionPattern("block", block_size)
    contexts, targets = encoded(loaded, SOURCES), encoded(loaded, CANDIDATES)
    masks = [np.arange(len(item)) % 3 != 1 for item in targets]
    sequences = Sequences.build(contexts, np.arange(4), targets)
    plan = split_at_blocks(spec, attention, sequences, plan_of(targets, masks))
    got = Runner(loaded.backbone, token_budget=20).run(*compose(spec, attention, sequences, plan), attention)
    expected = [twin_log_probs(folder, spec, *row, block_size) for row in zip(contexts, targets, masks, strict=True)]
    np.testing.assert_allclose(got, np.concatenate(expected), atol=2e-5)


@pytest.mark.parametrize("block_size", [1, 4])
def test_the_exact_likelihood_has_blocks_that_begin_with_the_text(folder, loaded, block_size):
    """With blocks of one token it is the left-to-right likelihood."""
    targets = encoded(loaded, CANDIDATES[:2])
    found = LikelihoodBounds(folder, block_size=block_size, dtype=torch.float32).exact(CANDIDATES[:2])
    for row, target in enumerate(targets):
        layout = lay_left_to_right(target[:0], target, loaded.backbone.spec)
        with torch.no_grad():
            left_to_right = -float(masked_losses(loaded.backbone, pack_layouts([layout])).tokens.sum())
        assert (abs(found.exact[row] - left_to_right) < 1e-4) == (block_size == 1)


def test_what_is_trained_is_what_is_scored(folder, loaded):
    """The trainer's layout, copies of the window included, has transformers' log-probs, too."""
    spec = loaded.backbone.spec
    for context, target in zip(encoded(loaded, SOURCES), encoded(loaded, CANDIDATES), strict=True):
        masks = np.stack([np.arange(len(target)) % 3 != 1, np.arange(len(target)) % 2 == 0])
        with torch.no_grad():
            losses = masked_losses(loaded.backbone, pack_layouts([lay_prefix(context, target, masks, spec)])).tokens
        expected = [twin_log_probs(folder, spec, context, target, mask) for mask in masks]
        np.testing.assert_allclose(-losses.numpy(), np.concatenate(expected), atol=2e-5)


def test_left_to_right_log_probs_equal_those_of_transformers(folder, loaded):
    import transformers

    twin = transformers.LlamaForCausalLM.from_pretrained(folder / "twin").eval()
    spec = loaded.backbone.spec
    for context, target in zip(encoded(loaded, SOURCES), encoded(loaded, CANDIDATES), strict=True):
        separator = spec.pattern("prefix").separator_ids if len(context) else ()
        line = [spec.start_id, *context, *separator, *target]
        with torch.no_grad():
            losses = masked_losses(loaded.backbone, pack_layouts([lay_left_to_right(context, target, spec)])).tokens
            logits = twin(torch.tensor([line])).logits[0]
        logits[:, spec.mask_id] = -torch.inf
        rows = torch.arange(len(line) - len(target), len(line))
        expected = logits.log_softmax(-1)[rows - 1, torch.from_numpy(target)]
        torch.testing.assert_close(-losses, expected, atol=2e-5, rtol=0)


def test_the_prefix_is_read_causally(loaded):
    """A bidirectional prefix gives other numbers; the first of two windows over one prefix does not see the other."""
    contexts, targets = encoded(loaded, SOURCES[:1]), encoded(loaded, CANDIDATES[:1])
    masks = [np.ones(len(targets[0]), dtype=bool)]
    values = {}
    for kind in ("causal", "bidirectional"):
        backbone = load_model_with(loaded, kind)
        laid_out = compose(
            backbone.spec, PREFIX, Sequences.build(contexts, np.arange(1), targets), plan_of(targets, masks)
        )
        values[kind] = Runner(backbone).run(*laid_out, PREFIX)
    assert np.abs(values["causal"] - values["bidirectional"]).max() > 1e-2


def load_model_with(loaded, kind):
    """The same network with another `prefix_mask` in its spec."""
    import copy

    backbone = copy.copy(loaded.backbone)
    pattern = replace(loaded.backbone.spec.pattern("prefix"), prefix_mask=kind)
    backbone.spec = replace(loaded.backbone.spec, patterns={"prefix": pattern})
    return backbone


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_prefix_read_before_gives_the_same_bits(folder, dtype):
    """A cached prefix, a fresh one, and one beside others: scores are equal bit for bit."""
    together = DiffScorer(folder, dtype=dtype)
    first = together.score(SOURCES, CANDIDATES)
    again = together.score(SOURCES, CANDIDATES)
    assert first.status == ["ok", "ok", "empty_source", "ok"]
    np.testing.assert_array_equal(again.scores, first.scores)
    for row in (0, 1, 3):
        alone = DiffScorer(folder, dtype=dtype).score(SOURCES[row : row + 1], CANDIDATES[row : row + 1])
        np.testing.assert_array_equal(alone.scores, first.scores[row : row + 1])


def test_other_directions_and_patterns(folder):
    scorer = DiffScorer(folder, dtype=torch.float32)
    rows = [0, 1, 3]
    sources, candidates = [SOURCES[row] for row in rows], [CANDIDATES[row] for row in rows]
    for direction in ("marginal", "pmi", "reverse"):
        found = scorer.score(sources, candidates, direction=direction)
        assert found.status == ["ok"] * 3 and np.isfinite(found.scores).all()
    with pytest.raises(UnsupportedPatternError, match="'full'; it has: block, prefix"):
        scorer.score(sources, candidates, attention="full")


@pytest.mark.parametrize(
    "patterns", [{"prefix": {"prefix_mask": "upwards"}}, {"full": {"prefix_mask": "causal"}, "prefix": {}}]
)
def test_an_unknown_prefix_mask_is_named(folder, tmp_path, patterns):
    changed = shutil.copytree(folder, tmp_path / "changed", ignore=shutil.ignore_patterns("twin"))
    config = json.loads((changed / "config.json").read_text())
    config["diffscore_fast"]["patterns"] = patterns
    (changed / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="prefix_mask"):
        load_model(changed)


def test_a_prefix_is_bidirectional_unless_stated():
    assert PatternSpec(8).prefix_block(0) == 0 and PatternSpec(8, prefix_mask="causal").prefix_block(0) == 1
