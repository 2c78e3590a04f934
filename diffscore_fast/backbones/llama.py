"""Llama networks without their causal mask: RMS norms, rotary positions, SwiGLU, grouped key-value heads.

LLaDA (arXiv 2502.09992) and Dream (arXiv 2508.15487) are masked-diffusion models of this kind.
"""

from __future__ import annotations

from torch import Tensor, nn

from diffscore_fast.backbones.rotary import RotaryBackbone
from diffscore_fast.backbones.spec import BackboneSpec


class LlamaLayer(nn.Module):
    """One layer. Queries, keys and values share one weight; the gate and the projection that it gates share another."""

    def __init__(
        self, spec: BackboneSpec, intermediate_size: int, eps: float, qkv_bias: bool, head_norms: bool
    ) -> None:
        super().__init__()
        size, head_dim = spec.hidden_size, spec.head_dim
        self.attention_norm = nn.RMSNorm(size, eps=eps)
        self.qkv = nn.Linear(size, (spec.num_heads + 2 * spec.num_kv_heads) * head_dim, bias=qkv_bias)
        if head_norms:
            self.query_norm = nn.RMSNorm(head_dim, eps=eps)
            self.key_norm = nn.RMSNorm(head_dim, eps=eps)
        self.out = nn.Linear(spec.num_heads * head_dim, size, bias=False)
        self.feed_forward_norm = nn.RMSNorm(size, eps=eps)
        self.gate_up = nn.Linear(size, 2 * intermediate_size, bias=False)
        self.down = nn.Linear(intermediate_size, size, bias=False)


class LlamaBackbone(RotaryBackbone):
    """A masked-diffusion language model with Llama's layers, split around attention as `SplitBackbone` asks.

    Parameters
    ----------
    spec : BackboneSpec
    intermediate_size : int
        Hidden size of the feed-forward.
    eps : float
        Epsilon of the RMS norms.
    rotary_base : float
        See `RotaryBackbone`.
    qkv_bias : bool
    head_norms : bool
        Whether each head of the queries and keys has an RMS norm before its position (Qwen3).
    tied_head : bool
        Whether the vocabulary projection is the embedding.
    """

    def __init__(
        self,
        spec: BackboneSpec,
        *,
        intermediate_size: int,
        eps: float,
        rotary_base: float,
        qkv_bias: bool = False,
        head_norms: bool = False,
        tied_head: bool = False,
    ) -> None:
        super().__init__(spec, rotary_base)
        self.token_embedding = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.layers = nn.ModuleList(
            LlamaLayer(spec, intermediate_size, eps, qkv_bias, head_norms) for _ in range(spec.num_layers)
        )
        self.norm = nn.RMSNorm(spec.hidden_size, eps=eps)
        self.head = None if tied_head else nn.Linear(spec.hidden_size, spec.vocab_size, bias=False)

    @property
    def vocabulary_weight(self) -> Tensor:
        return self.token_embedding.weight if self.head is None else self.head.weight

    @property
    def vocabulary_bias(self) -> Tensor | None:
        return None

    def attention_outputs(self, layer: int, hidden: Tensor, attended: Tensor) -> Tensor:
        block = self._layer(layer)
        hidden = hidden + self._product(block.out, attended.flatten(1))
        return hidden + self._feed_forward(block.feed_forward_norm(hidden), block.gate_up, block.down, "swiglu")
