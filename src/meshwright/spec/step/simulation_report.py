"""SimulationReport: a job's step on a cluster, from the simulated traces of all its ranks."""

from typing import Annotated

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from meshwright.spec.frozen import Frozen
from meshwright.spec.layout.layout import Layout
from meshwright.spec.run.layout_plan import Fix
from meshwright.spec.step.estimate import Estimate, StepDecomposition
from meshwright.spec.step.workload import Workload
from meshwright.spec.trace.trace_problem import Hazard, TraceProblem


class LiveTensors(Frozen):
    """Tensors that one line of the program made and that a rank holds when its memory is fullest."""

    num_bytes: NonNegativeInt
    """Of all of them together, as asked for."""
    num_tensors: PositiveInt
    role: str
    """What they are for, as TensorRole names it, lower case."""
    op: str
    """The operation that made them, or that they were there before the step."""
    scope: str
    """The module in whose code it did, with * for numbers where several did; "" outside of modules."""
    line: str = ""
    """The line of the user's own file that did; "" where none did."""


class _RankClass(Frozen):
    rank: NonNegativeInt
    num_ranks: PositiveInt
    """Ranks that do the same, itself included."""


class RankMemory(_RankClass):
    """The fullest moment of one rank."""

    pipeline_rank: NonNegativeInt
    allocated_bytes: NonNegativeInt
    """Most that the allocator hands out (torch.cuda.max_memory_allocated)."""
    reserved_bytes: NonNegativeInt
    """Most that it holds of the device (torch.cuda.max_memory_reserved)."""
    by_role: dict[str, NonNegativeInt]
    """Bytes asked for at the peak of what is allocated, by TensorRole, lower case."""
    at_s: NonNegativeFloat
    """When that is, seconds after the step began."""
    phase: str
    scope: str
    """The module in whose code the peak is; "" outside of modules."""
    op: str
    """What runs then."""
    largest: Annotated[tuple[LiveTensors, ...], Field(strict=False)] = ()
    """What takes most of it, most first."""


class CollectiveUse(Frozen):
    """What one kind of communication costs a rank; the mean over the ranks that take part in it."""

    axis: str
    """The mesh axis; "" for groups without a name."""
    op: str
    num_ranks: PositiveInt
    """Of its group; 2 of a message, 1 of a copy between host and device."""
    count: PositiveFloat
    """How often a rank takes part in a step."""
    num_bytes: NonNegativeFloat
    """Of all of them, each as Trace.records counts them."""
    total_s: NonNegativeFloat
    exposed_s: NonNegativeFloat
    """While the rank computes nothing."""


class ExposedAt(Frozen):
    """Where a collective is exposed."""

    axis: str
    op: str
    phase: str
    scope: str
    """The module in whose code it is, with * for numbers where several are; "" outside of modules."""
    count: PositiveFloat
    exposed_s: NonNegativeFloat
    """While the rank computes nothing, a step; the mean over all ranks, as are the others here."""
    hidden_s: NonNegativeFloat


class RankTime(_RankClass):
    """How one rank spends the step."""

    pipeline_rank: NonNegativeInt
    parts: StepDecomposition


class Straggling(_RankClass):
    """How one rank's step changes under jitter or with a slow rank, against the step in which none is slow."""

    compute_s: NonNegativeFloat
    """On its default stream."""
    added_compute_s: float
    """What it computes longer than in the usual step."""
    added_wait_s: float
    """What it waits longer for other ranks to arrive at collectives and messages."""
    axis: str = ""
    """Mesh axis of the communication that it waits for most; empty where it does not wait longer."""
    op: str = ""
    op_wait_s: float = 0.0
    """What it waits longer there."""
    count: NonNegativeInt = 0
    """How often it waits there."""


class Stragglers(Frozen):
    """What jitter, or slow ranks, add to the step."""

    usual_step_s: PositiveFloat
    """The same step without them."""
    ranks: Annotated[tuple[Straggling, ...], Field(strict=False)]
    """Of each class of ranks, by rank."""


class PaddedParameter(Frozen):
    """A parameter whose shards are padded: FSDP2 splits dim 0, and gives every rank as many rows as the first."""

    name: str
    """As its block calls it."""
    rows: PositiveInt
    """Dim 0 of what tensor parallelism leaves of it."""
    wire_factor: PositiveFloat
    """Bytes that are gathered over bytes that there are."""
    wasted_bytes: NonNegativeInt
    """That gathering it once in all blocks carries for nothing."""


class Padding(Frozen):
    """What padding of shards costs."""

    num_shards: PositiveInt
    """Ranks that share the parameters."""
    wire_factor: PositiveFloat
    """Bytes that gathering the whole model carries over those that there are."""
    wasted_state_bytes: NonNegativeInt
    """Of a rank's parameters, gradients and optimizer state, with which no padded row is worth anything."""
    parameters: Annotated[tuple[PaddedParameter, ...], Field(strict=False)] = ()
    """Most wasteful first."""


