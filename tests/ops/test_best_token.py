"""best_token: every option of the projection, over chunks of rows."""

from __future__ import annotations

import torch

from diffscore_fast.ops import best_token


def test_every_option_of_the_projection_counts():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(600, 16, generator=generator)
    stored = torch.randint(-127, 128, (12, 16), generator=generator).to(torch.int8)
    scale, bias = torch.rand(12, generator=generator) / 100, torch.randn(12, generator=generator)
    options = {"excluded_ids": (2,), "vocab_size": 10, "logit_scale": -0.5, "soft_cap": 3.0, "weight_scale": scale}
    got = best_token(hidden, stored, bias, **options)
    z = -0.5 * (hidden.double() @ (stored.double() * scale.double()[:, None]).T + bias)[:, :10]
    z[:, 2] = -torch.inf
    assert torch.equal(got, z.argmax(1))
    assert len(set(got.tolist())) > 3
    assert len(best_token(hidden[:0], stored, bias, **options)) == 0
