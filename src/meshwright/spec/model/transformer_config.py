"""TransformerConfig: the sizes and switches that determine the ops of a decoder-only transformer.

Architectures that we train and models of published runs both become one; transformer_ops makes its ops.
"""

from dataclasses import dataclass

from meshwright.spec.model.moe_architecture import LatentAttention
from meshwright.spec.model.op import ElementwiseRole


@dataclass(frozen=True)
class AttentionConfig:
    """Causal self-attention with its projections."""

    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key and value heads."""
    head_dim: int
    """Width of a query or key head."""
    latent: LatentAttention | None = None
    """Multi-head latent attention; None for separate query, key and value projections."""
    window: int | None = None
    """Sliding window: last tokens that each one attends to, itself included; None for the whole sequence."""
    has_rope: bool = True
    qk_norm: bool = False
    """Whether each query and key head is normalised."""
    qkv_bias: bool = False
    output_bias: bool = False
    has_sinks: bool = False
    """Whether each query head has a learned logit in the softmax's denominator."""

    @property
    def value_head_dim(self) -> int:
        """Return the width of a value head."""
        return self.head_dim if self.latent is None else self.latent.value_head_dim


@dataclass(frozen=True)
class MLPConfig:
    """A dense feed-forward network."""

    ffn_dim: int
    """Width between its matmuls."""
    is_gated: bool = True
    """Whether the activation of a gate multiplies what is projected up, as in SwiGLU; else it has no gate: GELU."""
    has_bias: bool = False

    @property
    def activation(self) -> ElementwiseRole:
        """Return what is between its matmuls."""
        return "gated_activation" if self.is_gated else "activation"


@dataclass(frozen=True)
class MoEConfig:
    """A mixture of experts."""

    num_experts: int
    experts_per_token: int
    expert: MLPConfig
    """Of one routed expert."""
    shared: MLPConfig | None = None
    """Of the shared experts together; None without."""
    num_bias_passes: int = 0
    """Times that biases, clamps and scales read and write an expert's ffn_dim, each by an operator of its own."""
    router_bias: bool = False


@dataclass(frozen=True)
class BlocksConfig:
    """`count` equal blocks in a row."""

    count: int
    attention: AttentionConfig
    ffn: MLPConfig | MoEConfig


@dataclass(frozen=True)
class TransformerConfig:
    """A decoder-only transformer."""

    vocab_size: int
    dim: int
    """Width of the residual stream."""
    blocks: tuple[BlocksConfig, ...]
    """In the order of forward."""
    num_positions: int | None = None
    """Rows of the learned position embedding; None without one."""
    has_layer_norm: bool = False
    """Whether the norms of the residual stream are LayerNorm with a bias; else they are RMSNorm."""
    tie_embeddings: bool = False
    """Whether the head uses the embedding's weight."""
    predicts_second_token: bool = False
    """Whether a multi-token prediction module applies the head a second time; its block is one of `blocks`."""
