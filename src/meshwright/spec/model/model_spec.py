"""ModelSpec: a model as an ordered list of block groups, each op with its shapes; no tensor, no torch.

The FLOPs are those of MFU: for one token 6 x matmul parameters (head included, embedding lookup not; of the experts
those that the token goes to) plus 6 L heads head_dim s of causal attention, head_dim being the mean of that of keys and
that of values. The 6 of the parameters is 2 (multiply, add) x 3 (forward, backward to the inputs, backward to the
weights). That of attention is 2 matmuls x 2 x 3 passes, halved since the mask hides one half of the pairs.
Recomputation does not count. The mask's half is exact up to one part in s: the diagonal.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveInt

from meshwright.errors import UnsupportedError
from meshwright.spec.model.architecture import LlamaArchitecture
from meshwright.spec.model.gpt2_architecture import GPT2Architecture
from meshwright.spec.model.gpt2_ops import gpt2_ops
from meshwright.spec.model.moe_architecture import LatentAttention, MoEArchitecture
from meshwright.spec.model.op import Attention, Elementwise, Embedding, GroupedMatmul, Head, Matmul, Norm, Op, Rope
from meshwright.spec.noun import Noun

BYTES_PER_ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}


class BlockGroup(Noun):
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
    def num_matmul_parameters(self) -> int:
        """Return the weights of one block that each token is multiplied with."""
        return sum(op.num_matmul_parameters for op in self.ops)

    def forward_flops_per_token(self, seq_len: int) -> int:
        """Return the model FLOPs of one block's forward pass for one token of a sequence of `seq_len`."""
        return sum(op.forward_flops_per_token(seq_len) for op in self.ops)


class ModelSpec(Noun):
    """A model's block groups, from the tokens to the output."""

    groups: Annotated[tuple[BlockGroup, ...], Field(strict=False)]
    """The groups in the order of forward."""

    @property
    def num_parameters(self) -> int:
        """Return the exact number of parameters, tied ones once."""
        return sum(group.count * group.num_parameters for group in self.groups)

    @property
    def num_active_matmul_parameters(self) -> int:
        """Return the weights that each token is multiplied with: a tied head counts, an embedding does not."""
        return sum(group.count * group.num_matmul_parameters for group in self.groups)

    def flops_per_token(self, seq_len: int) -> int:
        """Return the model FLOPs of forward and backward for one token of a sequence of `seq_len`."""
        return 3 * sum(group.count * group.forward_flops_per_token(seq_len) for group in self.groups)

    def parameter_bytes(self, dtype: str) -> int:
        """Return the bytes of all parameters in `dtype`; raises UnsupportedError for one that is not known."""
        if dtype not in BYTES_PER_ELEMENT:
            raise UnsupportedError(f"dtype = {dtype!r} has no known size: choose one of {', '.join(BYTES_PER_ELEMENT)}")
        return self.num_parameters * BYTES_PER_ELEMENT[dtype]


def model_spec(architecture: LlamaArchitecture) -> ModelSpec:
    """Return what the model of `architecture` computes (models/build.py), op by op."""
    if isinstance(architecture, GPT2Architecture):
        ops = gpt2_ops(architecture)
        counts = (("", 1, ops.first), ("blocks", architecture.num_layers, ops.block), ("", 1, ops.last))
        return ModelSpec(groups=tuple(BlockGroup(name=name, count=count, ops=part) for name, count, part in counts))
    first = Embedding(name="embedding", vocab_size=architecture.vocab_size, dim=architecture.dim)
    last = (
        Norm(name="norm", width=architecture.dim),
        Head(name="head", dim=architecture.dim, vocab_size=architecture.vocab_size, tied=architecture.tie_embeddings),
    )
    return ModelSpec(
        groups=(
            BlockGroup(name="", count=1, ops=(first,)),
            *_block_groups(architecture),
            BlockGroup(name="", count=1, ops=last),
        )
    )


def _block_groups(architecture: LlamaArchitecture) -> tuple[BlockGroup, ...]:
    """Return the groups of equal blocks, in order: dense ones, then mixtures of experts, where there are any."""
    if not isinstance(architecture, MoEArchitecture):
        attention, kinds = _attention_ops(architecture), [(architecture.num_layers, _ffn_ops(architecture))]
    else:
        latent, num_dense = architecture.latent, architecture.num_dense_layers
        attention = _attention_ops(architecture) if latent is None else _latent_attention_ops(architecture, latent)
        kinds = [(num_dense, _ffn_ops(architecture)), (architecture.num_layers - num_dense, _moe_ops(architecture))]
    return tuple(BlockGroup(name="blocks", count=count, ops=(*attention, *ffn)) for count, ffn in kinds if count)


