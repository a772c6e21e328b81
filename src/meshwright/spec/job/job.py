"""Job: the whole description of a run, one frozen section for each table of the TOML file."""

from __future__ import annotations

from collections.abc import Collection

from pydantic import Field

from meshwright.errors import ConfigError
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
from meshwright.spec.job.validity import layout_problems
from meshwright.spec.layout.layout import Layout, LayoutRequest, nearest_multiples
from meshwright.spec.layout.schedule.schedule_rules import name_problems
from meshwright.spec.noun import Noun
from meshwright.spec.step.workload import Workload

SCHEMA_VERSION = 1
DEFAULT_GLOBAL_BATCH_SIZE = 8
SPLIT_SECTIONS = frozenset({"model", "layout"})
"""Sections that say together whether the model can be split as the layout asks."""


class Job(Noun):
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

    def problems(self, unknown: Collection[str] = ()) -> list[str]:
        """Return what is wrong between fields, one message each; empty when the job is consistent.

        Whether layout and model fit is not judged where one of them is among the `unknown` sections.
        """
        return [
            *self.batch_problems(),
            *self._step_problems(),
            *([] if SPLIT_SECTIONS.intersection(unknown) else self._layout_problems()),
        ]

    def num_microbatches(self, layout: Layout) -> int:
        """Return the microbatches that each data-parallel rank runs in one step; raises ConfigError if uneven."""
        per_pass = layout.dp * layout.microbatch_size
        if self.global_batch_size % per_pass:
            key, scale = self._batch_key()
            choices = " or ".join(str(size * scale) for size in nearest_multiples(self.global_batch_size, per_pass))
            sequences = "" if scale == 1 else f" ({self.global_batch_size} sequences)"
            raise ConfigError(
                f"{key} = {self.global_batch_size * scale}{sequences} does not divide by "
                f"{layout.dp} data-parallel ranks x layout.microbatch_size = {layout.microbatch_size}: "
                f"set {key} to {choices}"
            )
        return self.global_batch_size // per_pass

    def _batch_key(self) -> tuple[str, int]:
        """Return the key that set the batch, and how much of it is one sequence."""
        if self.train.global_batch_tokens is None:
            return "train.global_batch_size", 1
        return "train.global_batch_tokens", self.train.seq_len

    def batch_problems(self) -> list[str]:
        """Return why the keys of [train] say no global batch; empty when they do."""
        train = self.train
        if train.global_batch_tokens is None:
            return []
        if train.global_batch_size is not None:
            return [
                f"train.global_batch_size = {train.global_batch_size} and train.global_batch_tokens = "
                f"{train.global_batch_tokens} are both given: keep one of them"
            ]
        if train.global_batch_tokens % train.seq_len:
            rows = 1 if self.layout.rest_axis else self.layout.dp * self.layout.microbatch_size
            nearest = nearest_multiples(train.global_batch_tokens, train.seq_len * rows)
            choices = " or ".join(str(value) for value in nearest)
            return [
                f"train.global_batch_tokens = {train.global_batch_tokens} is no multiple of train.seq_len = "
                f"{train.seq_len}: set it to {choices}"
            ]
        return []

    def _step_problems(self) -> list[str]:
        train, problems = self.train, []
        if train.stop_after is not None and train.stop_after > train.steps:
            problems.append(
                f"train.stop_after = {train.stop_after} lies after train.steps = {train.steps}: "
                "lower it, or leave it out to run to the end"
            )
        # A few steps for a trial are a job too: the default warmup is cut off, and check says so.
        if self.optimizer.warmup_steps > max(train.steps, DEFAULT_WARMUP_STEPS):
            problems.append(
                f"optimizer.warmup_steps = {self.optimizer.warmup_steps} is more than train.steps = {train.steps}: "
                f"set it to {train.steps} or less"
            )
        if train.validation_interval and not self.data.validation_fraction:
            problems.append(
                f"train.validation_interval = {train.validation_interval} but data.validation_fraction = 0 keeps no "
                "samples for validation: set data.validation_fraction above 0, or validation_interval = 0"
            )
        return problems

    def _layout_problems(self) -> list[str]:
        if self.layout.search:
            return name_problems(self.layout)  # what else is set are constraints: the planner tells what keeps them
        # With a rest, what is wrong whatever it comes to: nothing that names its value.
        degrees = (1,) if self.layout.rest_axis is None else (1, 2, 3)
        found = [layout_problems(self, self.layout.resolve(self.layout.num_fixed_ranks * n)) for n in degrees]
        return [text for text in found[0] if all(text in others for others in found)]
