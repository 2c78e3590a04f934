"""The runner: plans in, log-probabilities of their masked tokens out.

The windows of a call (`_Call`) are cut into waves (`_Wave`), whose prefixes fit the cache together, and a wave is cut
into packs of a token budget. `forward.py` passes a pack through the network; `results.py` collects its values.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch

from diffscore_fast import ops
from diffscore_fast.backbones.spec import BackboneSpec, OpaqueBackbone, SplitBackbone
from diffscore_fast.engine.cache import PrefixCache
from diffscore_fast.engine.forward import ForwardPass, forward_pass
from diffscore_fast.engine.memory import DEFAULT_CACHE_BYTES, DEFAULT_PLAN_TOKENS, DEFAULT_TOKEN_BUDGET
from diffscore_fast.engine.packing import distinct_windows, pack_windows
from diffscore_fast.engine.packs import PrefixPack, WindowPack
from diffscore_fast.engine.plan import AttentionPattern, Estimator, MaskPlan, Observation, Result, Sequences
from diffscore_fast.engine.profile import stage
from diffscore_fast.engine.ragged import places_in, take_segments
from diffscore_fast.engine.results import Results
from diffscore_fast.engine.windows import Prefixes, Windows, compose, cut_plan, split_at_blocks
from diffscore_fast.errors import DeviceMemoryError, is_out_of_memory, memory_named
from diffscore_fast.process import is_forked

NO_ROOM_FOR_PLANS = (
    "the host has no room to lay out windows or to collect their values; set a smaller memory= (--memory), or pass "
    "fewer rows at once"
)


class Runner:
    """Evaluates plans with one backbone, for any number of threads, and after a fork.

    Threads take turns. A forked child computes in one thread (`torch.set_num_threads(1)`, on first use there).

    Parameters
    ----------
    backbone : SplitBackbone or OpaqueBackbone
    token_budget : int
        Maximum number of window tokens evaluated at once. It bounds memory and changes no score beyond rounding. Where
        a device has no room for a pack, the pack is halved and the budget falls.
    cache_bytes : int
        Size of the prefix cache.
    plan_tokens : int
        Maximum number of window tokens laid out at once; a larger plan is evaluated part by part.
    implementation : str
        "auto", or a name: operations that have it run by it, the others by "auto".
    """

    def __init__(
        self,
        backbone: SplitBackbone | OpaqueBackbone,
        *,
        token_budget: int = DEFAULT_TOKEN_BUDGET,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        plan_tokens: int = DEFAULT_PLAN_TOKENS,
        implementation: str = ops.AUTO,
    ) -> None:
        self.backbone = backbone
        self.token_budget = token_budget
        self.plan_tokens = plan_tokens
        self._cache = PrefixCache(backbone.spec, backbone.dtype, backbone.device, cache_bytes)
        self._forward = forward_pass(backbone, self._cache, implementation)
        self._locks: dict[int, threading.RLock] = {}  # by process
        self._process = None if is_forked() else os.getpid()  # that last computed; a fork has not yet
        self._turns = 0  # counts the calls that had the cache, nested ones included

    @property
    def implementations(self) -> dict[str, str]:
        """The implementation that each operation of a score resolves to, by the operation's name."""
        return self._forward.implementations

    def evaluate(
        self,
        estimator: Estimator[Result],
        sequences: Sequences,
        attention: AttentionPattern,
        progress: Callable[[int], None] | None = None,
    ) -> Result:
        """Run an estimator's rounds and reduce them. `progress` is given the window tokens of each pack when done."""
        observed: list[Observation] = []
        while (plan := _planned(estimator, observed)) is not None:
            values, pattern = [np.zeros(0, dtype=np.float32)], plan.attention or attention
            spans = plan
            if pattern.name == "block":
                with stage("plan"), memory_named(NO_ROOM_FOR_PLANS):
                    spans = split_at_blocks(self.backbone.spec, pattern, sequences, plan)
            for part in cut_plan(pattern, sequences, spans, self.plan_tokens):
                with stage("plan"), memory_named(NO_ROOM_FOR_PLANS):
                    prefixes, windows = compose(self.backbone.spec, pattern, sequences, part)
                values.append(self.run(prefixes, windows, pattern, progress))
            observed.append(Observation(plan, np.concatenate(values)))
        with stage("reduce"), memory_named(NO_ROOM_FOR_PLANS):
            return estimator.reduce(observed)

    def run(
        self,
        prefixes: Prefixes,
        windows: Windows,
        attention: AttentionPattern,
        progress: Callable[[int], None] | None = None,
    ) -> np.ndarray:
        """Log-probability float32 [M] of every target of the windows. Equal windows are evaluated once."""
        with stage("plan"), memory_named(NO_ROOM_FOR_PLANS):
            first, representative = distinct_windows(windows)
            asked = first[np.diff(windows.wanted_offsets)[first] > 0]
            waves = self._waves(prefixes, windows, asked)
        results = Results(np.zeros(len(windows.wanted), dtype=np.float32), progress)
        self._compute_waves(waves, _Call(prefixes, windows, attention, asked, results))
        # Every window takes its representative's values; representatives take their own.
        with stage("reduce"):
            return results.values[take_segments(windows.wanted_offsets, first[representative])]

    def sample(
        self, prefixes: Prefixes, windows: Windows, attention: AttentionPattern, numbers: np.ndarray
    ) -> np.ndarray:
        """A token int32 [M] for every wanted row, from the model's distribution by the uniform numbers float64 [M].

        Targets are not read. Equal windows are evaluated each, since each has numbers of its own.
        """
        return self._tokens(prefixes, windows, attention, numbers=numbers)

    def best(
        self,
        prefixes: Prefixes,
        windows: Windows,
        attention: AttentionPattern,
        progress: Callable[[int], None] | None = None,
    ) -> np.ndarray:
        """The most probable token int32 [M] of every wanted row. Targets are not read."""
        return self._tokens(prefixes, windows, attention, progress, best=True)

    def _tokens(
        self,
        prefixes: Prefixes,
        windows: Windows,
        attention: AttentionPattern,
        progress: Callable[[int], None] | None = None,
        **chosen_by: Any,
    ) -> np.ndarray:
        """A token int32 [M] for every wanted row; `chosen_by` is `numbers` or `best` of `_Call`."""
        asked = np.arange(len(windows))
        waves = self._waves(prefixes, windows, asked)
        results = Results(np.zeros(len(windows.wanted), dtype=np.int32), progress)
        self._compute_waves(waves, _Call(prefixes, windows, attention, asked, results, **chosen_by))
        return results.values

    def clear_cache(self) -> None:
        """Drop all cached prefixes, once the calls of other threads are done. It changes no score."""
        with self._turn():
            self._cache.forget()

    def _waves(
        self, prefixes: Prefixes, windows: Windows, asked: np.ndarray
    ) -> list[tuple[np.ndarray, list[np.ndarray]]]:
        """The prefixes and the packs (indices into `asked`) of each wave."""
        return pack_windows(
            windows.prefix[asked],
            windows.lengths[asked],
            prefixes.lengths,
            self.token_budget,
            self._cache.capacity_rows,
        )

    def _compute_waves(self, waves: list[tuple[np.ndarray, list[np.ndarray]]], call: _Call) -> None:
        """Compute a call wave by wave and collect its results; no other thread has the cache meanwhile."""
        with self._turn():
            try:
                for prefixes_used, packs in waves:
                    self._compute_packs(packs, _Wave(self, call, prefixes_used))
                call.results.collect()
            except BaseException:
                self._cache.forget()  # reserved rows may not have been written
                raise

    def _cache_prefixes(self, prefixes: Prefixes, used: np.ndarray, attention: AttentionPattern) -> np.ndarray:
        """Compute those of the prefixes `used` that are not cached.

        Returns the first cache row int64 [P + 1] of each prefix, by prefix index; the last one stands for no prefix.
        """
        starts = np.zeros(len(prefixes.keys) + 1, dtype=np.int64)
        if not len(used):
            return starts
        starts[used], absent = self._cache.reserve([prefixes.keys[i] for i in used], prefixes.lengths[used])
        missing = used[absent]
        if not len(missing):
            return starts
        # Contexts first, each in the cache rows of one of its prefixes, and from there to the others'.
        lengths = prefixes.context_lengths
        having = missing[lengths[missing] > 0]
        cached = {prefixes.context[index]: index for index in np.setdiff1d(used, missing) if lengths[index]}
        giver = {context: index for index in having[::-1] for context in [prefixes.context[index]]} | cached
        leaders = np.array([index for index in having if giver[prefixes.context[index]] == index], dtype=np.int64)
        self._compute_prefixes(prefixes, leaders, 0 * leaders, lengths[leaders], starts, attention)
        copies = [index for index in having if giver[prefixes.context[index]] != index]
        if copies:
            counts, places = lengths[copies], places_in(lengths[copies])
            givers = [giver[prefixes.context[index]] for index in copies]
            self._cache.copy(np.repeat(starts[givers], counts) + places, np.repeat(starts[copies], counts) + places)
        rest = missing[prefixes.lengths[missing] > lengths[missing]]
        self._compute_prefixes(prefixes, rest, lengths[rest], prefixes.lengths[rest], starts, attention)
        return starts

    def _compute_prefixes(
        self,
        prefixes: Prefixes,
        chosen: np.ndarray,
        first: np.ndarray,
        last: np.ndarray,
        starts: np.ndarray,
        attention: AttentionPattern,
    ) -> None:
        """Compute places `first` to `last` - 1 of the prefixes `chosen`, whose earlier places are in the cache."""
        work = _PrefixWork(self._forward, self.backbone.spec, prefixes, chosen, first, last, starts, attention)
        # To `pack_windows` they are windows that share one empty prefix.
        shared, empty = np.zeros(len(chosen), dtype=np.int64), np.zeros(1, dtype=np.int64)
        for _, packs in pack_windows(shared, work.lengths, empty, self.token_budget, 1):
            self._compute_packs(packs, work)

    def _compute_packs(self, packs: list[np.ndarray], work: _Work) -> None:
        """Compute packs (indices into `work.lengths`) in order.

        One that the device has no room for is halved, and so are later ones of its size. What `work.after` raises is
        not the pack's error: no pack is halved for it.
        """
        waiting = packs[::-1]
        while waiting:
            pack = waiting.pop()
            tokens = int(work.lengths[pack].sum())
            if len(pack) < 2 or tokens <= self.token_budget:
                try:
                    work.compute(pack)
                except DeviceMemoryError:
                    raise
                except Exception as error:
                    if not is_out_of_memory(error):
                        raise
                    if len(pack) < 2:
                        raise DeviceMemoryError(
                            f"the device has no room for one window of {tokens} tokens; use a smaller model or "
                            "dtype, or leave the row out"
                        ) from error
                else:
                    work.after()
                    continue
                # Outside of `except`, whose traceback holds on to the tensors.
                self.token_budget = tokens // 2
                if self.backbone.device.type == "cuda":
                    torch.cuda.empty_cache()
            half = len(pack) // 2
            waiting += [pack[half:], pack[:half]]

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """One call's use of the cache and the processor."""
        process = os.getpid()
        # A fork copies the lock as it is, possibly held by a thread that the child does not have.
        with self._locks.setdefault(process, threading.RLock()), torch.inference_mode():
            if process != self._process:
                torch.set_num_threads(1)  # see `is_forked`
                self._cache.forget()
                self._process = process
            self._turns += 1
            yield


