"""GPT-2. Read `GPT2.forward` first.

Shapes: B batch, S positions in, T positions attended to, D dim, N heads, H head_dim, F ffn_dim, V vocabulary.
Numbers of heads are inferred from tensors, so that a rank with a shard of the heads runs the same code. Parts that are
None are skipped, so that a pipeline stage is the same model without the other stages' parts.
"""

import math
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.models.attention.causal_attention import CausalAttention, KVCache, LayerCache, next_positions
from meshwright.models.initial import Constant, Normal
from meshwright.spec.model.gpt2_architecture import GPT2Architecture

_RESIDUAL_OUTPUTS = ("attention.output.weight", "ffn.down.weight")
_STD = 0.02


class GPT2(nn.Module):
    """A decoder-only transformer; uninitialized until `initialize` or materialize fills it."""

    takes_positions = True
    """`forward` takes positions and documents."""
    first_parts = ("embedding", "positions")
    """Modules of the first pipeline stage besides blocks."""
    last_parts: tuple[str, ...]
    """Modules of the last pipeline stage besides blocks."""
    stage_width: int
    """Width of the activations between stages."""
    returns_hidden = False
    """Whether `forward` leaves the head to the loss and returns its input (layout.loss_chunks)."""

    def __init__(self, architecture: GPT2Architecture) -> None:
        super().__init__()
        self.architecture = architecture
        self.last_parts = ("norm", "embedding" if architecture.tie_embeddings else "head")
        self.stage_width = architecture.dim
        self.embedding: Any = nn.Embedding(architecture.vocab_size, architecture.dim)
        self.positions: Any = nn.Embedding(architecture.max_seq_len, architecture.dim)
        self.blocks = nn.ModuleList([GPT2Block(architecture) for _ in range(architecture.num_layers)])
        self.norm: Any = nn.LayerNorm(architecture.dim, eps=architecture.norm_eps)
        # A tied head is the embedding's weight used twice, as in Llama.
        untied = not architecture.tie_embeddings
        self.head = nn.Linear(architecture.dim, architecture.vocab_size, bias=False) if untied else None

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
        if inputs.is_floating_point():
            x_BSD = inputs
        else:
            if positions_S is None:
                positions_S = next_positions(inputs, cache)
            # With a dim of sequences: tensor parallelism shards both embeddings' outputs along the same dim.
            positions_BS = positions_S if positions_S.ndim == 2 else positions_S[None]
            x_BSD = self.embedding(inputs) + self.positions(positions_BS)
        for index, block in enumerate(self.blocks):
            if block is not None:
                x_BSD = block(x_BSD, documents_BS, None if cache is None else cache.layers[index])
        if self.norm is None:
            return x_BSD
        x_BSD = self.norm(x_BSD)
        if not self.returns_hidden:
            x_BSD = F.linear(x_BSD, self.embedding.weight) if self.head is None else self.head(x_BSD)
        return x_BSD

    def initial(self, fqn: str) -> Normal | Constant:
        """Return the initial values of the parameter `fqn`, as in transformers' GPT-2.

        Matrices and embeddings have std 0.02. Outputs to the residual stream are scaled down by
        sqrt(2 num_layers), the number of additions (Radford et al. 2019, "Language Models are Unsupervised Multitask
        Learners", section 2.3).
        """
        if fqn.endswith("norm.weight"):
            return Constant(1.0)
        if fqn.endswith("bias"):
            return Constant(0.0)
        if fqn.endswith(_RESIDUAL_OUTPUTS):
            return Normal(_STD / math.sqrt(2 * self.architecture.num_layers))
        return Normal(_STD)


class GPT2Block(nn.Module):
    """Attention, then the feed-forward network, each on a normalised input and added to the residual stream."""

    def __init__(self, architecture: GPT2Architecture) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(architecture.dim, eps=architecture.norm_eps)
        self.attention = GPT2Attention(architecture)
        self.ffn_norm = nn.LayerNorm(architecture.dim, eps=architecture.norm_eps)
        self.ffn = GPT2FeedForward(architecture.dim, architecture.ffn_dim)

    def forward(self, x_BSD: Tensor, documents_BS: Tensor | None = None, cache: LayerCache | None = None) -> Tensor:
        """Return x_BSD after the block."""
        attended_BSD: Tensor = self.attention(self.attention_norm(x_BSD), documents_BS, cache)
        x_BSD = x_BSD + attended_BSD
        fed_BSD: Tensor = self.ffn(self.ffn_norm(x_BSD))
        return x_BSD + fed_BSD


class GPT2Attention(nn.Module):
    """Causal multi-head attention with biases."""

    def __init__(self, architecture: GPT2Architecture) -> None:
        super().__init__()
        self.head_dim = architecture.head_dim
        self.query = nn.Linear(architecture.dim, architecture.attention_dim)
        self.key = nn.Linear(architecture.dim, architecture.attention_dim)
        self.value = nn.Linear(architecture.dim, architecture.attention_dim)
        self.output = nn.Linear(architecture.attention_dim, architecture.dim)
        self.core = CausalAttention()

    def forward(self, x_BSD: Tensor, documents_BS: Tensor | None, cache: LayerCache | None) -> Tensor:
        """Return x_BSD, the residual update of attention."""
        query_BSNH = self.query(x_BSD).unflatten(-1, (-1, self.head_dim))
        key_BTNH = self.key(x_BSD).unflatten(-1, (-1, self.head_dim))
        value_BTNH = self.value(x_BSD).unflatten(-1, (-1, self.head_dim))
        if cache is not None:
            key_BTNH, value_BTNH = cache.append(key_BTNH, value_BTNH)
        attended_BSNH = self.core(query_BSNH, key_BTNH, value_BTNH, documents_BS)
        output_BSD: Tensor = self.output(attended_BSNH.flatten(-2))
        return output_BSD


class GPT2FeedForward(nn.Module):
    """down(gelu(up(x))), with the tanh approximation of GELU."""

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, ffn_dim)
        self.down = nn.Linear(ffn_dim, dim)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Return x_BSD, the residual update."""
        down_BSD: Tensor = self.down(F.gelu(self.up(x_BSD), approximate="tanh"))
        return down_BSD
