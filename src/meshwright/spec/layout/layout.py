"""Layout: how one optimizer step is split over ranks. The planner searches it, the runtime applies it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_serializer, model_validator
from pydantic_core.core_schema import SerializerFunctionWrapHandler

from meshwright.errors import InfeasibleLayout
from meshwright.spec.layout.attention_backend import SPARSE_BACKENDS, AttentionBackend
from meshwright.spec.layout.auto_choices import auto_reduces_each_microbatch, auto_reshards
from meshwright.spec.layout.compile_value import Compile, CompileBackend
from meshwright.spec.layout.degrees import Degrees
from meshwright.spec.layout.rank_misfit import rank_misfit
from meshwright.spec.problem import Problem

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""The axes whose degrees multiply to the number of ranks, outermost first; ep is carved out of them."""

ActivationCheckpoint = Literal["none", "selective", "full"]
ChosenCheckpoint = Literal[ActivationCheckpoint, "auto"]
ContextMethod = Literal["all-gather", "ring", "ulysses"]
ReshardAfterForward = Literal["auto", "always", "never"] | PositiveInt
GradientSync = Literal["auto", "step", "microbatch"]

SINGLE_STAGE_SCHEDULES = ("GPipe", "1F1B")
"""Pipeline schedules that give each pipeline rank one stage."""
LOOPED_SCHEDULES = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
"""Pipeline schedules in which rank r holds stages r, r + pp, r + 2 pp, ..."""
V_SCHEDULES = ("ZBVZeroBubble", "DualPipeV")
"""Pipeline schedules in which rank r holds stages r and 2 pp - 1 - r."""
SPLIT_BACKWARD_SCHEDULES = ("InterleavedZeroBubble", *V_SCHEDULES)
"""Pipeline schedules that run the backward to the inputs and the backward to the weights apart."""
SCHEDULES = (*SINGLE_STAGE_SCHEDULES, *LOOPED_SCHEDULES, *V_SCHEDULES)

_MAX_MULTIPLES = 32
"""Numbers of ranks that are tried on each side of one that cannot run a layout."""


