"""Figure: one number and its source, as no number about hardware is without one; and points measured by size.

A single rate describes a large operation on an accelerator. On a processor, and for small operations anywhere, the rate
changes several times over with the size: these are the points between which a prediction interpolates.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from meshwright.spec.frozen import Frozen

SourceKind = Literal["datasheet", "measured", "software", "reported"]


class Source(Frozen):
    """Who says so, and when."""

    title: str = Field(min_length=1)
    """The document, or the measurement and the machine it was made on."""
    url: str | None = None
    """Where to read it, if it is on the web."""
    date: str = Field(pattern=r"^\d{4}(-\d{2}(-\d{2})?)?$")
    """When it was published, measured or read: YYYY, YYYY-MM or YYYY-MM-DD."""
    kind: SourceKind
    """datasheet: printed by the vendor; measured: read or timed on a device; software: a constant of other software;
    reported: published by a third party."""


class Figure(Frozen):
    """A number in SI base units (the field that holds it names the unit) and its source."""

    value: PositiveFloat
    """The number, in the unit that the field's name ends with."""
    source: Source
    """Where it comes from."""
    note: str | None = None
    """What a reader must know to use it."""


CollectiveKind = Literal[
    "all-gather", "reduce-scatter", "all-reduce", "all-to-all", "send", "unshard", "reduce-grads", "exchange"
]
"""send is to the next rank while the one before sends here. unshard and reduce-grads are what FSDP does with one unit,
around its all-gather and reduce-scatter: copies into and out of one buffer, hooks, and the waits of threads. exchange
is either of the two as steps of training have it, without copies and hooks: what a step takes next to its operators."""

MemoryOp = Literal["add", "swiglu", "norm", "rope", "loss", "update", "clip"]
"""A residual addition (backward adds the gradients of its two uses), silu(gate) x up, RMSNorm, rotary embedding,
cross-entropy of logits; and over parameters the step of fused AdamW, and norm and scaling of the gradients."""


class MatmulPoint(Frozen):
    """A linear layer of `num_columns` outputs and `inner` inputs on `num_rows` tokens, trained."""

    dtype: str
    """Format of both inputs."""
    num_rows: PositiveInt
    """Rows of the first factor: tokens."""
    num_columns: PositiveInt
    """Columns of the second factor: output width."""
    inner: PositiveInt
    """What is summed over: input width."""
    flops_per_s: Figure
    """2 x rows x columns x inner over the mean time of its three products (output, gradients of input and weight)."""


class AttentionPoint(Frozen):
    """Causal attention over `num_heads` heads (all sequences' together) of `seq_len` positions."""

    dtype: str
    """Format of queries, keys and values."""
    num_heads: PositiveInt
    """Query heads, those of all sequences of the batch counted."""
    seq_len: PositiveInt
    """Positions of queries, and of keys."""
    head_dim: PositiveInt
    """Width of a head."""
    forward_flops_per_s: Figure
    """2 x heads x seq_len^2 x head_dim (the causal half of both products) over the time of forward."""
    backward_flops_per_s: Figure
    """2.5 times those FLOPs (five products, one of them recomputed) over the time of backward."""


class MemoryOpPoint(Frozen):
    """An operation that moves numbers rather than multiplying matrices, as Meshwright's own eager modules do it."""

    op: MemoryOp
    """Which."""
    dtype: str
    """Format of what it reads and writes."""
    num_elements: PositiveInt
    """Elements of its result; of the logits for loss, parameters for update and clip."""
    forward_elements_per_s: Figure
    """num_elements over the time of forward, its issue included."""
    backward_elements_per_s: Figure | None = None
    """num_elements over the time of backward; None for what has none."""


class OpLine(Frozen):
    """An operator as it comes in a step: start_s + bytes / bytes_per_s + FLOPs / flops_per_s, host seconds included."""

    op: str
    """Its name in torch, with overload, such as aten.mm.default."""
    dtype: str
    """Format of its first tensor."""
    start_s: Figure
    """Seconds of the smallest, and of what the host does before it: Python, autograd, hooks, views."""
    bytes_per_s: Figure | None = None
    """Further bytes of its inputs and outputs for each further second; None where they do not matter."""
    flops_per_s: Figure | None = None
    """Further FLOPs for each further second; None of what is no matmul and no attention."""


class CollectivePoint(Frozen):
    """One kind of collective over `num_ranks` ranks: it takes latency_s + num_bytes / bytes_per_s."""

    kind: CollectiveKind
    """Which; num_bytes is the whole tensor: what all gather, what each brings to be reduced, or a message sent."""
    num_ranks: PositiveInt
    """Ranks that took part."""
    latency_s: Figure
    """Seconds of the smallest."""
    bytes_per_s: Figure
    """Further bytes for each further second, in large ones."""
