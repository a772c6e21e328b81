"""Op: one operation of a model with its shapes per token, as data that cost, planner and report can price.

Only matmuls and attention have model FLOPs, which is MFU's convention; the time of the other kinds is that of the bytes
they move, which follow from their shapes.
"""

import math
import re
from typing import Annotated, Literal, get_args

from pydantic import Field, PositiveInt

from meshwright.spec.frozen import Frozen
from meshwright.spec.step.adapter import PACKED_BLOCK

Part = Literal["embedding", "attention", "ffn", "router", "experts", "shared_experts", "head"]
TensorSplit = Literal["columns", "rows", "none"]
ElementwiseRole = Literal[
    "residual", "activation", "gated_activation", "permute", "unpermute", "combine", "bias", "adapter_sum",
    "adapter_gain",
]  # fmt: skip
WeightUse = Literal["trained", "frozen", "bfloat16", "int8", "nf4"]
"""What training does with an op's weights: updates them, or leaves them as they are, in the usual or in fewer bits."""
NARROW_WEIGHT_BYTES: dict[str, float] = {"int8": 1 + 2 / PACKED_BLOCK, "nf4": 0.5 + 2 / PACKED_BLOCK}
"""Of a weight that a matmul cannot read as it is kept, scales included: one in bfloat16 for each block (ours; QLoRA,
arXiv:2305.14314, has half a bit a weight less in scales)."""
KEPT_WEIGHT_BYTES = {"bfloat16": 2.0, **NARROW_WEIGHT_BYTES}
"""Of a frozen weight whose format the job names."""
_PRODUCTS = ("activation", "gated_activation", "combine", "adapter_gain")


class _Op(Frozen):
    name: str
    """Module path within its block, such as ffn.up: for display only."""
    part: Part
    """Part of the model that it belongs to; the norm and the residual addition of a part included."""
    weights: WeightUse = "trained"
    """What training does with its weights."""
    has_input_gradient: bool = True
    """Whether backward needs the gradient of its input, as it does behind any weight that is trained."""

    @property
    def is_frozen(self) -> bool:
        """Return whether its weights stay as they are."""
        return self.weights != "trained"

    @property
    def num_parameters(self) -> int:
        """Return the weights that the op owns."""
        return 0

    @property
    def num_trained_parameters(self) -> int:
        """Return those of them that are trained."""
        return 0 if self.is_frozen else self.num_parameters

    @property
    def num_matmul_parameters(self) -> int:
        """Return the matmul parameters that are active for each token, tied weights included."""
        return 0

    def forward_flops_per_token(self, seq_len: int) -> int:
        """Return the model FLOPs of the forward pass, a multiply and an add being two."""
        return 2 * self.num_matmul_parameters

    def training_flops_per_token(self, seq_len: int) -> int:
        """Return the model FLOPs of all passes: forward, and as many for each gradient that backward must have."""
        num_passes = 1 + self.has_input_gradient + (not self.is_frozen)
        return num_passes * self.forward_flops_per_token(seq_len)


class _Linear(_Op):
    in_features: PositiveInt
    out_features: PositiveInt


class Matmul(_Linear):
    """A linear layer, applied to every token."""

    kind: Literal["matmul"] = "matmul"
    tensor_split: TensorSplit = "none"
    """How tp shards the weight: its output dim (columns), its input dim (rows, output reduced), or not at all (none).
    """
    has_bias: bool = False
    """Whether a bias is added to the output."""
    is_wide: bool = False
    """Whether it stays in 16 or 32 bits where other matmuls have fewer."""
    adapter_matrix: Literal["none", "A", "B"] = "none"
    """Which of the two low-rank matrices of an adapter it is, if it is one."""
    drops_input: bool = False
    """Whether it reads its input through a dropout of its own, as the first matrix of an adapter may."""
    trains_row_norms: bool = False
    """Whether the norms of its rows are parameters, as with DoRA: next to frozen weights the only ones trained."""

    @property
    def num_parameters(self) -> int:
        """Return the number of weights, of biases, and of norms of rows that are parameters."""
        return (self.in_features + self.has_bias + self.trains_row_norms) * self.out_features

    @property
    def num_trained_parameters(self) -> int:
        """Return those of them that are trained."""
        return self.trains_row_norms * self.out_features if self.is_frozen else self.num_parameters

    @property
    def num_matmul_parameters(self) -> int:
        """Return the number of weights."""
        return self.in_features * self.out_features