@dataclass(frozen=True)
class _Call:
    """One call of `run` or `sample`: the windows that it asks about, and where their values go.

    Parameters
    ----------
    asked : int64 [A]
        Indices of the windows to evaluate.
    results : Results
        By wanted row of `windows`.
    numbers : float64 [M], optional
        Uniform numbers to draw a token by at every wanted row.
    best : bool
        The most probable token of every wanted row. Without either, log-probabilities of the targets.
    """

    prefixes: Prefixes
    windows: Windows
    attention: AttentionPattern
    asked: np.ndarray
    results: Results
    numbers: np.ndarray | None = None
    best: bool = False

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens int64 [A] of the windows asked."""
        return self.windows.lengths[self.asked]


class _Work(Protocol):
    """What `Runner._compute_packs` computes pack by pack."""

    lengths: np.ndarray  # tokens of each item, int64

    def compute(self, pack: np.ndarray) -> None:
        """Launch the items `pack` (indices into `lengths`). It may be called again after memory ran out in it."""
        ...

    def after(self) -> None:
        """Is called after each pack that was computed."""
        ...


class _Wave:
    """Windows of a call whose prefixes fit the cache together."""

    def __init__(self, runner: Runner, call: _Call, prefixes_used: np.ndarray) -> None:
        self._runner, self._call, self._prefixes_used = runner, call, prefixes_used
        self._starts = np.zeros(0, np.int64)  # first cache row of each prefix, by prefix index
        self._turn: int | None = None  # the turn that the prefixes were cached in
        self.lengths = call.lengths

    def compute(self, pack: np.ndarray) -> None:
        if self._turn != self._runner._turns:  # the first pack, or `progress` has used this runner meanwhile
            self._cache_prefixes()
        call, forward = self._call, self._runner._forward
        pattern = self._runner.backbone.spec.pattern(call.attention.name, call.attention.block_size)
        with stage("windows"):
            inputs = WindowPack.build(call.windows, call.asked[pack], self._starts, pattern)
            states = forward.window_states(inputs)
        with stage("head"):
            if call.best:
                values = forward.best(states)
            elif call.numbers is None:
                values = forward.log_probs(states, call.windows.targets[inputs.wanted_index])
            else:
                values = forward.sample(states, call.numbers[inputs.wanted_index])
            call.results.add(inputs.wanted_index, values, int(self.lengths[pack].sum()))

    def after(self) -> None:
        self._call.results.collect(keep=1)  # those of the pack that was just launched

    def _cache_prefixes(self) -> None:
        call = self._call
        try:
            with stage("prefix"):
                self._starts = self._runner._cache_prefixes(call.prefixes, self._prefixes_used, call.attention)
                self._turn = self._runner._turns
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            # Fewer windows per pack would not help, and rows that are reserved have not been written.
            raise DeviceMemoryError(
                "the device has no room for the keys and values of one wave of sources; set a smaller "
                "memory= (--memory), or shorten long sources"
            ) from error


class _PrefixWork:
    """Parts of prefixes, whose keys and values are to be written to reserved rows of the cache."""

    def __init__(
        self,
        forward: ForwardPass,
        spec: BackboneSpec,
        prefixes: Prefixes,
        chosen: np.ndarray,
        first: np.ndarray,
        last: np.ndarray,
        starts: np.ndarray,
        attention: AttentionPattern,
    ) -> None:
        self._forward, self._prefixes, self._chosen, self._starts = forward, prefixes, chosen, starts
        self._first, self._last = first, last
        self._attention, self._pattern = attention, spec.pattern(attention.name, attention.block_size)
        self.lengths = last - first

    def compute(self, pack: np.ndarray) -> None:
        parts = self._chosen[pack], self._first[pack], self._last[pack]
        self._forward.fill_cache(PrefixPack.build(self._prefixes, *parts, self._starts, self._attention, self._pattern))

    def after(self) -> None:
        """Nothing is left to do: keys and values stay on the device."""


def _planned(estimator: Estimator[Any], observed: list[Observation]) -> MaskPlan | None:
    with stage("plan"), memory_named(NO_ROOM_FOR_PLANS):
        return estimator.plan(observed)
