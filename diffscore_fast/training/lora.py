"""Low-rank adapters on all products of a Llama network, whose own weights stay as they are; see `backbones.adapter`."""

from __future__ import annotations

import copy
import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from diffscore_fast.backbones.adapter import MASK_NAME, SCALE, merged_weights
from diffscore_fast.backbones.config import PACKAGE_SECTION
from diffscore_fast.backbones.llama import LlamaBackbone
from diffscore_fast.backbones.llama_families import LLAMA_FAMILIES
from diffscore_fast.backbones.network import Network
from diffscore_fast.backbones.spec import BackboneSpec
from diffscore_fast.backbones.weights import file_sha256, load_weights, save_weights
from diffscore_fast.errors import CheckpointError
from diffscore_fast.ops import ResidualNorm

ADAPTED = ("qkv", "out", "gate_up", "down")


class LowRank(nn.Module):
    """The factors of one product's change, float32: `lora_A` [r, in] random, `lora_B` [out, r] zero to begin with."""

    def __init__(self, rows: int, columns: int, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        bound = 1 / math.sqrt(columns)
        self.lora_A = nn.Parameter(torch.empty(rank, columns).uniform_(-bound, bound, generator=generator))
        self.lora_B = nn.Parameter(torch.zeros(rows, rank))


class AdaptedLlama(LlamaBackbone):
    """A Llama network with adapters and a mask embedding, which alone learn.

    Parameters
    ----------
    base : LlamaBackbone
        Its weights are shared, not copied.
    rank : int
    seed : int
        Of the random factors.
    dtype : torch.dtype
        Of the products. With bfloat16, the products' weights are converted copies; the residual stream, the norms and
        what learns stay in float32.
    """

    def __init__(self, base: LlamaBackbone, rank: int = 64, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        Network.__init__(self)
        self.spec, self.rotary_base = base.spec, base.rotary_base
        self.token_embedding, self.layers = base.token_embedding, base.layers
        self.norm, self.head = base.norm, base.head
        self._vocabulary_weight = base.vocabulary_weight
        if dtype != self.dtype:
            self.layers = copy.deepcopy(base.layers)
            for layer in self.layers:
                for name in ADAPTED:
                    getattr(layer, name).to(dtype)
            self._vocabulary_weight = nn.Parameter(base.vocabulary_weight.to(dtype))
        self.requires_grad_(False)
        generator = torch.Generator().manual_seed(seed)
        self.mask_embedding = nn.Parameter(base.token_embedding.weight[base.spec.mask_id].detach().float().clone())
        self.adapters = nn.ModuleDict()
        # By product: its parts' rows [start, stop) of the stacked weight, and their factors.
        self._parts: dict[int, list[tuple[int, int, LowRank]]] = {}
        family = LLAMA_FAMILIES[base.spec.family]
        for index in range(base.spec.num_layers):
            for name in ADAPTED:
                product = getattr(self.layers[index], name)
                start = 0
                for part, rows in zip(family.layer[name], _part_rows(base.spec, name, product), strict=True):
                    factors = LowRank(rows, product.in_features, rank, generator)
                    self.adapters[f"{family.layers}.{index}.{part}".replace(".", "/")] = factors
                    self._parts.setdefault(id(product), []).append((start, start + rows, factors))
                    start += rows

    @property
    def vocabulary_weight(self) -> Tensor:
        return self._vocabulary_weight

    def learnt(self) -> dict[str, nn.Parameter]:
        """What learns, under the names of an adapter file."""
        named = {name.replace("/", "."): item for name, item in self.adapters.named_parameters()}
        return {**named, MASK_NAME: self.mask_embedding}

    @torch.no_grad()
    def load_adapter(self, adapter: Mapping[str, Tensor]) -> None:
        """Take over an adapter, strictly by name and shape.

        Raises
        ------
        CheckpointError
            If a tensor is missing, left over or of another shape.
        """
        learnt = self.learnt()
        if learnt.keys() != adapter.keys():
            raise CheckpointError(
                f"the adapter does not fit the model: missing {sorted(learnt.keys() - adapter)[:4]}, "
                f"unexpected {sorted(adapter.keys() - learnt)[:4]}"
            )
        for name, parameter in learnt.items():
            if parameter.shape != adapter[name].shape:
                raise CheckpointError(
                    f"the adapter's {name} is {list(adapter[name].shape)}, the model wants "
                    f"{list(parameter.shape)}; is the rank another?"
                )
            parameter.copy_(adapter[name])

    def embed(self, tokens: Tensor, positions: Tensor, types: Tensor) -> Tensor:
        masked = (tokens == self.spec.mask_id)[:, None]
        return torch.where(masked, self.mask_embedding.to(self.dtype), self.token_embedding(tokens))

    def _feed_forward(
        self, x: Tensor, up: nn.Linear, down: nn.Linear, activation: str, residual_norm: ResidualNorm | None = None
    ) -> Tensor:
        assert residual_norm is None, "Llama's layers norm their inputs"
        return self._product(down, self._product(up, x, activation=activation))

    def _product(self, layer: nn.Linear, x: Tensor, rows: slice = slice(None), **epilogue: Any) -> Tensor:
        start, stop, _ = rows.indices(layer.out_features)
        factors = [item for first, last, item in self._parts[id(layer)] if start <= first and last <= stop]
        x = x.to(layer.weight.dtype)
        inner = functional.linear(x, torch.cat([item.lora_A for item in factors]).to(x.dtype))  # [N, parts * r]
        change = [
            functional.linear(part, item.lora_B.to(x.dtype))
            for part, item in zip(inner.chunk(len(factors), dim=1), factors, strict=True)
        ]
        bias = None if layer.bias is None else layer.bias[rows]
        product = functional.linear(x, layer.weight[rows], bias) + SCALE * torch.cat(change, dim=1)
        if epilogue.get("activation") == "swiglu":
            gate, up = product.chunk(2, dim=1)
            product = functional.silu(gate) * up
        return product


def _part_rows(spec: BackboneSpec, name: str, product: nn.Linear) -> list[int]:
    """Rows of the parts of a stacked weight."""
    if name == "qkv":
        return [spec.num_heads * spec.head_dim, *[spec.num_kv_heads * spec.head_dim] * 2]
    return [product.out_features // 2] * 2 if name == "gate_up" else [product.out_features]


def write_merged_folder(base: Path, adapter: Mapping[str, Tensor], out: Path) -> str:
    """Write the model folder `out`: the weights of the folder `base` with an adapter merged. Returns the checksum.

    Raises
    ------
    CheckpointError
        If a tensor of the adapter has no weight in the base, or does not fit it.
    """
    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    weights = load_weights(base / "model.safetensors")
    embedding = f"{LLAMA_FAMILIES[config['model_type']].token_embedding}.weight"
    weights = merged_weights(weights, adapter, embedding, config["mask_token_id"])
    out.mkdir(parents=True, exist_ok=True)
    save_weights(out / "model.safetensors", weights, eight_bit=False)
    checksum = file_sha256(out / "model.safetensors")
    config.setdefault(PACKAGE_SECTION, {})["weights_sha256"] = checksum
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    shutil.copyfile(base / "tokenizer.json", out / "tokenizer.json")
    return checksum
