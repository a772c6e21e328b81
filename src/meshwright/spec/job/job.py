"""Job: the whole description of a run, one frozen section for each table of the TOML file."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from pydantic import Field

from meshwright.errors import ConfigError, InfeasibleLayout
from meshwright.spec.frozen import Frozen
from meshwright.spec.job.sections import (
    DEFAULT_WARMUP_STEPS,
    CheckpointSection,
    ClusterSection,
    DataSection,
    ModelSection,
    OptimizerSection,
    PlannerSection,
    PrecisionSection,
    RunSection,
    TrainSection,
)
from meshwright.spec.job.validity import broken_rules, with_fix
from meshwright.spec.layout.layout import Layout, LayoutRequest
from meshwright.spec.layout.schedule.schedule_rules import name_problems
from meshwright.spec.problem import Fix, Problem, multiples_near, with_working_fixes
from meshwright.spec.step.workload import Workload

SCHEMA_VERSION = 1
DEFAULT_GLOBAL_BATCH_SIZE = 8
SPLIT_SECTIONS = frozenset({"model", "layout"})
"""Sections that say together whether the model can be split as the layout asks."""


class Job(Frozen):
    """A run's whole description; equal jobs on equal software train equal models."""

    schema_version: int = Field(SCHEMA_VERSION, ge=1, le=SCHEMA_VERSION)
    """Version of the job format; a file without it is read as the newest."""
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    optimizer: OptimizerSection = OptimizerSection()
    precision: PrecisionSection = PrecisionSection()
    layout: LayoutRequest = LayoutRequest()
    cluster: ClusterSection = ClusterSection()
    planner: PlannerSection = PlannerSection()
    checkpoint: CheckpointSection = CheckpointSection()
    run: RunSection = RunSection()

    @property
    def global_batch_size(self) -> int:
        """Return the sequences in one optimizer step, from whichever of the two keys was given."""
        if self.train.global_batch_tokens is not None:
            return self.train.global_batch_tokens // self.train.seq_len
        return self.train.global_batch_size or DEFAULT_GLOBAL_BATCH_SIZE

    @property
    def workload(self) -> Workload:
        """Return what one optimizer step of this job processes."""
        return Workload(
            seq_len=self.train.seq_len,
            global_batch_size=self.global_batch_size,
            precision=self.precision.compute,
            gradient_dtype="float64" if self.precision.compute == "float64" else self.precision.reduce,
            masks_documents=self.data.mask_documents,
            optimizer=self.optimizer.name,
        )

    def problems(self, unknown: Collection[str] = (), num_ranks: int | None = None) -> list[Problem]:
        """Return what is wrong between fields, one message each; empty when the job is consistent.

        What is suggested works, on `num_ranks` ranks where they are given. Whether layout and model fit is not judged
        where one of them is among the `unknown` sections.
        """

        def left(fix: Fix) -> list[Problem]:
            return with_fix(self, fix)._broken_rules(unknown, num_ranks)

        return with_working_fixes(self._broken_rules(unknown, num_ranks), left)

    def _broken_rules(self, unknown: Collection[str], num_ranks: int | None) -> list[Problem]:
        """Return what is wrong between fields, with changes that have not been tried."""
        return [
            *self.batch_problems(),
            *self._step_problems(),
            *([] if SPLIT_SECTIONS.intersection(unknown) else self._layout_problems(num_ranks)),
        ]

    def num_microbatches(self, layout: Layout) -> int:
        """Return the microbatches that each data-parallel rank runs in one step; raises ConfigError if uneven."""
        if (problem := self.uneven_batch(layout)) is not None:
            raise ConfigError(problem)
        return self.global_batch_size // (layout.dp * layout.microbatch_size)

    def uneven_batch(self, layout: Layout) -> Problem | None:
        """Return that the global batch is no whole number of microbatches on each rank; None where it is."""
        per_pass = layout.dp * layout.microbatch_size
        if self.global_batch_size % per_pass == 0:
            return None
        key, scale = self.batch_key
        sequences = "" if scale == 1 else f" ({self.global_batch_size} sequences)"
        return Problem(
            f"{key} = {self.global_batch_size * scale}{sequences} does not divide by "
            f"{layout.dp} data-parallel ranks x layout.microbatch_size = {layout.microbatch_size}",
            [{key: size * scale} for size in multiples_near(self.global_batch_size, per_pass)],
        )

    @property
    def batch_key(self) -> tuple[str, int]:
        """Return the key that set the batch, and how much of it is one sequence."""
        if self.train.global_batch_tokens is None:
            return "train.global_batch_size", 1
        return "train.global_batch_tokens", self.train.seq_len

    def batch_problems(self) -> list[Problem]:
        """Return why the keys of [train] say no global batch; empty when they do."""
        train = self.train
        if train.global_batch_tokens is None:
            return []
        if train.global_batch_size is not None:
            what = (
                f"train.global_batch_size = {train.global_batch_size} and train.global_batch_tokens = "
                f"{train.global_batch_tokens} are both given"
            )
            return [Problem(what, otherwise="keep one of them")]
        if train.global_batch_tokens % train.seq_len:
            rows = 1 if self.layout.rest_axis else self.layout.dp * self.layout.microbatch_size
            what = (
                f"train.global_batch_tokens = {train.global_batch_tokens} is no multiple of train.seq_len = "
                f"{train.seq_len}"
            )
            nearest = multiples_near(train.global_batch_tokens, train.seq_len * rows)
            return [Problem(what, [{"train.global_batch_tokens": value} for value in nearest])]
        return []

    def _step_problems(self) -> Iterator[Problem]:
        train = self.train
        if train.stop_after is not None and train.stop_after > train.steps:
            yield Problem(
                f"train.stop_after = {train.stop_after} lies after train.steps = {train.steps}",
                [{"train.stop_after": train.steps}, {"train.stop_after": None}],
            )
        # A few steps for a trial are a job too: the default warmup is cut off, and check says so.
        if self.optimizer.warmup_steps > max(train.steps, DEFAULT_WARMUP_STEPS):
            yield Problem(
                f"optimizer.warmup_steps = {self.optimizer.warmup_steps} is more than train.steps = {train.steps}",
                [{"optimizer.warmup_steps": train.steps}],
                after=" or less",
            )
        if train.validation_interval and not self.data.validation_fraction:
            yield Problem(
                f"train.validation_interval = {train.validation_interval} but data.validation_fraction = 0 keeps no "
                "samples for validation",
                [{"train.validation_interval": 0}, {"data.validation_fraction": 0.02}],
            )

    def _layout_problems(self, num_ranks: int | None) -> list[Problem]:
        if self.layout.search:
            return name_problems(self.layout)  # other keys are constraints, which the planner checks
        # With a rest, what is wrong whatever it comes to: nothing that names its value.
        if num_ranks is not None:
            try:
                return broken_rules(self, self.layout.resolve(num_ranks))
            except InfeasibleLayout as error:
                return [Problem(str(error))]
        degrees = (1,) if self.layout.rest_axis is None else (1, 2, 3)
        found = [broken_rules(self, self.layout.resolve(self.layout.num_fixed_ranks * n)) for n in degrees]
        return [text for text in found[0] if all(text in others for others in found)]
