"""GPT2, the whole model. Read `GPT2.forward` first.

Shapes are those of llama.py: B batch, S positions in, T positions attended to, D dim, N heads, H head_dim, F ffn_dim,
V vocabulary. Sizes of heads are read off the tensors, so that a rank that holds a share of the heads runs the same
code. A part that is None is skipped, so that a stage of a pipeline is the same model without the other stages' parts.
"""

import math
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.models.attention import CausalAttention, KVCache, LayerCache, next_positions
from meshwright.models.initial import Constant, Normal
from meshwright.spec.model.gpt2_architecture import GPT2Architecture

_ADDED_TO_THE_STREAM = ("attention.output.weight", "ffn.down.weight")
_STD = 0.02


class GPT2(nn.Module):
    """A decoder-only transformer; its weights mean nothing until `initialize` or the meta device's filler sets them."""

    takes_positions = True
    """`forward` wants to know where in the sequence its inputs stand, and of which document they are."""
    first_parts = ("embedding", "positions")
    """What the first stage of a pipeline holds besides blocks."""

    def __init__(self, architecture: GPT2Architecture) -> None:
        super().__init__()
        self.architecture = architecture
        self.embedding: Any = nn.Embedding(architecture.vocab_size, architecture.dim)
        self.positions: Any = nn.Embedding(architecture.max_seq_len, architecture.dim)
        self.blocks = nn.ModuleList([Block(architecture) for _ in range(architecture.num_layers)])
        self.norm: Any = nn.LayerNorm(architecture.dim, eps=architecture.norm_eps)
        # A tied head is the embedding's weight used twice, as in Llama.
        untied = not architecture.tie_embeddings
        self.head = nn.Linear(architecture.dim, architecture.vocab_size, bias=False) if untied else None

    @property
    def last_parts(self) -> tuple[str, ...]:
        """Return what the last stage of a pipeline holds besides blocks."""
        return ("norm", "head") if not self.architecture.tie_embeddings else ("norm", "embedding")

    @property
    def stage_width(self) -> int:
        """Return the width of what one stage passes on to the next: a vector for each token."""
        return self.architecture.dim

    def forward(
        self,
        inputs: Tensor,
        positions_S: Tensor | None = None,
        documents_BS: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Return logits_BSV: what follows each token of `inputs`, which may be an earlier stage's x_BSD instead.

        `positions_S` are 0, 1, ... or go on where `cache` ends; tokens attend within one of `documents_BS` only.
        """
        if inputs.is_floating_point():
            x_BSD = inputs
        else:
            if positions_S is None:
                positions_S = next_positions(inputs, cache)
            # As a batch of one sequence, so that tensor parallelism cuts both embeddings' outputs along the same dim.
            x_BSD = self.embedding(inputs) + self.positions(positions_S[None])
        for index, block in enumerate(self.blocks):
            if block is not None:
                x_BSD = block(x_BSD, documents_BS, None if cache is None else cache.layers[index])
        if self.norm is None:
            return x_BSD
        x_BSD = self.norm(x_BSD)
        return F.linear(x_BSD, self.embedding.weight) if self.head is None else self.head(x_BSD)

    def initial(self, fqn: str) -> Normal | Constant:
        """Return how the parameter `fqn` starts: as transformers' GPT-2 does.

        Matrices and embeddings have std 0.02. Those that add to the residual stream are scaled down by
        sqrt(2 num_layers), the number of additions (Radford et al. 2019, "Language Models are Unsupervised Multitask
        Learners", section 2.3).
        """
        if fqn.endswith("norm.weight"):
            return Constant(1.0)
        if fqn.endswith("bias"):
            return Constant(0.0)
        if fqn.endswith(_ADDED_TO_THE_STREAM):
            return Normal(_STD / math.sqrt(2 * self.architecture.num_layers))
        return Normal(_STD)


class Block(nn.Module):
    """Attention, then the feed-forward network, each on a normalised input and added to the residual stream."""

    def __init__(self, architecture: GPT2Architecture) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(architecture.dim, eps=architecture.norm_eps)
        self.attention = Attention(architecture)
        self.ffn_norm = nn.LayerNorm(architecture.dim, eps=architecture.norm_eps)
        self.ffn = FeedForward(architecture.dim, architecture.ffn_dim)

    def forward(self, x_BSD: Tensor, documents_BS: Tensor | None = None, cache: LayerCache | None = None) -> Tensor:
        """Return x_BSD after the block."""
        attended_BSD: Tensor = self.attention(self.attention_norm(x_BSD), documents_BS, cache)
        x_BSD = x_BSD + attended_BSD
        fed_BSD: Tensor = self.ffn(self.ffn_norm(x_BSD))
        return x_BSD + fed_BSD


class Attention(nn.Module):
    """Causal attention with as many key heads as query heads, and a bias in every projection."""

    def __init__(self, architecture: GPT2Architecture) -> None:
        super().__init__()
        self.head_dim = architecture.head_dim
        self.query = nn.Linear(architecture.dim, architecture.attention_dim)
        self.key = nn.Linear(architecture.dim, architecture.attention_dim)
        self.value = nn.Linear(architecture.dim, architecture.attention_dim)
        self.output = nn.Linear(architecture.attention_dim, architecture.dim)
        self.core = CausalAttention()

    def forward(self, x_BSD: Tensor, documents_BS: Tensor | None, cache: LayerCache | None) -> Tensor:
        """Return what attention adds to the residual stream, x_BSD."""
        query_BSNH = self.query(x_BSD).unflatten(-1, (-1, self.head_dim))
        key_BTNH = self.key(x_BSD).unflatten(-1, (-1, self.head_dim))
        value_BTNH = self.value(x_BSD).unflatten(-1, (-1, self.head_dim))
        if cache is not None:
            key_BTNH, value_BTNH = cache.append(key_BTNH, value_BTNH)
        attended_BSNH = self.core(query_BSNH, key_BTNH, value_BTNH, documents_BS)
        output_BSD: Tensor = self.output(attended_BSNH.flatten(-2))
        return output_BSD


class FeedForward(nn.Module):
    """down(gelu(up(x))), GELU in the tanh approximation that GPT-2 was trained with."""

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, ffn_dim)
        self.down = nn.Linear(ffn_dim, dim)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Return what the network adds to the residual stream, x_BSD."""
        down_BSD: Tensor = self.down(F.gelu(self.up(x_BSD), approximate="tanh"))
        return down_BSD
