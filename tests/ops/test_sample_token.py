"""sample_token with the options that it shares with masked_logprob; tests/bounds/test_sampling.py has the rest."""

from __future__ import annotations

import torch

from diffscore_fast.ops import sample_token


def test_every_option_of_the_projection_counts():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(40, 16, generator=generator)
    stored = torch.randint(-127, 128, (12, 16), generator=generator).to(torch.int8)
    scale, bias = torch.rand(12, generator=generator) / 100, torch.randn(12, generator=generator)
    numbers = torch.rand(40, generator=generator, dtype=torch.float64)
    got = sample_token(
        hidden,
        stored,
        bias,
        numbers,
        excluded_ids=(2,),
        vocab_size=10,
        logit_scale=0.5,
        soft_cap=3.0,
        weight_scale=scale,
    )
    z = 0.5 * (hidden.double() @ (stored.double() * scale.double()[:, None]).T + bias)[:, :10]
    z = 3.0 * torch.tanh(z / 3.0)
    z[:, 2] = -torch.inf
    assert torch.equal(got, (z.softmax(1).cumsum(1) <= numbers[:, None]).sum(1))