class GroupedMatmul(_Linear):
    """One linear layer for each of several experts; each token goes through a few of them."""

    kind: Literal["grouped_matmul"] = "grouped_matmul"
    part: Part = "experts"
    num_experts: PositiveInt
    """Number of layers."""
    experts_per_token: PositiveInt
    """Layers that each token goes through."""
    tensor_split: TensorSplit
    """How etp shards the weight; see Matmul.tensor_split."""
    has_bias: bool = False
    """Whether each layer adds a bias to its output."""

    @property
    def num_parameters(self) -> int:
        """Return the weights of all experts, and their biases."""
        return self.num_experts * (self.in_features + self.has_bias) * self.out_features

    @property
    def num_matmul_parameters(self) -> int:
        """Return the weights of the experts that one token goes through."""
        return self.experts_per_token * self.in_features * self.out_features


class Head(_Op):
    """The last matmul, from the residual stream to the vocabulary."""

    kind: Literal["head"] = "head"
    part: Part = "head"
    dim: PositiveInt
    """Width of the residual stream."""
    vocab_size: PositiveInt
    """Width of the output."""
    tied: bool
    """Whether the weights are the embedding's, which owns them."""

    @property
    def num_parameters(self) -> int:
        """Return the weights of its own: none if tied."""
        return 0 if self.tied else self.dim * self.vocab_size

    @property
    def num_matmul_parameters(self) -> int:
        """Return the number of weights, tied or not."""
        return self.dim * self.vocab_size


class CoreAttention(_Op):
    """Softmax attention over the sequence, without its projections."""

    kind: Literal["attention"] = "attention"
    part: Part = "attention"
    num_heads: PositiveInt
    """Query heads."""
    num_kv_heads: PositiveInt
    """Key and value heads."""
    head_dim: PositiveInt
    """Width of a query or key head."""
    value_head_dim: PositiveInt
    """Width of a value head."""
    causal: bool
    """Whether a token attends only to itself and to what is before it."""
    window: PositiveInt | None = None
    """Size of the sliding window, the current token included; None for the whole sequence."""
    has_sinks: bool = False
    """Whether each query head has a learned logit in the softmax's denominator."""

    @property
    def num_parameters(self) -> int:
        """Return the number of sinks."""
        return self.num_heads if self.has_sinks else 0

    def mean_context(self, seq_len: int, document_tokens: float | None = None) -> float:
        """Return the mean number of keys that a query attends to in a sequence of `seq_len`: half of it if causal.

        Ignores the diagonal. With a causal window of w, the first w tokens attend to w / 2 keys on average, others to
        w. With documents of a mean length, the start of a token's own is exponentially far, as where documents end
        anywhere: lengths that vary less are longer in effect.
        """
        if not self.causal:
            return float(seq_len if self.window is None else min(self.window, seq_len))
        return _causal_context(seq_len, self.window, document_tokens)

    def forward_flops_per_token(self, seq_len: int) -> int:
        """Return the FLOPs of query x key and probabilities x value, the mean over a sequence; half if causal."""
        return int(2 * self.num_heads * (self.head_dim + self.value_head_dim) * self.mean_context(seq_len))

    def training_flops_per_token(self, seq_len: int) -> int:
        """Return three times these: both of its products have two inputs, whatever is trained."""
        return 3 * self.forward_flops_per_token(seq_len)


def _causal_context(seq_len: int, window: int | None, document_tokens: float | None) -> float:
    reach = seq_len if window is None else min(window, seq_len)
    if document_tokens is None:
        return seq_len / 2 if reach == seq_len else reach - reach**2 / (2 * seq_len)
    # A query with m keys in reach sees d (1 - exp(-m / d)) of them: the mean over m up to the window, then at it.
    most = document_tokens * -math.expm1(-reach / document_tokens)
    return (document_tokens * (reach - most) + (seq_len - reach) * most) / seq_len


def computed_context(seq_len: int, window: int | None, document_tokens: float | None) -> float:
    """Return the keys per query that causal kernels compute which skip blocks of 128 x 128 masked scores.

    Where a window or documents cut what a query sees, half a block more is computed and masked there.
    """
    context = _causal_context(seq_len, window, document_tokens)
    return context if context >= seq_len / 2 else min(context + _HALF_BLOCK, seq_len / 2)


