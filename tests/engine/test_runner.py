"""The engine end to end: the right rows, the right context, under every pattern, budget and cache size."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bench.tiny_model import tiny_model
from diffscore_fast.backbones.loader import load_model
from diffscore_fast.engine import results as results_module
from diffscore_fast.engine.check import check_packing
from diffscore_fast.engine.plan import AttentionPattern, MaskPlan, Observation, Sequences
from diffscore_fast.engine.runner import Runner
from diffscore_fast.engine.windows import compose
from diffscore_fast.errors import CheckpointError, UnsupportedPatternError
from diffscore_fast.ops import LINEAR
from tests.support.networks import BagOfTokens, RotaryDecoder, dense_log_probs

FULL, PREFIX = AttentionPattern("full"), AttentionPattern("prefix")


def make_plan(spans: list[tuple[int, int, int, list[bool]]]) -> MaskPlan:
    sequence, start, stop, masked = zip(*spans, strict=True)
    flat = np.array([flag for flags in masked for flag in flags], dtype=bool)
    return MaskPlan(*(np.array(item, dtype=np.int64) for item in (sequence, start, stop)), flat)


def random_case(generator: np.random.Generator, attention: AttentionPattern, vocab: int, has_start: int = 1):
    """Contexts, targets and spans; in `block`, spans are blocks of the line."""
    contexts = [generator.integers(4, vocab, generator.integers(0, 7)).astype(np.int32) for _ in range(3)]
    context_of = generator.integers(0, 3, 5)
    targets = [generator.integers(4, vocab, generator.integers(1, 9)).astype(np.int32) for _ in range(5)]
    spans = []
    for _ in range(12):
        sequence = int(generator.integers(0, 5))
        size, base = len(targets[sequence]), has_start + len(contexts[context_of[sequence]])
        start, stop = 0, size
        if attention.name == "block":
            start = int(generator.integers(0, size))
            stop = min(size, ((base + start) // attention.block_size + 1) * attention.block_size - base)
        spans.append((sequence, start, stop, (generator.random(stop - start) < 0.5).tolist()))
    return contexts, context_of, targets, spans


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("attention", [FULL, PREFIX], ids=lambda item: item.name)
def test_log_probs_are_those_of_the_right_row_position_and_context(attention, shift, restart):
    """The network's log-prob is a closed form of position and visible tokens: a wrong row gives another value."""
    backbone = BagOfTokens(restart_positions=restart, logit_shift=shift)
    contexts, context_of, targets, spans = random_case(np.random.default_rng(3), attention, 40)
    sequences = Sequences.build(contexts, context_of, targets)
    runner = Runner(backbone, token_budget=16, cache_bytes=1)
    got = runner.run(*compose(backbone.spec, attention, sequences, make_plan(spans)), attention)
    expected = []
    for sequence, _, _, masked in spans:
        context, target = contexts[context_of[sequence]].tolist(), targets[sequence].tolist()
        seen = [2, *context, *(1 if flag else token for token, flag in zip(target, masked, strict=True))]
        first = 0 if attention is FULL else 1 + len(context) - shift
        for place, flag in enumerate(masked):
            if flag:
                at = 1 + len(context) + place - shift
                position = at - first if restart and attention is PREFIX else at
                expected.append(backbone.log_prob(target[place], position, seen))
    assert len(expected) > 20
    np.testing.assert_allclose(got, expected, atol=2e-5)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    attention=st.sampled_from(
        [FULL, PREFIX, AttentionPattern("block", 1), AttentionPattern("block", 2), AttentionPattern("block", 4)]
    ),
    shift=st.sampled_from([0, 1]),
    budget=st.sampled_from([1, 13, 4096]),
    cache_bytes=st.sampled_from([1, 4000, 1 << 20]),
)
def test_engine_equals_dense_computation(seed, attention, shift, budget, cache_bytes):
    """Cache, packs, wanted rows, rotary positions and grouped heads against one dense sequence with a boolean mask."""
    backbone = RotaryDecoder(logit_shift=shift)
    contexts, context_of, targets, spans = random_case(np.random.default_rng(seed), attention, 50)
    sequences = Sequences.build(contexts, context_of, targets)
    runner = Runner(backbone, token_budget=budget, cache_bytes=cache_bytes)
    got = runner.run(*compose(backbone.spec, attention, sequences, make_plan(spans)), attention)
    expected = np.concatenate(
        [
            dense_log_probs(
                backbone,
                attention,
                contexts[context_of[sequence]].tolist(),
                targets[sequence].tolist(),
                masked,
                start,
                stop,
            )
            for sequence, start, stop, masked in spans
        ]
    )
    np.testing.assert_allclose(got, expected, atol=1e-4)


