"""Stack: the software that trains, by what changes a step's time and memory.

What is known about it is an input (which kernels, what overlaps what). What is not is left to three multipliers, 1 for
an unmeasured stack.
"""

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from meshwright.spec.frozen import Frozen


class Stack(Frozen):
    """One family of training software, such as a framework's releases of a year."""

    name: str = Field(min_length=1)
    """Name, as in the `stack` column of a file of runs."""
    title: str = Field(min_length=1)
    """Name that people use."""

    # What it does
    sharding: Literal["parameters", "optimizer", "none"] = "parameters"
    """What data-parallel ranks divide: everything (FSDP, ZeRO-3), the optimizer's state (ZeRO-1), nothing (DDP)."""
    kernels: Literal["eager", "compiled", "fused"] = "compiled"
    """Elementwise kernels: one for each op, chains joined by a compiler, or written by hand (Transformer Engine)."""
    attention: Literal["flash", "unfused"] = "flash"
    """Attention: tiles that never leave the chip, or the whole matrix of probabilities in memory."""
    sequence_parallel: bool = True
    """Whether tp ranks share the sequence between matmuls."""
    tp_overlap: bool = False
    """Whether tensor-parallel collectives overlap with their matmuls."""
    dp_overlap: bool = True
    """Whether gradients are summed while the backward pass goes on."""
    p2p_overlap: bool = True
    """Whether pipeline stages send while they compute."""
    ep_overlap: bool = False
    """Whether experts' all-to-alls overlap with another microbatch's computation."""
    dispatcher: Literal["alltoall", "fused"] = "alltoall"
    """How tokens reach experts: sort and all-to-all, or kernels that send each token once to a node (DeepEP)."""
    grouped_experts: bool = True
    """Whether all experts of a rank are one kernel."""
    fused_experts: bool = False
    """Whether that kernel does the experts' activation and casts too."""
    eager_mixtures: bool = False
    """Whether a mixture of experts stays a kernel for each operator where its experts have ranks of their own (ep, tp),
    though blocks are compiled, its router multiplies in float32, and experts that data-parallel ranks do not divide are
    cut in another dim (ours)."""
    cuda_graphs: Literal["none", "routing", "blocks", "step"] = "none"
    """What is replayed from CUDA graphs, and so costs the host nothing: a mixture's routing, blocks but for their
    experts, whole steps."""
    low_precision_attention: bool = False
    """Whether attention is computed in 8 bits where matmuls are."""
    reduces_after_pipeline: bool = False
    """Whether the ranks of a pipeline reduce gradients when all of their backwards are done, not in the last one."""
    gradient_accumulation_dtype: Literal["float32", "bfloat16"] = "float32"
    """Format of the gradient that microbatches add to."""
    fuses_gradient_sum: bool = True
    """Whether backward adds to that gradient itself; else a microbatch's own gradients stand next to it."""
    joins_loss: bool = False
    """Whether the loss is one kernel, or compiled to few, and so never holds its logits in float32."""
    keeps_logits: bool = True
    """Whether the logits that the model returned are still there while backward makes their gradient."""
    low_precision_gather: bool = False
    """Whether parameters of low-precision matmuls are gathered in that precision."""
    selective: Literal["matmul-outputs", "half-of-matmul-outputs", "core-attention"] = "matmul-outputs"
    """What activation_checkpoint = selective means: keep all matmul outputs, keep every second one, or compute
    only scores and probabilities of attention again."""
    saves_cudnn_attention: bool = True
    """Whether selective recomputation saves what cuDNN's attention returns, which stacks on PyTorch's scaled dot
    product attention run on Blackwell; torchtitan's list of saved ops lacked it until December 2025 (its #2095)."""
    recompute_stops_early: bool = True
    """Whether computing a block again ends once backward has what it needs, before the last matmul (PyTorch's
    non-reentrant checkpoints since 2.1), or does all of it (Megatron-LM's)."""
    gathers_input_again: bool = False
    """Whether tp ranks keep their shards of what column-parallel matmuls read, and all-gather it again in backward.
    Stacks of fused kernels always do (gathers_again)."""
    plain_context_attention: bool = False
    """Whether attention of a sequence that cp ranks share is made of torch's own operators: the pieces of a ring merged
    in float32, gathered keys attended to under a mask whose hidden scores are computed, too."""
    gradient_bytes: NonNegativeFloat = 0.0
    """Bytes that scaling and clipping a parameter's gradient read and write before the update."""
    joins_update: bool = False
    """Whether the update scales and clips gradients itself, so that only their norm is read before it."""
    repeats_compiled_backward: bool = False
    """Whether the input half and the weight half of a split backward each run the whole backward of a compiled block,
    since torch.compile makes one backward graph of both."""
    frees_sent: bool = False
    """Whether a pipeline stage's output is freed once it is sent: its backward needs the graph behind it only."""
    stages: Literal["even", "balanced"] = "even"
    """Blocks of pipeline stages: equally many, or fewer next to the embedding and the head."""
    shards_ends_apart: bool = False
    """Whether embedding and head are gathered and freed as blocks are, or as one and from forward to backward."""
    expandable_segments: bool = False
    """Whether it has torch's allocator grow its segments (PYTORCH_ALLOC_CONF)."""
    is_tuned: bool = False
    """Whether its runs are a vendor's recipes, tuned for the very model and machine."""

    # What was fitted: at most three constants
    compute: PositiveFloat = 1.0
    """Time of matmuls, attention and memory-bound kernels, as a multiple of the generic stack's."""
    communication: PositiveFloat = 1.0
    """Time of collectives, as a multiple of the generic stack's."""
    overhead: PositiveFloat = 1.0
    """Time of memory-bound kernels, launches and the fixed work of a step, as a multiple of the generic stack's."""
    num_runs: NonNegativeInt = 0
    """Measured runs that the three were fitted on; 0 leaves them at 1."""
    relative_error: NonNegativeFloat = 0.25
    """Half width of the interval that holds 80 % of its runs when they are left out of the fit."""

    @property
    def gathers_again(self) -> bool:
        """Return whether backward gathers again all that tp and cp ranks gathered in forward, of which each keeps its
        part: Megatron and Transformer Engine do. DTensor's modules keep the whole; ours gather again what
        column-parallel matmuls read (gathers_input_again), and keep the whole of keys and values.
        """
        return self.kernels == "fused"

    @property
    def has_plain_loss(self) -> bool:
        """Return whether the loss is made of torch's own operators, a kernel each, and frees the logits: ours, also
        where blocks are compiled.
        """
        return not (self.joins_loss or self.keeps_logits or self.kernels == "fused")

    @property
    def gathers_routed_tokens(self) -> bool:
        """Return whether ranks that share an expert's matmuls (etp) gather a token's copies where its experts are, as
        Megatron does. torchtitan and ours gather tokens before they are routed, and each rank sends all of them.
        """
        return self.kernels == "fused"
