"""Plan: the layout that the planner picks for a model on a cluster, what else it saw, how sure it is; and Budget."""

from typing import Annotated

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from meshwright.spec.frozen import Frozen
from meshwright.spec.job.sections import FAILURES_PER_DEVICE_DAY
from meshwright.spec.layout.layout import Layout
from meshwright.spec.step.estimate import Estimate, MemoryUse
from meshwright.spec.step.workload import Workload


class SimulatedStep(Frozen):
    """One step of a layout, traced on every kind of rank and simulated."""

    step_s: PositiveFloat | None = None
    """The step in seconds; None where it cannot be traced, or would not end."""
    reserved_bytes: Annotated[tuple[PositiveInt, ...], Field(strict=False)] = ()
    """What the allocator reserves on the fullest rank of each pipeline rank."""
    problem: str | None = None
    """Why there is no step: what cannot be traced, or why it would not end."""

    @property
    def fullest_bytes(self) -> int | None:
        """Return the reserved bytes of the fullest rank; None where there is no step."""
        return max(self.reserved_bytes, default=None)


class Candidate(Frozen):
    """A layout and what is predicted of it."""

    layout: Layout
    estimate: Estimate
    """Its step time and memory."""
    free_bytes: int
    """What its fullest rank does not reserve of its device's usable memory, bytes; negative where it lacks some."""
    headroom_bytes: int
    """What that rank can still take: of its device, which gives back cached blocks then, or of its share of the host's
    memory where less is left of that, bytes; negative where it does not fit."""
    is_tight: bool = False
    """Whether it fits all the same, of a layout that was set by hand: at the device's limit the allocator gives back
    what it caches."""
    simulated: SimulatedStep | None = None
    """What its own traced program does; None where it was not simulated."""
    unmeasured: tuple[str, ...] = Field((), strict=False)
    """Its features that no measured run backs; each widens the interval of the step time."""

    @property
    def fits(self) -> bool:
        """Return whether it is predicted to run on its devices."""
        return self.headroom_bytes >= 0 or self.is_tight

    def is_limited_by_host(self, usable_bytes: float) -> bool:
        """Return whether less is left of the host's memory than of the device's `usable_bytes`."""
        # Headroom is rounded to bytes.
        return self.headroom_bytes < round(usable_bytes - self.estimate.memory.needed_bytes) - 1

    @property
    def step_s(self) -> float:
        """Return the predicted seconds of a step."""
        return self.estimate.step.total_s


class Contrast(Frozen):
    """The pick next to the best layout that fits and differs from it in a certain key."""

    change: str = Field(min_length=1)
    """The other layout's value of the key, such as tp=4."""
    other: Candidate
    change_by_component_s: dict[str, float]
    """By term of the step what the other one takes more than the pick, seconds; terms that are equal are left out."""


class Fix(Frozen):
    """A change of one key with which a layout fits."""

    change: str = Field(min_length=1)
    """Keys and new values: activation_checkpoint=full next to a plan's layouts, layout.cp=2 next to a job's own."""
    step_s: PositiveFloat
    """The step with it, seconds."""


class Rejection(Frozen):
    """A layout next to the pick that cannot be used, though it may be faster."""

    change: str = Field(min_length=1)
    """What differs from the pick, such as activation_checkpoint=none."""
    reason: str = Field(min_length=1)
    """The memory class that breaks it, or the rule."""
    step_s: PositiveFloat | None = None
    """The step if it could be used, seconds; None for what is not valid at all."""
    fixes: Annotated[tuple[Fix, ...], Field(strict=False)] = ()
    """The cheapest changes of another key with which it fits, at most three."""


class Sensitivity(Frozen):
    """How the step changes if the hardware is not what the catalogue says."""

    what: str = Field(min_length=1)
    """The figures that change, such as network bandwidth."""
    change: float
    """Their relative change: -0.2 is one fifth less."""
    pick_change: float
    """Relative change of the pick's step time."""
    best_change: float
    """The same for the best of the finalists then: less if another layout would be chosen."""
    best: Layout
    """The layout that would be chosen then."""


class WhatIf(Frozen):
    """The best step under a choice that is not the planner's to make."""

    change: str = Field(min_length=1)
    """The choice, such as precision float8-rowwise."""
    best: Candidate
    """The best layout with it."""
    note: str
    """Why the planner does not choose it."""
    is_runnable: bool = True
    """Whether the software that is planned for can do it."""