def test_log_probs_of_a_block_do_not_depend_on_which_blocks_are_asked_for():
    backbone = RotaryDecoder(logit_shift=1)
    attention = AttentionPattern("block", 4)
    sequences = Sequences.build([np.zeros(0, np.int32)], np.array([0]), [np.arange(4, 19, dtype=np.int32)])
    blocks = [(0, 0, 3, [True] * 3), (0, 3, 7, [True] * 4), (0, 7, 11, [True] * 4), (0, 11, 15, [True] * 4)]
    together = Runner(backbone).run(*compose(backbone.spec, attention, sequences, make_plan(blocks)), attention)
    alone = [
        Runner(backbone).run(*compose(backbone.spec, attention, sequences, make_plan([item])), attention)
        for item in blocks
    ]
    np.testing.assert_allclose(together, np.concatenate(alone), atol=1e-5)


def test_nested_prefixes_are_one_cached_sequence():
    """The blocks of a text share one clean pass; nothing is computed once per block."""
    backbone = BagOfTokens(restart_positions=False)
    attention = AttentionPattern("block", 4)
    sequences = Sequences.build([np.zeros(0, np.int32)], np.array([0]), [np.arange(4, 19, dtype=np.int32)])
    blocks = [(0, 0, 3, [True] * 3), (0, 3, 7, [True] * 4), (0, 7, 11, [True] * 4), (0, 11, 15, [True] * 4)]
    prefixes, windows = compose(backbone.spec, attention, sequences, make_plan(blocks))
    assert prefixes.lengths.tolist() == [12]
    assert windows.visible.tolist() == [0, 4, 8, 12]
    runner = Runner(backbone)
    runner.run(prefixes, windows, attention)
    assert backbone.rows_embedded == 12 + 16
    runner.run(prefixes, windows, attention)
    assert backbone.rows_embedded == 12 + 16 + 16  # the prefix was still cached


def test_equal_windows_are_evaluated_once_and_prefixes_shared():
    backbone = BagOfTokens(restart_positions=True)
    context, target = np.array([5, 6, 7], np.int32), np.array([8, 9], np.int32)
    sequences = Sequences.build([context, context.copy()], np.array([0, 1, 0]), [target, target, target[::-1].copy()])
    spans = [(0, 0, 2, [True, False]), (1, 0, 2, [True, False]), (0, 0, 2, [True, False]), (2, 0, 2, [False, True])]
    got = Runner(backbone).run(*compose(backbone.spec, PREFIX, sequences, make_plan(spans)), PREFIX)
    assert backbone.rows_embedded == 4 + 2 * 2  # one prefix of 4, two distinct windows of 2
    assert got[0] == got[1] == got[2]


def test_a_span_without_masks_is_not_evaluated():
    backbone = BagOfTokens(restart_positions=True)
    sequences = Sequences.build([np.zeros(0, np.int32)], np.array([0]), [np.array([8, 9], np.int32)])
    plan = make_plan([(0, 0, 2, [False, False])])
    assert len(Runner(backbone).run(*compose(backbone.spec, PREFIX, sequences, plan), PREFIX)) == 0
    assert backbone.rows_embedded == 0


