"""Llama 2 and 3, Mistral, Qwen2 and Qwen3. Read `Llama.forward` first.

Shapes: B batch, S positions in, T positions attended to (S, plus those in the cache), D dim, N query heads,
K key/value heads, H head_dim, F ffn_dim, V vocabulary. Numbers of heads are inferred from tensors, not from the
architecture, so that a rank with a shard of the heads runs the same code. Parts that are None are skipped, so that a
pipeline stage is the same model without the other stages' parts.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.models.attention.causal_attention import (
    AttentionSinks,
    CausalAttention,
    KVCache,
    LayerCache,
    next_positions,
)
from meshwright.models.initial import Constant, Normal
from meshwright.models.rope import Rope, rope_tables, rotate
from meshwright.spec.model.architecture import LlamaArchitecture

_RESIDUAL_OUTPUTS = ("attention.output.weight", "ffn.down.weight", "ffn.shared.down.weight", "ffn.experts.down")
_ZEROS = ("bias", "sinks.weight")
_BUFFERS = ("load_E", "padded_rows", "balance_loss", "z_loss", "num_forwards")


class Llama(nn.Module):
    """A decoder-only transformer; uninitialized until `initialize` or materialize fills it."""

    casts_block_inputs = False
    """Blocks get rotary angles, which must stay float32: rounding would lose the precision of positions."""
    takes_positions = True
    """`forward` takes positions and documents."""
    first_parts = ("embedding",)
    """Modules of the first pipeline stage besides blocks."""
    last_parts: tuple[str, ...]
    """Modules of the last pipeline stage besides blocks."""
    stage_width: int
    """Width of the activations between stages."""
    returns_hidden = False
    """Whether `forward` leaves the head to the loss and returns its input (layout.loss_chunks)."""

    def __init__(
        self, architecture: LlamaArchitecture, blocks: Iterable[nn.Module] | None = None, rope: Rope = rope_tables
    ) -> None:
        """`blocks` and `rope` replace the default blocks and rotary angles (models/build.py)."""
        super().__init__()
        self.architecture = architecture
        self.last_parts = ("norm", "embedding" if architecture.tie_embeddings else "head")
        self.stage_width = architecture.dim
        self.rope = rope
        self.embedding: Any = nn.Embedding(architecture.vocab_size, architecture.dim)
        self.blocks = nn.ModuleList(blocks or _blocks(architecture))
        self.norm: Any = nn.RMSNorm(architecture.dim, eps=architecture.norm_eps)
        # A tied head uses the embedding's weight, not a second parameter with shared storage, which moving the model
        # to another device would silently untie.
        self.head = None if architecture.tie_embeddings else _linear(architecture.dim, architecture.vocab_size)

    def forward(
        self,
        inputs: Tensor,
        positions_S: Tensor | None = None,
        documents_BS: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Return logits_BSV, or x_BSD from a stage without head; `inputs` are tokens, or the previous stage's x_BSD.

        `positions_S`, of all sequences or [B, S], default to 0, 1, ... or to those after `cache`; tokens attend within
        their document only.
        """
        if positions_S is None:
            positions_S = next_positions(inputs, cache)
        cos_SH, sin_SH = self.rope(self.architecture, positions_S)
        x_BSD = inputs if inputs.is_floating_point() else self.embedding(inputs)
        for index, block in enumerate(self.blocks):
            if block is not None:
                x_BSD = block(x_BSD, cos_SH, sin_SH, documents_BS, None if cache is None else cache.layers[index])
        if self.norm is None:
            return x_BSD
        x_BSD = self.norm(x_BSD)
        if not self.returns_hidden:
            x_BSD = F.linear(x_BSD, self.embedding.weight) if self.head is None else self.head(x_BSD)
        return x_BSD

    def initial(self, fqn: str) -> Normal | Constant:
        """Return the initial values of the parameter or buffer `fqn`.

        Matrices have std sqrt(2 / (5 dim)), which is 0.02 at dim 1000 and keeps the first logits' spread (0.6) and
        each layer's gain the same at any width (SmallInit of Nguyen & Salazar 2019, arXiv:1910.05895). Outputs
        to the residual stream are scaled down by sqrt(2 num_layers), the number of additions, so that its variance
        does not grow with depth (GPT-2).
        """
        if fqn.endswith("norm.weight"):
            return Constant(1.0)
        if fqn.endswith((*_BUFFERS, *_ZEROS)):
            return Constant(0.0)
        std = math.sqrt(2 / (5 * self.architecture.dim))
        if fqn.endswith(_RESIDUAL_OUTPUTS):
            std /= math.sqrt(2 * self.architecture.num_layers)
        return Normal(std)