class Plan(Frozen):
    """The planner's answer."""

    model: str
    """The model, as it was named."""
    num_parameters: PositiveInt
    num_trained_parameters: PositiveInt | None = None
    """Those that are trained, on top of which is what stays as it is; None where all are."""
    cluster: str
    """The cluster's catalogue name."""
    device: str
    """The device's catalogue name."""
    num_devices: PositiveInt
    """Devices that every layout uses."""
    usable_memory_bytes: PositiveInt
    """What tensors can take of one device's memory, bytes."""
    workload: Workload
    """What a step processes."""
    stack: str
    """The software that the prediction is for."""
    kept: tuple[str, ...] = Field((), strict=False)
    """What was not the planner's to choose: keys of layout and memory with the values that were set, such as tp=8."""
    layouts_scored: NonNegativeInt
    """Valid layouts whose memory was compared with the device's, and which, where they fit, were given a step time."""
    layouts_that_fit: NonNegativeInt
    """Those of them that fit."""
    not_searched: tuple[str, ...] = Field((), strict=False)
    """Keys that save memory for time, and were left at their defaults: those that a job alone sets; for other software
    those of a layout, too, where something fits without."""
    precision_note: str = ""
    """Why the workload's precision is not the one that was asked for; "" where it is."""
    memory_margin: float = Field(0.0, ge=0, lt=1)
    """Share of the usable memory that layouts leave free to be chosen."""
    pick: Candidate
    """The simplest layout that fits and is as fast as the fastest to within the error of ranking."""
    fastest: Candidate
    """The fastest layout that fits by its predicted step: the pick itself if nothing as fast is simpler."""
    is_simpler: bool = True
    """Whether the pick is simpler than that; another pick is as simple, nearly as fast and leaves more memory."""
    memory_by_pipeline_rank: Annotated[tuple[MemoryUse, ...], Field(strict=False)]
    """The pick's memory on each pipeline rank."""
    runners_up: Annotated[tuple[Candidate, ...], Field(strict=False)] = ()
    """The best layouts of other splits over the ranks, fastest first; simulated ones before all others."""
    dropped: Annotated[tuple[Candidate, ...], Field(strict=False)] = ()
    """Finalists that cannot be traced, would not end or do not fit when simulated."""
    pareto_front: Annotated[tuple[Candidate, ...], Field(strict=False)] = ()
    """The pick, and slower layouts that each leave more memory than all faster ones, fastest first; before it the
    fastest of all, if that leaves more memory than the pick."""
    reference_scoring_s: NonNegativeFloat | None = None
    """Seconds in which the reference of preference optimisation scores all pairs, once before the first step, in the
    pick's layout; None where nothing is scored, or the pairs are not known."""
    fsdp_alone: Candidate | None = None
    """Parameters sharded over all devices and nothing else (FSDP), whether it fits or not; None if it is not valid."""
    fsdp_alone_refusal: str = ""
    """Why there is no such layout."""
    given: Candidate | None = None
    """The layout that the job itself sets, where it was not left to the planner, if it is valid."""
    given_refusal: str = ""
    """Why it is not valid."""
    given_misfit: str = ""
    """Why it exceeds layout.memory_budget_bytes whatever its blocks recompute; "" where it does not."""
    alternatives: Annotated[tuple[Contrast, ...], Field(strict=False)] = ()
    """Why the pick wins, closest first."""
    rejections: Annotated[tuple[Rejection, ...], Field(strict=False)] = ()
    """What lies next to the pick and cannot be used, fastest first."""
    sensitivities: Annotated[tuple[Sensitivity, ...], Field(strict=False)] = ()
    """What depends on which figure of the hardware."""
    what_ifs: Annotated[tuple[WhatIf, ...], Field(strict=False)] = ()
    """Choices that would change the result of training or the job."""
    attention: str = ""
    """What computes the pick's attention; "" of other software, and on a host."""

    @property
    def tokens_per_s_per_device(self) -> NonNegativeFloat:
        """Return the tokens that one device trains on in a second, with the pick."""
        return self.workload.global_batch_tokens / self.pick.step_s / self.num_devices

    def is_faster(self, step_s: float) -> bool:
        """Return whether a step is shorter than that of every layout that was searched and fits."""
        return step_s < min(self.pick.step_s, self.fastest.step_s)

    @property
    def keeps_given(self) -> bool:
        """Whether the layout that the job sets fits and is faster than all that were searched: it sets other keys."""
        margin_bytes = self.memory_margin * self.usable_memory_bytes
        given = None if self.given_misfit else self.given
        return given is not None and given.headroom_bytes >= margin_bytes and self.is_faster(given.step_s)


class Reliability(Frozen):
    """How often a device ends a run, and what an ending costs."""

    failures_per_device_day: NonNegativeFloat = FAILURES_PER_DEVICE_DAY
    """Unexpected endings for each device and day, as cluster.failures_per_device_day of a job."""
    restart_s: NonNegativeFloat = 900.0
    """Seconds from an ending to the first new step: what "more than 90 % effective training time" leaves each of the
    466 endings there, once the steps lost since the last checkpoint are taken off."""
    checkpoint_bytes_per_s_per_node: PositiveFloat = 2e12 / 2_048
    """What storage takes of each node's checkpoint: 2 TB/s sustained for 2,048 nodes (the same paper, 3.3.1)."""
    checkpoint_bytes_per_parameter: PositiveFloat = 12.0
    """Bytes of a checkpoint for each parameter: float32 weights and AdamW's two moments."""


class Budget(Frozen):
    """One way to train on all tokens."""

    cluster: str
    """The cluster's catalogue name."""
    num_devices: PositiveInt
    layout: Layout
    step_s: PositiveFloat
    """One optimizer step, seconds."""
    num_steps: PositiveInt
    """Steps that all tokens take."""
    mtbf_s: PositiveFloat | None
    """Mean time between endings of the whole job, seconds; None where nothing ever fails."""
    checkpoint_s: NonNegativeFloat
    """Seconds that writing a checkpoint keeps training waiting."""
    checkpoint_interval_s: PositiveFloat | None
    """Best time between checkpoints, seconds; None where nothing ever fails."""
    goodput: float = Field(gt=0, le=1)
    """Share of the time in which steps are made that last."""
    days: PositiveFloat
    """Days from start to end."""
    device_hours: PositiveFloat
    """Hours of all devices together."""
    cost: NonNegativeFloat | None = None
    """device_hours times the price; None without a price."""
    is_deadline_satisfied: bool | None = None
    """Whether days are no more than the deadline; None without one."""
    relative_error: NonNegativeFloat
    """Half width of the 80 % interval of step_s, and so of days and cost, as a share."""
