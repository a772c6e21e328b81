"""Device: one accelerator, every number of it a Figure with its source, and what was measured on it by size.

MatmulPoint and its like: how fast one size of one operation was measured to be on a machine.
A single rate describes a large operation on an accelerator. On a processor, and for small operations anywhere, the rate
changes several times over with the size: these are the points between which a prediction interpolates.
"""

from difflib import get_close_matches
from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from meshwright.errors import UnsupportedError
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
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "async-all-reduce",
    "all-to-all",
    "send",
    "exchange",
]
"""send is to the next rank while the one before sends here. async-all-reduce is what an all-reduce adds to computation
that continues until it is waited for. exchange is an all-gather or a reduction of FSDP as steps of training have it,
without copies: what a step takes next to its operators."""
_KINDS_OF_EARLIER_FILES = ("unshard", "reduce-grads")

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

    @field_validator("kind", mode="before")
    @classmethod
    def _is_still_read(cls, kind: object) -> object:
        if kind in _KINDS_OF_EARLIER_FILES:
            raise ValueError(f"{kind} was written by an earlier version: run `meshwright calibrate` again")
        return kind


NAME_PATTERN = r"^[a-z0-9][a-z0-9.-]*$"
"""What a catalogue name looks like: it is also the name of a file."""


class MatmulRates(Frozen):
    """Dense FLOP/s of a large matrix product by the dtype of its inputs; None is unknown."""

    float32: Figure | None = None
    """IEEE float32 in full precision."""
    tf32: Figure | None = None
    """float32 inputs rounded to 10 mantissa bits (torch.backends.cuda.matmul.allow_tf32)."""
    float16: Figure | None = None
    """float16 inputs, accumulated in float32."""
    bfloat16: Figure | None = None
    """bfloat16 inputs, accumulated in float32."""
    float8: Figure | None = None
    """float8 inputs (e4m3, e5m2), accumulated in float32."""
    float4: Figure | None = None
    """float4 inputs with block scales (mxfp4, nvfp4)."""

    def of(self, dtype: str) -> Figure | None:
        """Return the rate of `dtype`, None where it is unknown; raises UnsupportedError for what is no dtype here."""
        names = list(type(self).model_fields)
        if dtype not in names:
            nearest = get_close_matches(dtype, names, n=1, cutoff=0.3)
            raise UnsupportedError(
                f"dtype {dtype!r} is not a format of matmuls ({', '.join(names)})"
                + (f": did you mean {nearest[0]!r}?" if nearest else ": use one of these")
            )
        figure: Figure | None = getattr(self, dtype)
        return figure


class Device(Frozen):
    """One accelerator of the catalogue; unpublished figures are None."""

    name: str = Field(pattern=NAME_PATTERN)
    """Catalogue name, as in cluster.device."""
    title: str = Field(min_length=1)
    """Name that people use."""
    vendor: str = Field(min_length=1)
    """Maker, lower case: nvidia, amd, google."""
    architecture: str | None = None
    """Family of chips, such as hopper: selects constants of the cost model; None if measurements are used instead."""
    aliases: tuple[str, ...] = Field((), strict=False)
    """What torch.cuda.get_device_name() prints for it."""
    short_names: tuple[str, ...] = Field((), strict=False)
    """Short names of this variant: h100 is the SXM part."""
    memory_bytes: Figure
    """Device memory, bytes."""
    memory_bytes_per_s: Figure | None = None
    """Bandwidth of the device memory, bytes per second."""
    dense_flops_per_s: MatmulRates = MatmulRates()
    """Highest matmul rate by dtype that the maker promises without sparsity, FLOP per second."""
    measured_matmul_flops_per_s: MatmulRates = MatmulRates()
    """Best published measurement of the matmul rate by dtype, FLOP per second."""
    num_sms: Figure | None = None
    """Streaming multiprocessors (NVIDIA) or compute units (AMD) that a kernel's tiles are spread over."""
    measured_memory_bytes_per_s: Figure | None = None
    """Bandwidth that a large elementwise operation was measured to reach, bytes per second."""
    context_bytes: Figure | None = None
    """Device memory that the driver's context and the loaded kernels take of each process, bytes."""
    communicator_bytes: Figure | None = None
    """Device memory that the communication library's buffers take of each process, bytes."""
    host_launch_s: Figure | None = None
    """Host overhead per kernel of an eager model, seconds, with nn.Module and autograd."""
    calibration_error: Figure | None = None
    """What other programs took of its cores while it was calibrated, as a share: it widens the interval of predicted
    steps; None where it was idle, or nothing was measured."""
    has_peer_access: bool = True
    """Whether these devices read and write each other's memory directly, over NVLink or PCIe; false where the driver
    of this card has no peer-to-peer transfers."""
    is_host: bool = False
    """Whether kernels run on the host's own cores: dispatch then adds to kernel time, since it is not asynchronous."""
    matmul_points: tuple[MatmulPoint, ...] = Field((), strict=False)
    """Measured rates of matrix products by size; empty if not measured."""
    attention_points: tuple[AttentionPoint, ...] = Field((), strict=False)
    """Measured rates of attention by size."""
    memory_op_points: tuple[MemoryOpPoint, ...] = Field((), strict=False)
    """Measured throughput of memory-bound ops, by operation and size."""
    op_lines: tuple[OpLine, ...] = Field((), strict=False)
    """Measured seconds of torch's operators in steps of training: what a traced step costs where kernels run on the
    host itself."""
    power_w: Figure | None = None
    """Highest board power, watts: a lower cap lowers the clocks and with them every rate."""
    peak_power_w: Figure | None = None
    """Board power at which dense_flops_per_s is specified, watts; None: power_w."""
    note: str | None = None
    """What a reader must know about this entry."""

    def peak_flops_per_s(self, dtype: str) -> float | None:
        """Return the dense peak for `dtype` in FLOP/s, None where it is unknown; raises UnsupportedError for no dtype.

        This is what MFU is a share of. It is never guessed from another dtype or device. That of float64, which proofs
        compute in, is always unknown: the catalogue holds what models are trained in.
        """
        if dtype == "float64":
            return None
        figure = self.dense_flops_per_s.of(dtype)
        return None if figure is None else figure.value

    @property
    def torch_type(self) -> Literal["cpu", "cuda"]:
        """Return what torch calls it, by which torch and our trainer choose kernels; "cuda" of AMD's, too."""
        return "cpu" if self.is_host else "cuda"

    @property
    def has_own_memory(self) -> bool:
        """Return whether its memory is apart from the host's, so that tensors may be in either."""
        return not self.is_host

    @property
    def computes_while_sending(self) -> bool:
        """Return whether messages leave its compute units free: a processor moves them with the cores that compute."""
        return not self.is_host

    @property
    def emulates_float8(self) -> bool:
        """Return whether float8 matmuls are rounded inputs in another format, which take longer than without."""
        return self.is_host

    @property
    def usable_memory_bytes(self) -> float:
        """Return what tensors can take of the device's memory, bytes: all but context and communication buffers."""
        taken = [figure.value for figure in (self.context_bytes, self.communicator_bytes) if figure is not None]
        return self.memory_bytes.value - sum(taken)
