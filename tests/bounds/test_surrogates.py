"""Autoregressive surrogates: from the package, from transformers, and fine-tuned on samples."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from diffscore_fast import LikelihoodBounds
from diffscore_fast.backbones.config import EMBEDDED_MODELS
from diffscore_fast.bounds.surrogates import CausalSurrogate, NetworkSurrogate
from diffscore_fast.errors import InputError

TEXTS = ["The cat sat on the mat.", "It rained."]


def test_the_same_network_as_a_surrogate_is_the_autoregressive_one():
    bounds = LikelihoodBounds("mini", block_size=4)
    own = bounds.estimate(TEXTS, surrogate="autoregressive", orders=4)
    other = bounds.estimate(TEXTS, surrogate=NetworkSurrogate(EMBEDDED_MODELS["mini"]), orders=4)
    np.testing.assert_allclose(other.upper, own.upper, rtol=1e-3)
    assert "NetworkSurrogate(" in str(other.signature.surrogate)
    with pytest.raises(InputError, match="fewer than the texts use"):
        NetworkSurrogate("mini")([np.array([10**6], np.int32)])


def test_a_causal_model_of_transformers_gives_its_own_log_probs():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    network = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2))
    surrogate = CausalSurrogate(network, start_id=2, name="tiny")
    ids = [np.array([5, 6, 7], np.int32), np.array([9], np.int32)]
    found = surrogate(ids)
    loss = network(input_ids=torch.tensor([[2, 5, 6, 7]]), labels=torch.tensor([[2, 5, 6, 7]])).loss
    assert found[0].mean() == pytest.approx(-loss.item(), abs=1e-5)
    assert [len(item) for item in found] == [3, 1] and surrogate.name == "CausalSurrogate(tiny)"


def test_a_network_surrogate_is_pickled_and_refuses_texts_beyond_its_positions():
    surrogate = pickle.loads(pickle.dumps(NetworkSurrogate("mini")))
    ids = [np.array([5, 6, 7], np.int32)]
    np.testing.assert_array_equal(surrogate(ids)[0], NetworkSurrogate("mini")(ids)[0])
    with pytest.raises(InputError, match="takes 2047 tokens, a text has 2048"):
        surrogate([np.full(2048, 5, np.int32)])
