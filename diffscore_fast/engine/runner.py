"""The runner: plans in, log-probabilities of their masked tokens out."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diffscore_fast import ops
from diffscore_fast.backbones.spec import Backbone, OpaqueBackbone
from diffscore_fast.engine.cache import PrefixCache
from diffscore_fast.engine.memory import DEFAULT_CACHE_BYTES, DEFAULT_PLAN_TOKENS, DEFAULT_TOKEN_BUDGET
from diffscore_fast.engine.packing import distinct_windows, pack_windows
from diffscore_fast.engine.plan import AttentionPattern, Estimator, MaskPlan, Observation, Result, Sequences
from diffscore_fast.engine.profile import stage
from diffscore_fast.engine.ragged import offsets_of, places_in, segment_ids, take_segments
from diffscore_fast.engine.windows import Prefixes, Windows, compose, cut_plan
from diffscore_fast.errors import DeviceMemoryError, is_out_of_memory, memory_named
from diffscore_fast.ops.transfer import Arriving, to_device

NO_ROOM_FOR_PLANS = (
    "the host has no room to lay out windows or to collect their values; state less with memory= (--memory), or pass "
    "fewer rows at once"
)


class Runner:
    """Evaluates plans with one backbone, for any number of threads, and after a fork.

    Threads take turns. A forked child computes in one thread (`torch.set_num_threads(1)`, on first use there).

    Parameters
    ----------
    backbone : Backbone or WholeBackbone
    token_budget : int
        Most window tokens evaluated at once. It bounds memory and changes no score beyond rounding. Where a device
        turns out to have no room for a pack, the pack is halved and the budget falls.
    cache_bytes : int
        Size of the prefix cache.
    plan_tokens : int
        Most window tokens laid out at once; a larger plan is evaluated part by part.
    implementation : str
        "auto", or a name: operations that have it run by it, the others by "auto".
    """

    def __init__(
        self,
        backbone: Backbone | OpaqueBackbone,
        *,
        token_budget: int = DEFAULT_TOKEN_BUDGET,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        plan_tokens: int = DEFAULT_PLAN_TOKENS,
        implementation: str = ops.AUTO,
    ) -> None:
        self.backbone = backbone
        self.token_budget = token_budget
        self.plan_tokens = plan_tokens
        attends = () if isinstance(backbone, OpaqueBackbone) else (ops.PREFIX_ATTENTION,)
        self._used = (ops.MASKED_LOGPROB, *attends)
        self._wanted = ops.wanted_by_operation(self._used, implementation)
        self._cache = PrefixCache(backbone.spec, backbone.dtype, backbone.device, cache_bytes)
        self._locks: dict[int, threading.RLock] = {}  # by process
        self._process = os.getpid()
        self._turns = 0

    @property
    def implementations(self) -> dict[str, str]:
        """What each operation of a score resolves to, by its name."""
        device = self.backbone.device
        return {item.name: item.resolve(device, self._wanted[item.name]).name for item in self._used}

    def evaluate(
        self,
        estimator: Estimator[Result],
        sequences: Sequences,
        attention: AttentionPattern,
        progress: Callable[[int], None] | None = None,
    ) -> Result:
        """Run an estimator's rounds and reduce them. `progress` is told of window tokens as they are done."""
        observed: list[Observation] = []
        while (plan := _planned(estimator, observed)) is not None:
            values, pattern = [np.zeros(0, dtype=np.float32)], plan.attention or attention
            for part in cut_plan(pattern, sequences, plan, self.plan_tokens):
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
            wanted_counts = np.diff(windows.wanted_offsets)
            asked = first[wanted_counts[first] > 0]
            waves = pack_windows(
                windows.prefix[asked],
                windows.lengths[asked],
                prefixes.lengths,
                self.token_budget,
                self._cache.capacity_rows,
            )
        results = _Results(np.zeros(len(windows.wanted), dtype=np.float32), progress)

        def log_probs(starts: np.ndarray, pack: np.ndarray) -> None:
            chosen = asked[pack]
            picked = take_segments(windows.wanted_offsets, chosen)
            with stage("windows"):
                rows = self._wanted_rows(windows, chosen, picked, starts, attention)
            with stage("head"):
                rows = self._transformed(rows)
                targets = torch.from_numpy(windows.targets[picked].astype(np.int64))
                values = ops.masked_logprob(*self._vocabulary(rows), targets, **self._vocabulary_options())
                results.add(picked, values, int(windows.lengths[chosen].sum()))

        self._evaluate(prefixes, windows.lengths[asked], waves, attention, log_probs, results)
        # Every window takes its representative's values; representatives take their own.
        with stage("reduce"):
            return results.out[take_segments(windows.wanted_offsets, first[representative])]

    def sample(
        self, prefixes: Prefixes, windows: Windows, attention: AttentionPattern, numbers: np.ndarray
    ) -> np.ndarray:
        """A token int32 [M] for every wanted row, from the model's distribution by the uniform numbers float64 [M].

        Targets are not read, and no two windows are taken for one: each has numbers of its own.
        """
        results = _Results(np.zeros(len(windows.wanted), dtype=np.int32))
        waves = pack_windows(
            windows.prefix, windows.lengths, prefixes.lengths, self.token_budget, self._cache.capacity_rows
        )

        def tokens(starts: np.ndarray, chosen: np.ndarray) -> None:
            picked = take_segments(windows.wanted_offsets, chosen)
            rows = self._transformed(self._wanted_rows(windows, chosen, picked, starts, attention))
            options = {**self._vocabulary_options(), "implementation": ops.AUTO}
            drawn = ops.sample_token(*self._vocabulary(rows), torch.from_numpy(numbers[picked]), **options)
            results.add(picked, drawn)

        self._evaluate(prefixes, windows.lengths, waves, attention, tokens, results)
        return results.out

    def _evaluate(
        self,
        prefixes: Prefixes,
        lengths: np.ndarray,
        waves: list[tuple[np.ndarray, list[np.ndarray]]],
        attention: AttentionPattern,
        evaluate: Callable[[np.ndarray, np.ndarray], None],
        results: _Results,
    ) -> None:
        """Fill the cache for each wave, give its packs to `evaluate(starts, pack)`, which adds to the results, and
        collect these; alone with the cache."""
        used, starts, turn = np.zeros(0, np.int64), np.zeros(0, np.int64), 0

        def with_prefixes(pack: np.ndarray) -> None:
            nonlocal starts, turn
            if self._turns != turn:  # a new wave, or `progress` used this runner, too
                try:
                    with stage("prefix"):
                        starts, turn = self._fill_cache(prefixes, used, attention), self._turns
                except Exception as error:
                    if not is_out_of_memory(error):
                        raise
                    # Fewer windows a pack would not help, and rows that are reserved have not been written.
                    raise DeviceMemoryError(
                        "the device has no room for the keys and values of one wave of sources; state less with "
                        "memory= (--memory), or cut long sources"
                    ) from error
            evaluate(starts, pack)

        with self._turn():
            try:
                for used, packs in waves:  # noqa: B007, `with_prefixes` reads it
                    turn = -1
                    self._in_halves(packs, lengths, with_prefixes, lambda: results.collect(but=1))
                results.collect()
            except BaseException:
                self._cache.forget()  # reserved rows may not have been written
                raise

    def _in_halves(
        self,
        packs: list[np.ndarray],
        lengths: np.ndarray,
        evaluate: Callable[[np.ndarray], None],
        evaluated: Callable[[], None] = lambda: None,
    ) -> None:
        """Evaluate packs (indices into `lengths`) in order. One that a device has no room for is halved, and from
        then on all packs of its size are. `evaluated` is called after each; what it raises is not the pack's."""
        waiting = packs[::-1]
        while waiting:
            pack = waiting.pop()
            tokens = int(lengths[pack].sum())
            if len(pack) < 2 or tokens <= self.token_budget:
                try:
                    evaluate(pack)
                except DeviceMemoryError:
                    raise
                except Exception as error:
                    if not is_out_of_memory(error):
                        raise
                    if len(pack) < 2:
                        raise DeviceMemoryError(
                            f"the device has no room for a window of {tokens} tokens by itself; use a smaller model or "
                            "type, or leave the row out"
                        ) from error
                else:
                    evaluated()
                    continue
                # Outside of `except`, whose traceback holds on to the tensors.
                self.token_budget = tokens // 2
                if self.backbone.device.type == "cuda":
                    torch.cuda.empty_cache()
            half = len(pack) // 2
            waiting += [pack[half:], pack[:half]]

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """One run's use of the cache and the processor."""
        process = os.getpid()
        # A fork copies the lock as it is, possibly held by a thread that the child does not have.
        with self._locks.setdefault(process, threading.RLock()), torch.inference_mode():
            if process != self._process:
                torch.set_num_threads(1)  # see `is_forked`
                self._cache.forget()
                self._process = process
            self._turns += 1
            yield

    def _fill_cache(self, prefixes: Prefixes, used: np.ndarray, attention: AttentionPattern) -> np.ndarray:
        """Compute the prefixes that are not cached; int64 [P + 1] arena row of each, by prefix index (last: none)."""
        starts = np.zeros(len(prefixes.keys) + 1, dtype=np.int64)
        if not len(used):
            return starts
        lengths = prefixes.lengths[used]
        starts[used], missing = self._cache.reserve([prefixes.keys[i] for i in used], lengths)
        pattern = self.backbone.spec.pattern(attention.name, attention.block_size)
        block = attention.block_size if attention.name == "block" else pattern.prefix_block

        def store(pack: np.ndarray) -> None:
            chosen = used[missing[pack]]
            sizes = prefixes.lengths[chosen]
            tokens = prefixes.tokens[take_segments(prefixes.offsets, chosen)]
            rows = np.repeat(starts[chosen], sizes) + places_in(sizes)
            hidden, positions = self._embed(tokens, places_in(sizes), pattern.prefix_type)
            offsets = offsets_of(sizes)
            nothing = np.zeros(len(chosen), dtype=np.int64)
            layout = ops.AttentionLayout(offsets, offsets, nothing, nothing, block=block)
            self._forward(hidden, positions, layout, self._to_device(rows), None)

        for _, packs in pack_windows(
            np.zeros(len(missing), np.int64), lengths[missing], np.zeros(1, np.int64), self.token_budget, 1
        ):
            self._in_halves(packs, lengths[missing], store)
        return starts

    def _wanted_rows(
        self, windows: Windows, chosen: np.ndarray, picked: np.ndarray, starts: np.ndarray, attention: AttentionPattern
    ) -> Tensor:
        """Hidden states of the wanted rows `picked` of the windows `chosen` after the last layer."""
        pattern = self.backbone.spec.pattern(attention.name, attention.block_size)
        lengths = windows.lengths[chosen]
        of_window, places = segment_ids(lengths), places_in(lengths)
        tokens = windows.tokens[take_segments(windows.offsets, chosen)]
        types: int | np.ndarray = pattern.window_type
        if windows.typed_from is not None:
            types = np.where(places < windows.typed_from[chosen][of_window], pattern.prefix_type, pattern.window_type)

        offsets = offsets_of(lengths)
        counts = np.diff(windows.wanted_offsets)[chosen]
        wanted_places = windows.wanted[picked] - np.repeat(windows.offsets[:-1][chosen], counts)
        wanted = self._to_device(np.repeat(offsets[:-1], counts) + wanted_places)
        if isinstance(self.backbone, OpaqueBackbone):
            ids = self._to_device(tokens.astype(np.int64))
            return self.backbone.window_states(ids, self._types(types, ids), offsets, wanted)
        hidden, positions = self._embed(tokens, windows.first_position[chosen][of_window] + places, types)
        prefix_starts, visible = starts[windows.prefix[chosen]], windows.visible[chosen]
        layout = ops.AttentionLayout(offsets, offsets, prefix_starts, visible)
        last_layout = ops.AttentionLayout(offsets, offsets_of(counts), prefix_starts, visible, wanted_places)

        return self._forward(hidden, positions, layout, None, (wanted, last_layout))

    def _transformed(self, rows: Tensor) -> Tensor:
        """Wanted rows past the head transform; a network that runs whole has done that."""
        return rows if isinstance(self.backbone, OpaqueBackbone) else self.backbone.head_transform(rows)

    def _vocabulary(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        return rows, self.backbone.vocabulary_weight, self.backbone.vocabulary_bias

    def _vocabulary_options(self) -> dict[str, Any]:
        spec = self.backbone.spec
        return {
            "excluded_ids": spec.excluded_ids,
            "vocab_size": spec.vocab_size,
            "logit_scale": spec.logit_scale,
            "soft_cap": spec.soft_cap,
            "implementation": self._wanted["masked_logprob"],
        }

    def _forward(
        self,
        hidden: Tensor,
        positions: Tensor,
        layout: ops.AttentionLayout,
        store: Tensor | None,
        wanted: tuple[Tensor, ops.AttentionLayout] | None,
    ) -> Tensor:
        """All layers. With `store`, keys and values go to those cache rows, and the last layer makes nothing else;
        with `wanted`, only those rows pass the last layer beyond its keys and values."""
        backbone, last = self.backbone, self.backbone.spec.num_layers - 1
        assert not isinstance(backbone, OpaqueBackbone)
        for layer in range(last + 1):
            if store is not None and layer == last:
                key, value = backbone.keys_values(layer, hidden, positions)
                self._store(layer, store, key, value)
                return hidden
            if wanted is not None and layer == last:
                rows, layout = wanted
                query, key, value = backbone.attention_inputs(layer, hidden, positions, rows)
                hidden = hidden[rows]
            else:
                query, key, value = backbone.attention_inputs(layer, hidden, positions)
            if store is not None:
                self._store(layer, store, key, value)
            prefix_key, prefix_value = self._cached(layer, key)
            with stage("attention"):
                attended = ops.prefix_attention(
                    query, key, value, prefix_key, prefix_value, layout, implementation=self._wanted["prefix_attention"]
                )
            hidden = backbone.attention_outputs(layer, hidden, attended)
        return hidden

    def _store(self, layer: int, rows: Tensor, key: Tensor, value: Tensor) -> None:
        cached_key, cached_value = self._cache.layer(layer)
        cached_key[rows], cached_value[rows] = key, value

    def _cached(self, layer: int, key: Tensor) -> tuple[Tensor, Tensor]:
        if self._cache.is_empty:
            return key[:0], key[:0]
        return self._cache.layer(layer)

    def _embed(self, tokens: np.ndarray, places: np.ndarray, types: int | np.ndarray) -> tuple[Tensor, Tensor]:
        assert not isinstance(self.backbone, OpaqueBackbone)
        positions = self._to_device(places.astype(np.int64))
        ids = self._to_device(tokens.astype(np.int64))
        return self.backbone.embed(ids, positions, self._types(types, ids)), positions

    def _types(self, types: int | np.ndarray, like: Tensor) -> Tensor:
        return torch.full_like(like, types) if isinstance(types, int) else self._to_device(types.astype(np.int64))

    def _to_device(self, array: np.ndarray) -> Tensor:
        return to_device(array, self.backbone.device)


class _Results:
    """What packs give. Each is collected when the next has been launched: a GPU computes while the host lays out.

    Parameters
    ----------
    out : [M]
        Where results go, by wanted row.
    progress : callable, optional
        Told of each pack's window tokens as its results are there.
    """

    def __init__(self, out: np.ndarray, progress: Callable[[int], None] | None = None) -> None:
        self.out, self._progress = out, progress
        self._arriving: deque[tuple[np.ndarray, Arriving, int]] = deque()

    def add(self, picked: np.ndarray, values: Tensor, tokens: int = 0) -> None:
        """Results of the wanted rows `picked`, from windows of that many tokens."""
        self._arriving.append((picked, Arriving(values), tokens))

    def collect(self, but: int = 0) -> None:
        """Wait for all packs but the last few."""
        while len(self._arriving) > but:
            picked, values, tokens = self._arriving.popleft()
            self.out[picked] = values.numpy()
            if self._progress is not None:
                self._progress(tokens)


def _planned(estimator: Estimator[Any], observed: list[Observation]) -> MaskPlan | None:
    with stage("plan"), memory_named(NO_ROOM_FOR_PLANS):
        return estimator.plan(observed)