class LlamaBlock(nn.Module):
    """Attention, then the feed-forward network, each on a normalised input and added to the residual stream."""

    def __init__(
        self, architecture: LlamaArchitecture, attention: nn.Module | None = None, ffn: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(architecture.dim, eps=architecture.norm_eps)
        self.attention = LlamaAttention(architecture) if attention is None else attention
        self.ffn_norm = nn.RMSNorm(architecture.dim, eps=architecture.norm_eps)
        self.ffn = LlamaFeedForward(architecture.dim, architecture.ffn_dim) if ffn is None else ffn

    def forward(
        self,
        x_BSD: Tensor,
        cos_SH: Tensor,
        sin_SH: Tensor,
        documents_BS: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Return x_BSD after the block."""
        attended_BSD: Tensor = self.attention(self.attention_norm(x_BSD), cos_SH, sin_SH, documents_BS, cache)
        x_BSD = x_BSD + attended_BSD
        fed_BSD: Tensor = self.ffn(self.ffn_norm(x_BSD))
        return x_BSD + fed_BSD


class LlamaAttention(nn.Module):
    """Causal grouped-query attention: each key/value head serves N / K query heads."""

    def __init__(self, architecture: LlamaArchitecture, window: int | None = None) -> None:
        super().__init__()
        self.head_dim = architecture.head_dim
        has_bias = architecture.qkv_bias
        self.query = _linear(architecture.dim, architecture.attention_dim, has_bias)
        self.key = _linear(architecture.dim, architecture.kv_dim, has_bias)
        self.value = _linear(architecture.dim, architecture.kv_dim, has_bias)
        self.output = _linear(architecture.attention_dim, architecture.dim, architecture.has_sinks_and_output_bias)
        # One scale of width H, shared by all heads.
        self.query_norm = nn.RMSNorm(self.head_dim, eps=architecture.norm_eps) if architecture.qk_norm else None
        self.key_norm = nn.RMSNorm(self.head_dim, eps=architecture.norm_eps) if architecture.qk_norm else None
        self.sinks = AttentionSinks(architecture.num_heads) if architecture.has_sinks_and_output_bias else None
        self.core = CausalAttention(window=window)

    def forward(
        self,
        x_BSD: Tensor,
        cos_SH: Tensor,
        sin_SH: Tensor,
        documents_BS: Tensor | None,
        cache: LayerCache | None,
    ) -> Tensor:
        """Return x_BSD, the residual update of attention."""
        query_BSNH = self.query(x_BSD).unflatten(-1, (-1, self.head_dim))
        key_BSKH = self.key(x_BSD).unflatten(-1, (-1, self.head_dim))
        value_BTKH = self.value(x_BSD).unflatten(-1, (-1, self.head_dim))
        if self.query_norm is not None and self.key_norm is not None:
            query_BSNH, key_BSKH = self.query_norm(query_BSNH), self.key_norm(key_BSKH)
        query_BSNH, key_BTKH = rotate(query_BSNH, cos_SH, sin_SH), rotate(key_BSKH, cos_SH, sin_SH)
        if cache is not None:
            key_BTKH, value_BTKH = cache.append(key_BTKH, value_BTKH)
        sinks_N = None if self.sinks is None else self.sinks()
        attended_BSNH = self.core(query_BSNH, key_BTKH, value_BTKH, documents_BS, sinks_N)
        output_BSD: Tensor = self.output(attended_BSNH.flatten(-2))
        return output_BSD


class LlamaFeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.gate = _linear(dim, ffn_dim)
        self.up = _linear(dim, ffn_dim)
        self.down = _linear(ffn_dim, dim)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Return x_BSD, the residual update."""
        gated_BSF = F.silu(self.gate(x_BSD)) * self.up(x_BSD)
        down_BSD: Tensor = self.down(gated_BSF)
        return down_BSD


def _blocks(architecture: LlamaArchitecture) -> list[LlamaBlock]:
    windows = [architecture.window_of(layer) for layer in range(architecture.num_layers)]
    return [LlamaBlock(architecture, attention=LlamaAttention(architecture, window)) for window in windows]


def _linear(in_features: int, out_features: int, has_bias: bool = False) -> nn.Linear:
    return nn.Linear(in_features, out_features, bias=has_bias)