class Norm(_Op):
    """RMSNorm or LayerNorm over vectors of `width`, with one weight for each element."""

    kind: Literal["norm"] = "norm"
    input: Literal["stream", "latent", "heads"] = "stream"
    """What it normalises: the residual stream, a latent of multi-head latent attention, or queries or keys by head."""
    width: PositiveInt
    """Elements of one vector."""
    vectors_per_token: PositiveInt = 1
    """Vectors for each token: the heads, for the norms of queries and keys, which share the weights."""
    has_bias: bool = False
    """Whether a bias is added for each element, and the mean subtracted: LayerNorm."""

    @property
    def num_parameters(self) -> int:
        """Return the number of weights, and of biases."""
        return (1 + self.has_bias) * self.width


class Embedding(_Op):
    """A lookup of one row for each token."""

    kind: Literal["embedding"] = "embedding"
    part: Part = "embedding"
    vocab_size: PositiveInt
    """Rows."""
    dim: PositiveInt
    """Elements of a row."""

    @property
    def num_parameters(self) -> int:
        """Return the number of weights."""
        return self.vocab_size * self.dim


class Rope(_Op):
    """Rotary embedding of queries and keys."""

    kind: Literal["rope"] = "rope"
    part: Part = "attention"
    num_heads: PositiveInt
    """Number of heads that are rotated: those of queries and of keys."""
    head_dim: PositiveInt
    """Width of a head."""


class Elementwise(_Op):
    """An op on each element alone, such as a residual addition."""

    kind: Literal["elementwise"] = "elementwise"
    role: ElementwiseRole
    """What it computes.

    residual: a sum with the residual stream; gated_activation: as of SwiGLU, activation: as of GELU; permute: a copy of
    each token for each of its experts, in their order; unpermute: back in the order of tokens; combine: the weighted
    sum of a token's copies; bias: bias, clamp and scale of experts that are not fused; adapter_sum: a linear layer's
    output with that of its adapter; adapter_gain: DoRA's factor of each of its elements.
    """
    reads_per_token: PositiveInt
    """Elements read for each token."""
    writes_per_token: PositiveInt
    """Elements written for each token."""

    @property
    def keeps_inputs(self) -> bool:
        """Return whether its backward needs what it read: that of a product does, that of a sum or a copy does not."""
        return self.role in _PRODUCTS


Op = Annotated[
    Matmul | GroupedMatmul | Head | CoreAttention | Norm | Embedding | Rope | Elementwise,
    Field(discriminator="kind"),
]
"""Any of them, distinguished by `kind`."""

_HALF_BLOCK = 64.0
"""Keys."""

FLOAT8_ALIGNMENT = 16
"""Multiple that each dim of a float8 matmul must be, as cuBLAS and CUTLASS require."""
MXFP8_BLOCK = 32
"""Elements that share a scale in MXFP8 (OCP Microscaling Formats 1.0): the multiple that its dims must be."""


def float8_alignment(recipe: str) -> int:
    """Return the multiple that each dim of a matmul must be by a recipe of precision.float8, or a precision."""
    return MXFP8_BLOCK if recipe == "mxfp8" else FLOAT8_ALIGNMENT


ATTENTION_SCORES_AT_ONCE = 2**24
"""Attention scores held at once where context parallelism computes attention in chunks of queries: 64 MiB in float32.
"""

OpKind = Literal["matmul", "attention", "other"]
"""Kind of an operator in a trace; ops of a model spec have a field `kind`."""
OP_KINDS: tuple[OpKind, ...] = get_args(OpKind)

_MATMUL = re.compile(
    r"\b(_?(grouped|scaled)_mm|(add|b|baddb)?mm|addmv|mv|linear|matmul|grouped_matmul_by_loop(_weight_gradient)?)\b"
)
_ATTENTION = re.compile(r"attention|flash_attn|fmha")


def op_kind(name: str) -> OpKind:
    """Return the kind of the operation called `name`, such as aten.mm.default."""
    if _ATTENTION.search(name):
        return "attention"
    return "matmul" if _MATMUL.search(name.replace(".", " ")) else "other"