def _attention_ops(architecture: LlamaArchitecture) -> tuple[Op, ...]:
    dim, head_dim = architecture.dim, architecture.head_dim
    heads, kv_heads = architecture.num_heads, architecture.num_kv_heads
    norms = (
        Norm(name="attention.query_norm", width=head_dim, vectors_per_token=heads),
        Norm(name="attention.key_norm", width=head_dim, vectors_per_token=kv_heads),
    )
    return (
        Norm(name="attention_norm", width=dim),
        *(
            Matmul(
                name=f"attention.{name}",
                in_features=dim,
                out_features=width,
                tensor_split="columns",
                has_bias=architecture.qkv_bias,
            )
            for name, width in (
                ("query", architecture.attention_dim),
                ("key", architecture.kv_dim),
                ("value", architecture.kv_dim),
            )
        ),
        *(norms if architecture.qk_norm else ()),
        Rope(name="attention.rope", num_heads=heads + kv_heads, head_dim=head_dim),
        Attention(
            name="attention",
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            value_head_dim=head_dim,
            causal=True,
        ),
        Matmul(name="attention.output", in_features=architecture.attention_dim, out_features=dim, tensor_split="rows"),
        Elementwise(name="attention_residual", reads_per_token=2 * dim, writes_per_token=dim),
    )


def _latent_attention_ops(architecture: MoEArchitecture, latent: LatentAttention) -> tuple[Op, ...]:
    dim, heads = architecture.dim, architecture.num_heads
    queries, values = heads * architecture.head_dim, heads * latent.value_head_dim
    kv_heads = heads * (latent.plain_head_dim + latent.value_head_dim)
    query: tuple[Op, ...] = (
        Matmul(name="attention.query", in_features=dim, out_features=queries, tensor_split="columns"),
    )
    if latent.query_rank is not None:
        query = (
            Matmul(name="attention.query_down", in_features=dim, out_features=latent.query_rank),
            Norm(name="attention.query_norm", width=latent.query_rank),
            Matmul(
                name="attention.query_up", in_features=latent.query_rank, out_features=queries, tensor_split="columns"
            ),
        )
    return (
        Norm(name="attention_norm", width=dim),
        *query,
        Matmul(name="attention.kv_down", in_features=dim, out_features=latent.kv_rank + latent.rope_head_dim),
        Norm(name="attention.kv_norm", width=latent.kv_rank),
        Matmul(name="attention.kv_up", in_features=latent.kv_rank, out_features=kv_heads, tensor_split="columns"),
        # The turned part of the key is one for all heads.
        Rope(name="attention.rope", num_heads=heads + 1, head_dim=latent.rope_head_dim),
        Attention(
            name="attention",
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=architecture.head_dim,
            value_head_dim=latent.value_head_dim,
            causal=True,
        ),
        Matmul(name="attention.output", in_features=values, out_features=dim, tensor_split="rows"),
        Elementwise(name="attention_residual", reads_per_token=2 * dim, writes_per_token=dim),
    )


def _ffn_ops(architecture: LlamaArchitecture) -> tuple[Op, ...]:
    dim = architecture.dim
    return (
        Norm(name="ffn_norm", width=dim),
        *_swiglu_ops("ffn", dim, architecture.ffn_dim),
        Elementwise(name="ffn_residual", reads_per_token=2 * dim, writes_per_token=dim),
    )


def _moe_ops(architecture: MoEArchitecture) -> tuple[Op, ...]:
    dim, ffn_dim, chosen = architecture.dim, architecture.expert_ffn_dim, architecture.experts_per_token
    shared = _swiglu_ops("ffn.shared", dim, architecture.shared_ffn_dim) if architecture.num_shared_experts else ()

    def experts(part: str, in_features: int, out_features: int) -> GroupedMatmul:
        return GroupedMatmul(
            name=f"ffn.experts.{part}",
            num_experts=architecture.num_experts,
            experts_per_token=chosen,
            in_features=in_features,
            out_features=out_features,
        )

    def elementwise(name: str, reads: int, writes: int, *, keeps_inputs: bool = False) -> Elementwise:
        return Elementwise(name=name, reads_per_token=reads, writes_per_token=writes, keeps_inputs=keeps_inputs)

    return (
        Norm(name="ffn_norm", width=dim),
        Matmul(name="ffn.router", in_features=dim, out_features=architecture.num_experts),
        elementwise("ffn.to_rows", chosen * dim, chosen * dim),
        experts("gate", dim, ffn_dim),
        experts("up", dim, ffn_dim),
        elementwise("ffn.experts.swiglu", 2 * chosen * ffn_dim, chosen * ffn_dim, keeps_inputs=True),
        experts("down", ffn_dim, dim),
        elementwise("ffn.from_rows", chosen * dim, chosen * dim),
        elementwise("ffn.mix", chosen * dim, dim, keeps_inputs=True),
        *shared,
        elementwise("ffn_residual", (3 if shared else 2) * dim, dim),
    )


def _swiglu_ops(name: str, dim: int, ffn_dim: int) -> tuple[Op, ...]:
    return (
        Matmul(name=f"{name}.gate", in_features=dim, out_features=ffn_dim, tensor_split="columns"),
        Matmul(name=f"{name}.up", in_features=dim, out_features=ffn_dim, tensor_split="columns"),
        Elementwise(name=f"{name}.swiglu", reads_per_token=2 * ffn_dim, writes_per_token=ffn_dim, keeps_inputs=True),
        Matmul(name=f"{name}.down", in_features=ffn_dim, out_features=dim, tensor_split="rows"),
    )