class Layout(Degrees):
    """Degrees and choices that change a step's time and memory, never its numbers."""

    microbatch_size: PositiveInt = 1
    """Sequences that one data-parallel rank runs forward and backward at once."""
    schedule: str = Field("1F1B", examples=["Interleaved1F1B", "my_schedule.csv"])
    """Pipeline schedule: one of torch's (GPipe, Interleaved1F1B, DualPipeV, ...) or a CSV file of actions."""
    virtual_stages: PositiveInt | None = Field(None, examples=[2])
    """Pipeline stages on each pipeline rank; default: 1, or 2 where the schedule needs several."""
    stage_boundaries: tuple[NonNegativeInt, ...] | None = Field(None, strict=False, examples=[[8, 16, 24]])
    """First block of every pipeline stage but the first; default: split by each block's FLOPs and bytes."""
    cp_method: ContextMethod = "all-gather"
    """How context-parallel ranks share keys: gather all, pass them round a ring, or swap heads for sequence."""
    attention_backend: AttentionBackend = "auto"
    """What computes attention: a kernel that torch's SDPA chooses (auto) or a given one, FlexAttention, varlen_attn."""
    async_tp: bool = False
    """Whether tensor-parallel matmuls overlap their own communication (symmetric memory); needs CUDA and compile."""
    activation_checkpoint: ChosenCheckpoint = "none"
    """What each block saves for backward: everything (none), matmul outputs (selective), its input (full), what fits
    (auto)."""
    activation_checkpoint_every: PositiveInt = 1
    """Apply activation_checkpoint to every n-th block of each pipeline stage only, from its first on."""
    activation_checkpoint_blocks: tuple[ActivationCheckpoint, ...] | None = Field(
        None, strict=False, examples=[["full", "full", "none"]]
    )
    """What each block saves, one by one, in place of activation_checkpoint: what auto comes to."""
    reshard_after_forward: ReshardAfterForward = "auto"
    """Whether unsharded parameters are freed after forward, or kept on groups of n ranks; auto: unless pp > 1."""
    gradient_sync: GradientSync = "auto"
    """When gradients are reduced: after each microbatch or once a step; auto: microbatch if sharded and pp = 1."""
    prefetch: NonNegativeInt = 1
    """Blocks whose parameters FSDP2 gathers ahead of the one that computes."""
    separate_reduce_group: bool = False
    """Whether FSDP2 reduces gradients in a process group of its own, which need not wait for all-gathers."""
    communication_sms: PositiveInt | None = Field(None, examples=[16])
    """Most SMs that the kernel of a collective takes next to matmuls (NCCL's max_ctas); default: NCCL's own choice."""
    cpu_offload: bool = False
    """Whether parameters, gradients and optimizer state wait in the host's memory between uses (FSDP2)."""
    activation_offload: bool = False
    """Whether what blocks save for backward waits in the host's memory, copied next to the blocks before and after."""
    loss_chunks: PositiveInt = 1
    """Chunks of tokens in which head and loss are computed, so that only one chunk's logits exist; 1: all at once."""
    compile: Compile = False
    """What torch.compile compiles: blocks (true), the model, nothing (none, false), or what pays (auto; left out)."""
    compile_backend: CompileBackend = "inductor"
    """The torch.compile backend; of what compile, compile_loss and compile_optimizer compile."""
    compile_loss: bool = False
    """Whether the next-token loss is compiled, which then passes over the logits fewer times."""
    compile_optimizer: bool = False
    """Whether the update is compiled into one pass with the scaling and clipping of gradients (adamw in float32)."""
    cuda_graphs: bool = False
    """Whether a microbatch's forward and backward are captured as one CUDA graph and replayed; nothing on a CPU."""

    @property
    def stages_per_rank(self) -> int:
        """Return the pipeline stages that each pipeline rank holds."""
        if self.virtual_stages is not None:
            return self.virtual_stages
        return 1 if self.pp == 1 or self.schedule not in (*LOOPED_SCHEDULES, *V_SCHEDULES) else 2

    @property
    def num_stages(self) -> int:
        """Return the pipeline stages over all pipeline ranks."""
        return self.pp * self.stages_per_rank

    @property
    def may_split_backward(self) -> bool:
        """Return whether a stage's backward may run in two parts: a schedule from a file can ask for anything."""
        return self.pp > 1 and (self.schedule in SPLIT_BACKWARD_SCHEDULES or self.schedule not in SCHEDULES)

    @property
    def effective(self) -> Self:
        """Return the same layout with keys that do nothing in it at their defaults, such as cp_method without cp."""
        idle = [*(["schedule"] if self.pp == 1 else []), *(["cp_method"] if self.cp == 1 else [])]
        idle += [] if self.compiles_anything else ["compile_backend"]
        return self.replace(**{name: type(self).model_fields[name].default for name in idle})

    @property
    def compiles_anything(self) -> bool:
        """Return whether torch.compile compiles a part of the step."""
        return bool(self.compile) or self.compile_loss or self.compile_optimizer

    @property
    def optimizer_backend(self) -> str | None:
        """Return the torch.compile backend of the optimizer, None where it is not compiled."""
        return self.compile_backend if self.compile_optimizer else None

    @property
    def recomputes(self) -> bool:
        """Return whether any block saves less than everything."""
        return any(one != "none" for one in self.activation_checkpoint_blocks or [self.activation_checkpoint])

    @property
    def compiles_recomputed(self) -> bool:
        """Return whether blocks under selective recomputation are compiled: not next to experts of ep or a ring.

        Those stay eager, and what is compiled next to them overwrites outputs that selective recomputation saved.
        """
        return self.ep == 1 and not self.has_eager_attention

    @property
    def has_eager_attention(self) -> bool:
        """Return whether attention stays out of compiled blocks: in a ring, or by a backend that skips scores."""
        return (self.cp > 1 and self.cp_method == "ring") or self.attention_backend in SPARSE_BACKENDS

    @property
    def compiles_blocks(self) -> bool:
        """Return whether blocks are compiled, as compile asks for; not to be asked while that is auto."""
        is_whole = self.compiles_recomputed or self.activation_checkpoint != "selective"
        return self.compile == "model" or (self.compile is True and is_whole)

    @property
    def is_resharded(self) -> bool:
        """Return whether unsharded parameters are freed after forward; auto keeps them in a pipeline."""
        auto = self.reshard_after_forward == "auto"
        return bool(auto_reshards(self.pp)) if auto else self.reshard_after_forward != "never"

    @property
    def reduces_each_microbatch(self) -> bool:
        """Return whether each backward reduce-scatters its gradients over the ranks that share parameters."""
        if self.gradient_sync == "auto":
            return bool(auto_reduces_each_microbatch(self.fsdp, self.pp))
        return self.gradient_sync == "microbatch"

    def checkpoint_of(self, block: int, first_block: int = 0) -> ActivationCheckpoint:
        """Return what the block with this number in the whole model saves; not to be asked while that is auto.

        `first_block` is the first of its pipeline stage: counted from there, equal stages recompute equally much.
        """
        if self.activation_checkpoint_blocks is not None:
            return self.activation_checkpoint_blocks[block]
        assert self.activation_checkpoint != "auto", "auto is settled before any rank starts"
        is_nth = (block - first_block) % self.activation_checkpoint_every == 0
        return self.activation_checkpoint if is_nth else "none"

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks: the product of all degrees but ep."""
        return math.prod(getattr(self, axis) for axis in AXES)


RequestedDegree = Annotated[int, Field(ge=-1, json_schema_extra={"not": {"const": 0}})]


class LayoutRequest(Layout):
    """How a step is split over ranks; keys left out are 1, and one degree may be -1, the rest of the ranks."""

    pp: RequestedDegree = 1
    """Pipeline-parallel degree; -1 takes the ranks that the other degrees leave."""
    dp_replicate: RequestedDegree = 1
    """Replicas of the sharded model (HSDP's outer degree); -1 takes the ranks that the others leave."""
    dp_shard: RequestedDegree = 1
    """Ranks that share parameters, gradients and optimizer state (FSDP2); -1, or left out: the rest of those given."""
    cp: RequestedDegree = 1
    """Context-parallel degree: ranks that share one sequence; -1 takes the rest."""
    tp: RequestedDegree = 1
    """Tensor-parallel degree: ranks that share each matmul; -1 takes the rest."""
    compile_cache: str | None = Field(None, examples=["runs/cache/compile"])
    """Folder that `meshwright precompile` writes and ranks read; default: compile_cache in the run folder."""
    memory_budget_bytes: PositiveInt | None = Field(None, examples=[64_000_000_000])
    """Most bytes of tensors on one device, for activation_checkpoint = "auto"; default: 95 % of what it can use."""
    search: bool = False
    """Whether the planner chooses the layout, keeping the keys that are set as constraints."""

    @field_validator(*AXES)
    @classmethod
    def _is_degree(cls, degree: int) -> int:
        if degree == 0:
            raise ValueError("a degree is 1 or more, or -1 for the rest of the ranks")
        return degree

    @model_validator(mode="after")
    def _has_one_rest(self) -> LayoutRequest:
        rest = [f"layout.{axis} = -1" for axis in AXES if getattr(self, axis) == -1]
        if len(rest) > 1:
            raise ValueError(
                f"{' and '.join(rest)} both ask for the rest of the ranks: give all but one of them a number"
            )
        return self

    @model_serializer(mode="wrap")
    def _leave_open(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return the fields; a dp_shard that was left out is left out here too, so that it is open when read back."""
        values: dict[str, Any] = serialize(self)
        if self.is_open:
            values.pop("dp_shard", None)
        return values

    @property
    def rest_axis(self) -> str | None:
        """Return the axis that is -1, or None."""
        return next((axis for axis in AXES if getattr(self, axis) == -1), None)

    @property
    def is_open(self) -> bool:
        """Return whether dp_shard was left out and no degree is -1: then dp_shard takes the rest of a given number."""
        return "dp_shard" not in self.model_fields_set and self.rest_axis is None

    @property
    def num_fixed_ranks(self) -> int:
        """Return the product of the degrees that are numbers: all ranks, or what the rest must divide into."""
        return math.prod(self.given_degrees.values())

    @property
    def given_degrees(self) -> dict[str, int]:
        """Return the degrees that are numbers, by axis; a dp_shard that takes the rest is none."""
        return {axis: getattr(self, axis) for axis in AXES if axis != self.taking_rest}

    def resolve(self, num_ranks: int) -> Layout:
        """Return the concrete Layout for `num_ranks` ranks; raises InfeasibleLayout when they do not fit."""
        if (misfit := self.misfit(num_ranks)) is not None:
            # What was not tried is not suggested.
            raise InfeasibleLayout(misfit.working(lambda _: False))
        degrees = {axis: getattr(self, axis) for axis in AXES}
        if (rest := self.taking_rest) is not None:
            degrees[rest] = num_ranks // self.num_fixed_ranks
        return Layout(**{name: getattr(self, name) for name in Layout.model_fields} | degrees)

    def misfit(self, num_ranks: int, is_valid: Callable[[int], bool] = lambda _: True) -> Problem | None:
        """Return why `num_ranks` ranks cannot run the layout, with degrees to be tried that they can; None if they can.

        Only numbers of ranks that are valid otherwise are suggested.
        """

        def nearest(needed: int) -> list[int]:
            if self.taking_rest is None:
                return [needed]
            lower = num_ranks // needed
            ways = range(lower, max(0, lower - _MAX_MULTIPLES), -1), range(lower + 1, lower + 1 + _MAX_MULTIPLES)
            return [found for way in ways if (found := next((n * needed for n in way if is_valid(n * needed)), None))]

        if num_ranks < 1:
            return Problem(f"{num_ranks} ranks cannot run a layout: start {self.num_fixed_ranks} or more ranks")
        return rank_misfit(self, num_ranks, nearest)

    @property
    def taking_rest(self) -> str | None:
        """Return the axis whose degree is the ranks that the others leave, or None."""
        return "dp_shard" if self.is_open else self.rest_axis

    @property
    def product(self) -> str:
        """Return the degrees that are numbers with what they come to: "dp_shard=4 x tp=2 = 8"."""
        factors = [f"{axis}={degree}" for axis in AXES if (degree := getattr(self, axis)) not in (1, -1)]
        return (
            " x ".join(factors) + f" = {self.num_fixed_ranks}" if len(factors) > 1 else "".join(factors) or "one rank"
        )
