"""Job: the whole description of a run, one frozen section for each table of the TOML file."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from pydantic import Field

from meshwright.errors import ConfigError
from meshwright.spec.frozen import Frozen
from meshwright.spec.job.dpo_section import DpoSection
from meshwright.spec.job.evaluation_section import EvaluationSection, evaluation_problems
from meshwright.spec.job.guards_section import GuardsSection, guards_problems
from meshwright.spec.job.memory_section import MemorySection
from meshwright.spec.job.replicas_section import ReplicasSection, replicas_problems
from meshwright.spec.job.rules.adapter_rules import adapter_problems
from meshwright.spec.job.rules.data_rules import data_rule_problems
from meshwright.spec.job.rules.dpo_rules import dpo_problems
from meshwright.spec.job.rules.exact_rules import exact_problems
from meshwright.spec.job.rules.mixture_rules import mixture_problems
from meshwright.spec.job.rules.optimizer_rules import optimizer_problems
from meshwright.spec.job.rules.run_rules import budget_problems, checkpoint_problems, hang_problems, step_problems
from meshwright.spec.job.rules.size_rules import divisors
from meshwright.spec.job.sections import (
    CheckpointSection,
    ClusterSection,
    DataSection,
    DType,
    ModelSection,
    OptimizerSection,
    PlannerSection,
    PrecisionSection,
    RunSection,
    TrainSection,
)
from meshwright.spec.job.validity import broken_rules, has_wrong_degree, with_fix
from meshwright.spec.layout.layout import Layout, LayoutRequest
from meshwright.spec.layout.schedule.schedule_rules import name_problems
from meshwright.spec.problem import Fix, Problem, fix_of_all, multiples_near, nearest_first, with_working_fixes
from meshwright.spec.step.adapter import Adapter
from meshwright.spec.step.workload import Workload
from meshwright.units import counted

SCHEMA_VERSION = 1
DEFAULT_GLOBAL_BATCH_SIZE = 8
_MICROBATCH = "layout.microbatch_size"
SPLIT_SECTIONS = frozenset({"model", "layout"})
"""Sections that say together whether the model can be split as the layout asks."""

FurtherRules = Callable[["Job", list[Problem]], Iterable[Problem]]
"""Returns what is wrong with a job by rules that this package does not know; the second is what is wrong by its own."""


def no_further(_: Job, __: list[Problem]) -> tuple[Problem, ...]:
    """Return that no further rules count."""
    return ()


class Job(Frozen):
    """A run's whole description; equal jobs on equal software train equal models."""

    schema_version: int = Field(SCHEMA_VERSION, ge=1, le=SCHEMA_VERSION)
    """Version of the job format; a file without it is read as the newest."""
    model: ModelSection = ModelSection()
    adapter: Adapter = Adapter()
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    evaluation: EvaluationSection = EvaluationSection()
    dpo: DpoSection = DpoSection()
    optimizer: OptimizerSection = OptimizerSection()
    precision: PrecisionSection = PrecisionSection()
    layout: LayoutRequest = LayoutRequest()
    memory: MemorySection = MemorySection()
    cluster: ClusterSection = ClusterSection()
    planner: PlannerSection = PlannerSection()
    checkpoint: CheckpointSection = CheckpointSection()
    guards: GuardsSection = GuardsSection()
    replicas: ReplicasSection = ReplicasSection()
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
            precision=self.precision.matmuls,
            float8_experts=self.precision.float8_experts,
            wide_dtype="float32" if self.precision.has_wide_float8 else "bfloat16",
            gradient_dtype=self.reduce_dtype,
            sums_exactly=self.train.exact_elastic,
            masks_documents=self.data.mask_documents,
            document_tokens=self.data.document_tokens,
            optimizer=self.optimizer.name,
            optimizer_state_dtype=self.optimizer.state_dtype,
            updates_in_backward=self.optimizer.in_backward,
            counts_accuracy=self.train.task == "sft",
            pairs_answers=self.train.task == "dpo",
            adapter=self.adapter,
        )

    @property
    def reduce_dtype(self) -> DType:
        """Return the format in which gradients are summed over ranks."""
        is_wide = self.precision.compute == "float64" or self.train.exact_elastic
        return "float64" if is_wide else self.precision.reduce

    def problems(
        self, unknown: Collection[str] = (), num_ranks: int | None = None, further: FurtherRules = no_further
    ) -> list[Problem]:
        """Return what is wrong between fields, one message each; empty when the job is consistent.

        What is suggested works, on `num_ranks` ranks where they are given; a dp_shard that is left out is 1 where they
        are not. Whether layout and model fit is not judged where one of them is among the `unknown` sections. `further`
        are rules of others, such as a cluster's, that a job and what is suggested for it must keep, too.
        """
        found = with_working_fixes(*self._rules(unknown, num_ranks, further))
        if num_ranks is None:
            return found
        return [problem if problem.fixes else self._on_other_ranks(problem, num_ranks) for problem in found]

    def fix_of_all(
        self, unknown: Collection[str] = (), num_ranks: int | None = None, further: FurtherRules = no_further
    ) -> Fix | None:
        """Return changes after which `problems` finds nothing, of few keys; None where none are found."""
        return fix_of_all(*self._rules(unknown, num_ranks, further))

    def problems_on_any_ranks(self, unknown: Collection[str] = ()) -> list[Problem]:
        """Return what `problems` does of what is wrong on any number of ranks."""
        return with_working_fixes(*self._rules(unknown, None, no_further, knows_ranks=False))

    def _rules(
        self, unknown: Collection[str], num_ranks: int | None, further: FurtherRules, *, knows_ranks: bool = True
    ) -> tuple[list[Problem], Callable[[Fix], list[Problem]]]:
        """Return the rules that the job breaks, with fixes that are not tried yet, and those that it does after one."""
        knows_split = not SPLIT_SECTIONS.intersection(unknown)

        def broken_rules_of(job: Job) -> list[Problem]:
            alone = job.layout.num_fixed_ranks if job.layout.is_open and knows_ranks else None
            # A job that only tries a fix needs no numbers of ranks that would suit it: each costs a check of its own.
            of_layout = (
                job._layout_problems(num_ranks or alone, suggests_ranks=job is self)
                if knows_split
                else name_problems(job.layout)
            )
            own = [
                *job.batch_problems(),
                *step_problems(job),
                *evaluation_problems(job.evaluation),
                *mixture_problems(job.data),
                *data_rule_problems(job),
                *dpo_problems(job),
                *optimizer_problems(job.optimizer, job.precision),
                *guards_problems(job.guards, job.optimizer, job.checkpoint),
                *exact_problems(job),
                *adapter_problems(job),
                *replicas_problems(job),
                *hang_problems(job),
                *checkpoint_problems(job),
                *budget_problems(job),
                *of_layout,
            ]
            return [*own, *further(job, own)]

        return broken_rules_of(self), lambda fix: broken_rules_of(with_fix(self, fix))

    def _on_other_ranks(self, problem: Problem, num_ranks: int) -> Problem:
        """Return a problem without a fix on `num_ranks` ranks, with a fix and the ranks that a degree then needs."""
        if not has_wrong_degree([problem]):
            return problem
        anyhow = self.problems_on_any_ranks()
        known = {one.what for one in anyhow}
        for fix in (fix for same in anyhow if same.what == problem.what for fix in same.fixes):
            job = with_fix(self, fix)
            fixed = job.layout.num_fixed_ranks
            has_rest = job.layout.is_open or job.layout.rest_axis
            for number in multiples_near(num_ranks, fixed) if has_rest else [fixed]:
                left = job._layout_problems(number, suggests_ranks=False)
                if not has_wrong_degree(left) and all(one.what in known for one in left):
                    change = Problem(problem.what, [fix]).removeprefix(f"{problem.what}: ")
                    return Problem(problem.what, otherwise=f"{change} and start {counted(number, 'rank')}")
        return problem

    def num_microbatches(self, layout: Layout) -> int:
        """Return the microbatches that each data-parallel rank runs in one step; raises ConfigError if uneven."""
        if (problem := self.uneven_batch(layout)) is not None:
            raise ConfigError(problem)
        return self.global_batch_size // (layout.dp * layout.microbatch_size)

    def uneven_batch(self, layout: Layout) -> Problem | None:
        """Return that the global batch is no whole number of microbatches on each rank; None where it is."""
        size, batch = layout.microbatch_size, self.global_batch_size
        if batch % (layout.dp * size) == 0:
            return None
        key, scale = self.batch_key
        sequences = "" if scale == 1 else f" ({batch} sequences)"
        # A microbatch that is wrong on any number of ranks is no reason to name one.
        ranks = f"{layout.dp} data-parallel ranks x " if batch % size == 0 else ""
        return Problem(
            f"{key} = {batch * scale}{sequences} does not divide by {ranks}layout.microbatch_size = {size}",
            [
                *({key: multiple * scale} for multiple in multiples_near(batch, layout.dp * size)),
                *({_MICROBATCH: number} for number in nearest_first(size, divisors(batch)) if not ranks),
            ],
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

    def _layout_problems(self, num_ranks: int | None, *, suggests_ranks: bool = True) -> list[Problem]:
        if self.layout.search:
            return name_problems(self.layout)  # other keys are constraints, which the planner checks
        # With a rest, what is wrong whatever it comes to: nothing that names its value.
        degrees = (1, 2, 3) if self.layout.is_open or self.layout.rest_axis else (1,)
        first, *others = (broken_rules(self, self.layout.resolve(self.layout.num_fixed_ranks * n)) for n in degrees)
        anyhow = [one for one in first if all(one.what in {other.what for other in found} for found in others)]
        # What follows from a degree that does not suit the model is not known: the ranks, and the batch of each.
        if num_ranks is None or has_wrong_degree(anyhow):
            return anyhow
        known = {one.what for one in anyhow}

        def is_valid(number: int) -> bool:
            return not suggests_ranks or all(
                one.what in known for one in broken_rules(self, self.layout.resolve(number))
            )

        if misfit := self.layout.misfit(num_ranks, is_valid):
            return [*anyhow, misfit]
        return broken_rules(self, self.layout.resolve(num_ranks))
