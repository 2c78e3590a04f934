"""Layouts and packed passes against one dense sequence with a mask written out pair by pair."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.nn import functional

from diffscore_fast.training.objective import masked_losses
from diffscore_fast.training.patterns import lay_block, lay_full, lay_prefix, pack_layouts

START, MASK = 2, 4


def dense_losses(network, tokens, positions, types, sees: Callable[[int, int], bool], rows, targets) -> np.ndarray:
    """All rows through all layers, softmax over a float64 score matrix with -inf where row i does not see row j."""
    visible = torch.tensor([[sees(i, j) for j in range(len(tokens))] for i in range(len(tokens))])
    positions = torch.tensor(positions)
    with torch.no_grad():
        hidden = network.embed(torch.tensor(tokens), positions, torch.tensor(types))
        for layer in range(network.spec.num_layers):
            query, key, value = (part.double() for part in network.attention_inputs(layer, hidden, positions))
            scores = torch.einsum("ihd,jhd->hij", query, key) / query.shape[-1] ** 0.5
            weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
            hidden = network.attention_outputs(layer, hidden, torch.einsum("hij,jhd->ihd", weights, value).float())
        logits = functional.linear(network.head_transform(hidden), network.vocabulary_weight, network.vocabulary_bias)
    log_probs = logits.double().log_softmax(-1)
    return np.array([-float(log_probs[row, target]) for row, target in zip(rows, targets, strict=True)])


def text(length: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    masked = rng.random(length) < 0.5
    masked[rng.integers(length)] = True
    return rng.integers(5, 64, length), masked


def losses_of(network, *layouts) -> np.ndarray:
    with torch.no_grad():
        return masked_losses(network, pack_layouts(layouts)).tokens.numpy()


@pytest.mark.parametrize("length", [1, 2, 9])
def test_full_sees_everything(network, length):
    window, masked = text(length, length)
    tokens = [START, *np.where(masked, MASK, window)]
    rows = 1 + np.flatnonzero(masked)
    expected = dense_losses(
        network, tokens, list(range(length + 1)), [0] * (length + 1), lambda i, j: True, rows, window[masked]
    )
    np.testing.assert_allclose(losses_of(network, lay_full(window, masked, network.spec)), expected, atol=1e-4)


@pytest.mark.parametrize(("before", "length"), [(0, 1), (0, 7), (1, 4), (11, 5)])
def test_prefix_is_blind_to_the_window_whose_positions_restart(network, before, length):
    prefix, _ = text(max(before, 1), 3)
    prefix = prefix[:before]
    window, masked = text(length, length)
    border = before + 1
    tokens = [START, *prefix, *np.where(masked, MASK, window)]
    expected = dense_losses(
        network,
        tokens,
        [*range(border), *range(length)],
        [0] * border + [1] * length,
        lambda i, j: j < border or i >= border,
        border + np.flatnonzero(masked),
        window[masked],
    )
    found = losses_of(network, lay_prefix(prefix, window, masked[None], network.spec))
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_copies_of_a_window_share_the_prefix_and_do_not_see_each_other(network):
    prefix, _ = text(9, 3)
    window, _ = text(6, 6)
    masks = np.random.default_rng(0).random((3, 6)) < 0.5
    alone = [losses_of(network, lay_prefix(prefix, window, mask[None], network.spec)) for mask in masks]
    together = losses_of(network, lay_prefix(prefix, window, masks, network.spec))
    np.testing.assert_allclose(together, np.concatenate(alone), atol=1e-4)


@pytest.mark.parametrize("block_size", [1, 4, 8, 16])
@pytest.mark.parametrize("length", [1, 3, 8, 21])
def test_two_streams_equal_one_pass_a_block(network, block_size, length):
    """The noisy stream at block b equals a pass over [clean blocks before b][block b, masked]."""
    window, masked = text(length, length)
    tokens, hidden = np.array([START, *window]), np.array([False, *masked])
    expected = []
    edges = [*range(0, length + 1, block_size), length + 1]
    for first, last in pairwise(edges):
        block = range(first, last)
        if not hidden[first:last].any():
            continue
        rows = [*tokens[:first], *(MASK if hidden[place] else tokens[place] for place in block)]
        wanted = [place for place in block if hidden[place]]
        expected.extend(
            dense_losses(
                network,
                rows,
                list(range(last)),
                [0] * last,
                lambda i, j, first=first: j // block_size <= i // block_size,
                wanted,
                tokens[wanted],
            )
        )
    found = losses_of(network, lay_block(window, masked, block_size, network.spec))
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_packing_changes_no_loss(network):
    window, masked = text(13, 1)
    short, one = text(1, 2)
    layouts = [
        lay_block(window, masked, 4, network.spec),
        lay_full(short, one, network.spec),
        lay_prefix(window[:6], short, one[None], network.spec),
        lay_block(short, one, 1, network.spec),
        lay_prefix(short[:0], window, masked[None], network.spec),
    ]
    alone = np.concatenate([losses_of(network, layout) for layout in layouts])
    np.testing.assert_allclose(losses_of(network, *layouts), alone, atol=1e-4)


def test_chosen_rows_have_the_losses_they_have_among_all(network):
    window, masked = text(30, 5)
    pack = pack_layouts(
        [lay_block(window, masked, 4, network.spec), lay_prefix(window, window, masked[None], network.spec)]
    )
    chosen = np.arange(1, len(pack.targets), 3)
    with torch.no_grad():
        every, some = masked_losses(network, pack), masked_losses(network, pack, chosen)
    np.testing.assert_allclose(some.tokens, every.tokens[torch.from_numpy(chosen)], atol=1e-4)
    assert torch.equal(some.sequence, every.sequence[torch.from_numpy(chosen)])