class SavedTensors(Frozen):
    """Activations that one line of the program made, there at the peak, and what doing without them costs."""

    num_bytes: NonNegativeInt
    """Of all of them together."""
    num_tensors: PositiveInt
    op: str
    """The operation that made them."""
    scope: str
    """The module in whose code it did, with * for numbers where several did; "" outside of modules."""
    recompute_s: NonNegativeFloat | None = None
    """Seconds of the device for making all of them again; None where ranks would have to talk again."""
    offload_s: NonNegativeFloat | None = None
    """To the host's memory and back, if nothing hides it; None where that is the memory they are in."""

    @property
    def seconds(self) -> tuple[float, ...]:
        """Return the seconds of recomputation and of offload, those that are possible and cost time."""
        return tuple(seconds for seconds in (self.recompute_s, self.offload_s) if seconds)


class Outcome(Frozen):
    """What a step without problems does."""

    step_s: PositiveFloat
    mfu: float | None = Field(None, ge=0)
    """Model FLOPs over the dense peak; None where either is unknown."""
    parts: StepDecomposition
    """The step by component, the mean over all ranks."""
    compute: dict[str, NonNegativeFloat] = {}
    """Seconds of `parts.compute_s` by kind of operation: matmul, attention, other."""
    fixed_cpu_bound_s: NonNegativeFloat = 0.0
    """Of `parts.cpu_bound_s`, the work that a step has once before its first operation: data, learning rate, log."""
    predicted: Estimate | None = None
    """What the planner's formulas say of the same layout; None for a model that they do not know."""
    predicted_parts: StepDecomposition | None = None
    """The same in the components of `parts`."""
    memory: Annotated[tuple[RankMemory, ...], Field(strict=False)]
    """Of each class of ranks, by rank."""
    savings: Annotated[tuple[SavedTensors, ...], Field(strict=False)] = ()
    """Recompute and offload candidates at the peak of the fullest rank, best first."""
    fixes: Annotated[tuple[Fix, ...], Field(strict=False)] = ()
    """Where a rank does not fit: changes of one key with which all do, cheapest first."""
    ranks: Annotated[tuple[RankTime, ...], Field(strict=False)]
    """Of each class of ranks, by rank."""
    stragglers: Stragglers | None = None
    """None where no rank is slow and nothing has jitter."""
    collectives: Annotated[tuple[CollectiveUse, ...], Field(strict=False)] = ()
    """Most exposed first."""
    exposed: Annotated[tuple[ExposedAt, ...], Field(strict=False)] = ()
    """Where communication is exposed, most first."""
    suggestions: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """What would hide more of it, each naming a key of the job."""

    @property
    def fullest(self) -> RankMemory | None:
        """Return the rank that needs most of its device; None where none holds anything there."""
        return max(self.memory, key=lambda rank: rank.reserved_bytes, default=None)


class SimulationReport(Frozen):
    """All that `meshwright simulate` found."""

    job: str
    """The job file, as it was named."""
    model: str
    cluster: str
    device: str
    num_devices: PositiveInt
    layout: Layout | None = None
    workload: Workload | None = None
    """What a step processes; None, as is the layout, for a program that is no job."""
    usable_memory_bytes: PositiveInt
    """What tensors can take of one device's memory."""
    num_traced: NonNegativeInt = 0
    """Ranks whose own step was traced; they represent the others."""
    traced_ranks: Annotated[tuple[NonNegativeInt, ...], Field(strict=False)] = ()
    """Which these are, of a program of which not all were."""
    problems: Annotated[tuple[TraceProblem, ...], Field(strict=False)] = ()
    """Why the step would hang or compute something wrong."""
    hazards: Annotated[tuple[Hazard, ...], Field(strict=False)] = ()
    """Tensors that are used in no defined order: warnings, with which the step still ends."""
    guesses: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Lines of the program that decide by numbers which a simulation has to guess, and how it guessed."""
    padding: Padding | None = None
    """What padded shards cost; None where nothing is padded, or for a model that the formulas do not know."""
    outcome: Outcome | None = None
    """None where there are problems."""

    @property
    def tokens_per_s(self) -> float | None:
        """Return the tokens that all devices train on in a second; None where either is unknown."""
        if self.outcome is None or self.workload is None:
            return None
        return self.workload.global_batch_tokens / self.outcome.step_s

    @property
    def misfits(self) -> tuple[RankMemory, ...]:
        """Return the ranks that need more than their device has."""
        ranks = () if self.outcome is None else self.outcome.memory
        return tuple(rank for rank in ranks if rank.reserved_bytes > self.usable_memory_bytes)
