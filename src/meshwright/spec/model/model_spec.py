"""ModelSpec: a model as an ordered list of block groups, each op with its shapes; no tensor, no torch.

The FLOPs are those of MFU: for one token 6 x matmul parameters (head included, embedding lookup not; of the experts
those that the token goes to) plus 6 L heads head_dim s of causal attention, head_dim being the mean of that of keys and
that of values. The 6 of the parameters is 2 (multiply, add) x 3 (forward, backward to the inputs, backward to the
weights). That of attention is 2 matmuls x 2 x 3 passes, halved since the mask hides one half of the pairs.
Recomputation does not count. The mask's half is exact up to one part in s: the diagonal. Weights that are frozen
(spec/model/adapted_model.py) have no backward to the weights: 4 x their parameters, 6 x those of adapters, attention as
before; what stands before all that is trained has no backward at all.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from typing import Annotated

from pydantic import Field, PositiveInt

from meshwright.spec.frozen import Frozen
from meshwright.spec.model.architecture import LlamaArchitecture
from meshwright.spec.model.gpt2_architecture import GPT2Architecture
from meshwright.spec.model.gpt_oss_architecture import GptOssArchitecture
from meshwright.spec.model.moe_architecture import MoEArchitecture
from meshwright.spec.model.op import Op
from meshwright.spec.model.transformer_config import (
    AttentionConfig,
    BlocksConfig,
    MLPConfig,
    MoEConfig,
    TransformerConfig,
)
from meshwright.spec.model.transformer_ops import block_ops, embedding_ops, head_ops

BYTES_PER_ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}


class BlockGroup(Frozen):
    """`count` equal blocks in a row."""

    name: str
    """Module path of the group in the model; empty for the model itself."""
    count: PositiveInt
    """How many of them."""
    ops: Annotated[tuple[Op, ...], Field(strict=False)]
    """The ops of one block, in the order of forward."""

    @property
    def num_parameters(self) -> int:
        """Return the parameters of one block."""
        return sum(op.num_parameters for op in self.ops)

    @property
    def num_trained_parameters(self) -> int:
        """Return the parameters of one block that are trained."""
        return sum(op.num_trained_parameters for op in self.ops)

    @property
    def num_matmul_parameters(self) -> int:
        """Return the weights of one block that each token is multiplied with."""
        return sum(op.num_matmul_parameters for op in self.ops)

    def forward_flops_per_token(self, seq_len: int) -> int:
        """Return the model FLOPs of one block's forward pass for one token of a sequence of `seq_len`."""
        return sum(op.forward_flops_per_token(seq_len) for op in self.ops)

    def training_flops_per_token(self, seq_len: int) -> int:
        """Return the model FLOPs of one block's forward and backward for one token."""
        return sum(op.training_flops_per_token(seq_len) for op in self.ops)


class ModelSpec(Frozen):
    """A model's block groups, from the tokens to the output."""

    groups: Annotated[tuple[BlockGroup, ...], Field(strict=False)]
    """The groups in the order of forward."""

    @property
    def distinct_groups(self) -> tuple[BlockGroup, ...]:
        """Return the groups with those of equal ops as one, such as every second block, in the order of the first."""
        found: dict[tuple[Op, ...], BlockGroup] = {}
        for group in self.groups:
            count = found[group.ops].count if group.ops in found else 0
            found[group.ops] = group.replace(count=count + group.count)
        return tuple(found.values())

    @property
    def num_parameters(self) -> int:
        """Return the exact number of parameters, tied ones once."""
        return sum(group.count * group.num_parameters for group in self.groups)

    @property
    def num_trained_parameters(self) -> int:
        """Return how many of them are trained."""
        return sum(group.count * group.num_trained_parameters for group in self.groups)

    def flops_per_token(self, seq_len: int) -> int:
        """Return the model FLOPs of forward and backward for one token of a sequence of `seq_len`."""
        return sum(group.count * group.training_flops_per_token(seq_len) for group in self.groups)


def model_spec(architecture: LlamaArchitecture) -> ModelSpec:
    """Return what the model of `architecture` computes (models/build.py), op by op."""
    return transformer_spec(transformer_config(architecture))


def transformer_spec(config: TransformerConfig) -> ModelSpec:
    """Return what the model of `config` computes; kinds of blocks of which it has none are left out."""
    blocks = (
        BlockGroup(name="blocks", count=one.count, ops=block_ops(config, one)) for one in config.blocks if one.count
    )
    first = BlockGroup(name="", count=1, ops=embedding_ops(config))
    return ModelSpec(groups=(first, *blocks, BlockGroup(name="", count=1, ops=head_ops(config))))


def transformer_config(architecture: LlamaArchitecture) -> TransformerConfig:
    """Return the sizes and switches of the model of `architecture`."""
    is_gpt2 = isinstance(architecture, GPT2Architecture)
    attention = AttentionConfig(
        num_heads=architecture.num_heads,
        num_kv_heads=architecture.num_kv_heads,
        head_dim=architecture.head_dim,
        latent=architecture.latent if isinstance(architecture, MoEArchitecture) else None,
        has_rope=not is_gpt2,
        qk_norm=architecture.qk_norm,
        qkv_bias=architecture.qkv_bias or is_gpt2,
        output_bias=is_gpt2 or architecture.has_sinks_and_output_bias,
        has_sinks=architecture.has_sinks_and_output_bias,
    )
    return TransformerConfig(
        vocab_size=architecture.vocab_size,
        dim=architecture.dim,
        blocks=tuple(_blocks(architecture, attention)),
        num_positions=architecture.max_seq_len if is_gpt2 else None,
        has_layer_norm=is_gpt2,
        tie_embeddings=architecture.tie_embeddings,
    )


def _blocks(architecture: LlamaArchitecture, attention: AttentionConfig) -> Iterator[BlocksConfig]:
    """Yield runs of equal blocks in the order of forward."""
    is_gpt2 = isinstance(architecture, GPT2Architecture)
    mlp = MLPConfig(architecture.ffn_dim, is_gated=not is_gpt2, has_bias=is_gpt2)
    moe = _moe_config(architecture) if isinstance(architecture, MoEArchitecture) else None
    num_dense = architecture.num_dense_layers if isinstance(architecture, MoEArchitecture) else architecture.num_layers
    layers = range(architecture.num_layers)
    for (window, is_dense), run in groupby(layers, lambda i: (architecture.window_of(i), i < num_dense)):
        yield BlocksConfig(len([*run]), replace(attention, window=window), mlp if is_dense or moe is None else moe)


def _moe_config(architecture: MoEArchitecture) -> MoEConfig:
    shared_dim, is_gpt_oss = architecture.shared_ffn_dim, isinstance(architecture, GptOssArchitecture)
    return MoEConfig(
        num_experts=architecture.num_experts,
        experts_per_token=architecture.experts_per_token,
        expert=MLPConfig(architecture.expert_ffn_dim, has_bias=is_gpt_oss),
        shared=MLPConfig(shared_dim) if shared_dim else None,
        router_bias=is_gpt_oss,
        # Biases are added and gate and up clamped, scaled and shifted, an operator each.
        num_bias_passes=6 if is_gpt_oss else 0,
    )