def test_rows_that_were_not_written_are_never_read(monkeypatch):
    """Scratch and cache are filled with NaN: no log-prob changes."""
    backbone = RotaryDecoder(logit_shift=0)
    contexts, context_of, targets, spans = random_case(np.random.default_rng(5), PREFIX, 50)
    sequences = Sequences.build(contexts, context_of, targets)
    expected = Runner(backbone).run(*compose(backbone.spec, PREFIX, sequences, make_plan(spans)), PREFIX)

    def poisoned(make):
        return lambda *args, **kwargs: make(*args, **kwargs).fill_(torch.nan)

    empty, empty_like = torch.empty, torch.empty_like
    monkeypatch.setattr(torch, "empty", poisoned(empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(empty_like))
    got = Runner(backbone).run(*compose(backbone.spec, PREFIX, sequences, make_plan(spans)), PREFIX)
    np.testing.assert_array_equal(got, expected)


def test_a_run_that_fails_half_way_leaves_no_half_written_cache(monkeypatch):
    backbone = BagOfTokens(restart_positions=True)
    contexts, context_of, targets, spans = random_case(np.random.default_rng(7), PREFIX, 40)
    laid_out = compose(backbone.spec, PREFIX, Sequences.build(contexts, context_of, targets), make_plan(spans))
    expected = Runner(BagOfTokens(restart_positions=True)).run(*laid_out, PREFIX)
    runner = Runner(backbone)
    keys_values = backbone.keys_values
    monkeypatch.setattr(backbone, "keys_values", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        runner.run(*laid_out, PREFIX)
    monkeypatch.setattr(backbone, "keys_values", keys_values)
    np.testing.assert_array_equal(runner.run(*laid_out, PREFIX), expected)


def test_an_estimator_sees_the_log_probs_of_earlier_rounds():
    """An estimator may plan again: this one scores the token with the lowest log-prob once more."""

    class Twice:
        def plan(self, observed: list[Observation]) -> MaskPlan | None:
            if len(observed) == 0:
                return make_plan([(0, 0, 2, [True, False]), (0, 0, 2, [False, True])])
            if len(observed) == 1:
                worst = int(np.argmin(observed[0].log_probs))
                return make_plan([(0, 0, 2, [place == worst for place in range(2)])])
            return None

        def reduce(self, observed: list[Observation]) -> list[np.ndarray]:
            return [item.log_probs for item in observed]

    backbone = BagOfTokens(restart_positions=True)
    sequences = Sequences.build([np.array([5, 6], np.int32)], np.array([0]), [np.array([8, 9], np.int32)])
    first, second = Runner(backbone).evaluate(Twice(), sequences, PREFIX)
    assert second[0] == first.min()
    assert backbone.rows_embedded == 3 + 2 * 2 + 2  # the prefix stayed cached between rounds


def test_unknown_pattern_and_block_size_are_errors():
    backbone = RotaryDecoder()
    with pytest.raises(UnsupportedPatternError, match="it has: block, full, prefix"):
        backbone.spec.pattern("sliding")
    with pytest.raises(UnsupportedPatternError, match="it has: 1, 2, 4"):
        backbone.spec.pattern("block", 3)


@pytest.mark.parametrize("fault", ["leak", "nan"])
def test_a_network_that_leaks_or_is_nan_fails_its_check(fault):
    class Faulty(BagOfTokens):
        def attention_outputs(self, layer, hidden, attended):
            out = super().attention_outputs(layer, hidden, attended)
            return out + out.mean(0) if fault == "leak" else out * torch.nan

    for attention in (FULL, PREFIX, AttentionPattern("block", 2)):
        check_packing(Runner(BagOfTokens(restart_positions=True)), attention)
        check_packing(Runner(RotaryDecoder()), attention)
    with pytest.raises(CheckpointError, match="neighbours|beside|finite"):
        check_packing(Runner(Faulty(restart_positions=True)), PREFIX)


def test_in_16_bits_leaking_fails_and_rounding_by_the_number_of_rows_does_not():
    """A GPU multiplies another number of rows by another kernel, which rounds otherwise."""

    class Rounding(RotaryDecoder):
        def attention_outputs(self, layer, hidden, attended):
            return super().attention_outputs(layer, hidden, attended) * (1 + 2**-8 * (len(hidden) % 3))

    class Leaking(RotaryDecoder):
        def attention_outputs(self, layer, hidden, attended):
            out = super().attention_outputs(layer, hidden, attended)
            return out + out.mean(0)

    for attention in (FULL, PREFIX, AttentionPattern("block", 2)):
        check_packing(Runner(Rounding(dtype=torch.bfloat16)), attention)
        with pytest.raises(CheckpointError, match="beside"):
            check_packing(Runner(Rounding()), attention)
        with pytest.raises(CheckpointError, match="beside"):
            check_packing(Runner(Leaking(dtype=torch.bfloat16)), attention)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_whose_bits_depend_on_the_number_of_rows_fail_the_check(monkeypatch, dtype):
    """As torch's linear does in bfloat16, which sums a single row by another kernel."""
    runner = Runner(load_model("mini", dtype=dtype).backbone)
    name = runner.backbone.linear_implementation
    sound = LINEAR.implementations[name]

    def faulty(x: Tensor, *others: object) -> Tensor:
        y = sound.function(x, *others)
        return y * (1 + 2 * torch.finfo(dtype).eps) if len(x) == 1 else y

    for attention in (FULL, PREFIX, AttentionPattern("block", 4)):
        check_packing(runner, attention)
    monkeypatch.setitem(LINEAR.implementations, name, replace(sound, function=faulty))
    for attention in (FULL, PREFIX):
        with pytest.raises(CheckpointError, match="bits .* depend on how many sequences are beside it"):
            check_packing(runner, attention)


def test_the_next_pack_is_launched_before_results_are_waited_for(monkeypatch):
    """As on a GPU, where results arrive after a call returns: they are read late, and only once."""
    backbone, events = BagOfTokens(restart_positions=True), []

    class Late:
        def __init__(self, values: Tensor) -> None:
            self._values, self._place = values.clone(), len(events)
            values.fill_(torch.nan)  # the device's memory may be used again
            events.append(("launched", self._place))

        def numpy(self) -> np.ndarray:
            events.append(("read", self._place))
            return self._values.numpy()

    contexts, context_of, targets, spans = random_case(np.random.default_rng(5), PREFIX, 40)
    laid_out = compose(backbone.spec, PREFIX, Sequences.build(contexts, context_of, targets), make_plan(spans))
    expected = Runner(backbone).run(*laid_out, PREFIX)
    told = []
    monkeypatch.setattr(results_module, "Arriving", Late)
    got = Runner(backbone, token_budget=1).run(*laid_out, PREFIX, told.append)
    np.testing.assert_allclose(got, expected, atol=1e-6)
    packs = [place for what, place in events if what == "launched"]
    assert len(packs) > 3 and [place for what, place in events if what == "read"] == packs
    for this, following in zip(packs[:-1], packs[1:], strict=True):
        assert events.index(("launched", following)) < events.index(("read", this))
    assert len(told) == len(packs)


@pytest.mark.parametrize("attention", [FULL, PREFIX, AttentionPattern("block", 4)], ids=lambda item: item.name)
def test_all_tensors_that_a_network_gets_are_on_its_device(tmp_path, monkeypatch, attention):
    """On the device `meta`, whose tensors have no values and mix with no others; only results go to the host."""
    backbone, shapes = load_model(tiny_model(tmp_path), dtype=torch.float32).backbone.to("meta"), []

    class Counted:
        def __init__(self, values: Tensor) -> None:
            assert values.device.type == "meta"
            shapes.append(len(values))

        def numpy(self) -> np.ndarray:
            return np.zeros(shapes[-1], np.float32)

    monkeypatch.setattr(results_module, "Arriving", Counted)
    contexts, context_of, targets, spans = random_case(np.random.default_rng(1), attention, 40)
    sequences = Sequences.build(contexts, context_of, targets)
    laid_out = compose(backbone.spec, attention, sequences, make_plan(spans))
    runner = Runner(backbone)
    assert set(runner.implementations.values()) == {"reference"}
    asked = len(laid_out[1].wanted)
    assert len(runner.run(*laid_out, attention)) == asked and 0 < sum(shapes) <= asked
    assert len(runner.sample(*laid_out, attention, np.full(asked, 0.5))) == asked


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("attention", [FULL, PREFIX, AttentionPattern("block", 4)], ids=lambda item: item.name)
def test_a_gpu_gives_what_the_cpu_gives(attention):
    contexts, context_of, targets, spans = random_case(np.random.default_rng(1), attention, 40)
    found = []
    for device in ("cpu", "cuda"):
        backbone = load_model("mini", device=device, dtype=torch.float32).backbone
        laid_out = compose(backbone.spec, attention, Sequences.build(contexts, context_of, targets), make_plan(spans))
        found.append(Runner(backbone, token_budget=8).run(*laid_out, attention))
    np.testing.assert_allclose(found[1], found[0], atol=1e-4)
