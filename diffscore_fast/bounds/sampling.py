"""Samples from a block model: block after block, and in a block one token at a time in uniformly drawn order."""

from __future__ import annotations

import numpy as np

from diffscore_fast.bounds.orders import Generation, draw_steps, visible_before
from diffscore_fast.bounds.states import Blocks, cut_blocks, plan_states
from diffscore_fast.engine.plan import AttentionPattern, Sequences
from diffscore_fast.engine.random import target_key, uniforms
from diffscore_fast.engine.runner import Runner
from diffscore_fast.engine.windows import compose
from diffscore_fast.errors import InputError

_TOKEN_STREAM = 32


def sample_token_arrays(runner: Runner, block_size: int, *, count: int, tokens: int, seed: int = 0) -> np.ndarray:
    """Sample texts from the any-order block model, whose likelihood `LikelihoodBounds` bounds.

    In continuous time this is first-hitting sampling (Zheng et al., 2024): tokens are unmasked in a uniformly drawn
    order, and each is drawn given all visible tokens.

    Parameters
    ----------
    runner : Runner
    block_size : int
    count, tokens : int
        Number of texts, and of tokens in each.
    seed : int

    Returns
    -------
    int32 [count, tokens]
    """
    spec, attention = runner.backbone.spec, AttentionPattern("block", block_size)
    room = spec.pattern("block", block_size).position_limit - int(spec.start_id is not None)
    if count < 1 or not 1 <= tokens <= room:
        raise InputError(f"needs at least one text of 1 to {room} tokens, not {count} of {tokens}")
    texts = np.full((count, tokens), spec.mask_id, dtype=np.int32)
    keys = np.array([target_key(seed, np.array([index])) for index in range(count)], dtype=np.uint64)
    line = cut_blocks(np.array([tokens]), block_size, spec.start_in_block(block_size))
    every_text = np.arange(count)
    for start, stop in zip(line.start, line.stop, strict=True):
        size = stop - start
        place = np.broadcast_to(start + np.arange(size), (count, size))
        steps = draw_steps(keys, place, np.ones_like(place, bool), 1, "independent", Generation())[:, 0]  # [count, n]
        visible = visible_before(steps)
        for step in range(size):
            token = np.argmax(steps == step, axis=1)
            blocks = Blocks(every_text, np.full(count, start), np.full(count, stop))
            wanted = np.arange(size) == token[:, None]
            plan = plan_states(blocks, every_text, visible[every_text, token], wanted)
            sequences = Sequences.build([np.zeros(0, np.int32)], np.zeros(count, np.int64), list(texts))
            numbers = uniforms(keys, np.full(count, step), start + token, _TOKEN_STREAM)
            drawn = runner.sample(*compose(spec, attention, sequences, plan), attention, numbers)
            texts[every_text, start + token] = drawn
    return texts
