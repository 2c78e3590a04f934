"""Masking only some tokens: the others are read, but never masked or scored."""

from __future__ import annotations

import numpy as np
import pytest

from diffscore_fast.engine.plan import AttentionPattern, Sequences
from diffscore_fast.engine.random import target_key
from diffscore_fast.engine.runner import Runner
from diffscore_fast.scoring.config import ReconstructionConfig
from diffscore_fast.scoring.mask_design import MaskDesign
from diffscore_fast.scoring.reconstruction import MaskedReconstruction
from diffscore_fast.scoring.word_classes import WithinEligible
from tests.support.networks import BagOfTokens

# More eligible tokens than could be enumerated in 18 draws, but for the last target: it has one, and so one mask.
TARGETS = [np.array(ids, np.int32) for ids in ([5, 6, 7, 8, 9, 5, 13, 14], [10, 11, 6, 7, 9, 8], [12, 4])]
ELIGIBLE = np.array([1, 0, 1, 1, 0, 1, 1, 1] + [1, 1, 0, 1, 1, 1] + [0, 1], dtype=bool)
DESIGN = MaskDesign(20, coupling="independent")
SEQUENCES = Sequences.build([np.array([20], np.int32), np.zeros(0, np.int32)], np.array([0, 1, 0]), TARGETS)
KEYS = np.array([target_key(0, item) for item in TARGETS], dtype=np.uint64)


def estimator(config: ReconstructionConfig, eligible: np.ndarray) -> WithinEligible:
    return WithinEligible(eligible, SEQUENCES, lambda sequences: MaskedReconstruction(config, sequences, KEYS))


@pytest.mark.parametrize("name", ["mean_logprob", "elbo"])
def test_scores_are_those_of_the_masks_that_the_class_gets(name):
    """Every draw from the closed form of the network, which reads the visible tokens of the other class too."""
    backbone, config = BagOfTokens(restart_positions=True), ReconstructionConfig(name, DESIGN)
    within = estimator(config, ELIGIBLE)
    masks = np.split(within.plan([]).masked, np.cumsum(np.repeat([8, 6, 2], [18, 18, 1]))[:-1])
    within = estimator(config, ELIGIBLE)
    result = Runner(backbone).evaluate(within, SEQUENCES, AttentionPattern("prefix"))
    offsets, ratios = [0, 8, 14, 16], np.tile(np.arange(1, 10) / 10, 2)
    for item, target in enumerate(TARGETS):
        own = ELIGIBLE[offsets[item] : offsets[item + 1]]
        contributions = []
        token_values: dict[int, list[float]] = {place: [] for place in range(len(target))}
        for draw in range(1 if item == 2 else 18):
            mask = masks[18 * item + draw]
            assert not (mask & ~own).any()
            seen = [2, *([20] if item != 1 else []), *np.where(mask, 1, target)]
            values = {at: backbone.log_prob(int(target[at]), at, seen) for at in np.flatnonzero(mask)}
            for at, value in values.items():
                token_values[at].append(value)
            total = sum(values.values())
            contributions.append(
                total / len(values) if name == "mean_logprob" or item == 2 else total / ratios[draw] / own.sum()
            )
        np.testing.assert_allclose(result.scores[item], np.mean(contributions), atol=1e-5)
        tokens = slice(offsets[item], offsets[item + 1])
        assert result.token_counts[tokens].tolist() == [len(values) for values in token_values.values()]
        means = [np.mean(values) if values else np.nan for values in token_values.values()]
        np.testing.assert_allclose(result.token_log_probs[tokens], means, atol=1e-5)


def test_with_every_token_eligible_nothing_changes():
    config = ReconstructionConfig("mean_logprob", DESIGN)
    runner = Runner(BagOfTokens(restart_positions=True))
    results = [
        runner.evaluate(item, SEQUENCES, AttentionPattern("full"))
        for item in (estimator(config, np.ones(16, bool)), MaskedReconstruction(config, SEQUENCES, KEYS))
    ]
    np.testing.assert_array_equal(results[0].scores, results[1].scores)
    np.testing.assert_array_equal(results[0].token_log_probs, results[1].token_log_probs)
