"""A loaded network whose products run in int8: its layers' weights as 8-bit rows, and those of its normaliser."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from diffscore_fast.backbones.network import Network
from diffscore_fast.backbones.weights import quantise_rows
from diffscore_fast.ops import Int8Weight


class Int8Linear(nn.Module):
    """Stands where a layer has an `nn.Linear`: int8 weight, float32 bias."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight = eight_bit_rows(layer.weight)
        self.bias = layer.bias


def to_int8(network: Network) -> None:
    """Give a float32 network on the CPU int8 weights, in place.

    Embeddings, biases and norms stay float32, and so does the vocabulary projection, beside its 8-bit rows.
    """
    for owner in list(network.modules()):
        for name, child in list(owner.named_children()):
            if isinstance(child, nn.Linear) and child.weight is not network.vocabulary_weight:
                setattr(owner, name, Int8Linear(child))
    if network.spec.soft_cap is None and network.spec.logit_scale > 0:
        vocabulary: Tensor = network.vocabulary_weight  # type: ignore[assignment]
        network.vocabulary_codes = eight_bit_rows(vocabulary[: network.spec.vocab_size])


def eight_bit_rows(weight: Tensor) -> Int8Weight:
    """A float matrix [R, C] as int8 rows; one read from int8 rows gets exactly those codes and scales again."""
    with torch.no_grad():
        codes, scale = quantise_rows(weight)
        # The stored scale, times 127 and divided by it, may round to a neighbour of itself.
        above = torch.full_like(scale, torch.inf)
        for candidate in (torch.nextafter(scale, above), torch.nextafter(scale, -above)):
            exact = (codes.float() * candidate[:, None] == weight).all(dim=1)
            scale = torch.where(exact, candidate, scale)
    return Int8Weight(codes, scale)
