"""plan: the best layout for a job or a model on a cluster; needs no torch unless finalists are simulated."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from rich.console import RenderableType
from rich.markup import escape

from meshwright.app.arguments import JobSource, NotNegative, Positive, require_allowed
from meshwright.app.job.compile_choice import settled_on
from meshwright.app.job.jobs import as_job
from meshwright.app.job.reference_words import reference_scoring
from meshwright.app.job.settle_float8 import settle_float8
from meshwright.app.job.summary import precision_note
from meshwright.app.named_options import option_words, plan_in_options
from meshwright.app.progress import elapsed
from meshwright.app.results.result import PlottedResult, memory_words, step_words, viewed
from meshwright.app.run_budget import RunArguments, count
from meshwright.config.load import COMMAND_LINE, ResolvedJob, raise_problems
from meshwright.cost.communication.nccl_ctas import idle_limit_note
from meshwright.cost.stack_factors import OURS
from meshwright.errors import ConfigError, problems_raised_by
from meshwright.hardware.choice import named_cluster
from meshwright.log import logger
from meshwright.pages.figures.plan_figures import Shown, memory_ranks_figure, pareto_figure, shown_layouts, step_figure
from meshwright.pages.html.plan_html import write_plan_html
from meshwright.pages.tables.plan_table import plan_page
from meshwright.planner.plan import make_plan
from meshwright.planner.read_request import (
    Named,
    Options,
    cluster_of,
    option_problems,
    plan_request,
    resolve_named,
    set_layout_keys,
    takes_all_devices,
)
from meshwright.planner.request import PlanRequest, pools_note
from meshwright.planner.run_cost import predicted_interval
from meshwright.spec.layout.layout import AXES, Layout
from meshwright.spec.layout.layout_text import layout_text
from meshwright.spec.run.layout_plan import Budget, Plan
from meshwright.spec.step.adapter import Adapter

_KEYS = (*AXES, "ep", "microbatch_size", "schedule", "activation_checkpoint", "compile")
"""Of the layout, with a column each; the others are in the column `layout`."""


class PlanResult(PlottedResult, Plan):
    """A plan with its views. Data frame: a row for each layout. Plots: pareto, memory, step."""

    note: str = Field("", exclude=True)
    """What to know of the job that was planned, such as a format that leaves tensor cores unused."""
    run: RunArguments = Field(RunArguments(), exclude=True)
    """What was asked of the whole run."""
    budgets: tuple[Budget, ...] = Field((), exclude=True)
    """Days and cost of the whole run with the pick, followed by those of other clusters; () where none were asked."""

    @property
    def budget(self) -> Budget | None:
        """Return days and cost of the whole run with the pick; None without its tokens."""
        return self.budgets[0] if self.budgets else None

    @property
    def layout(self) -> Layout:
        """Return the layout of the pick."""
        return self.pick.layout

    @property
    def step_s(self) -> float:
        """Return the predicted step of the pick, seconds."""
        return self.pick.estimate.step.total_s

    @property
    def mfu(self) -> float | None:
        """Return the model FLOPs utilization of the pick; None where the device's peak is unknown."""
        return self.pick.estimate.mfu

    def to_json(self) -> str:
        """Return what `meshwright plan --json` prints: the plan and, where they were asked for, days and cost."""
        record = self.to_dict()
        if self.budgets:
            record["budget"], *record["frontier"] = (one.to_dict() for one in self.budgets)
        return json.dumps(record, indent=2, ensure_ascii=False)

    def to_html(self, file: Path | str) -> None:
        """Write the plan as one page that needs no network."""
        write_plan_html(self, Path(file), self.run.page(self.budgets))

    def _summary(self) -> str:
        return (
            f"Plan {self.model} on {self.num_devices} x {self.device}: {layout_text(self.layout.effective)}, "
            f"{step_words(self.step_s, self.mfu)}, "
            f"{memory_words(self.pick.estimate.memory.reserved_bytes, self.usable_memory_bytes)}"
        )

    def _page(self) -> Iterator[RenderableType]:
        yield from plan_page(self)
        if self.note:
            yield f"note: {escape(self.note)}"
        yield from self.run.page(self.budgets)

    def _rows(self) -> list[dict[str, Any]]:
        return [_row(one) for one in shown_layouts(self)]

    def _figures(self) -> Mapping[str, Callable[[], Any]]:
        figures = {"pareto": pareto_figure, "memory": memory_ranks_figure, "step": step_figure}
        return {name: partial(figure, self) for name, figure in figures.items()}


def _row(shown: Shown) -> dict[str, Any]:
    layout, estimate = shown.candidate.layout, shown.candidate.estimate
    return {
        "role": shown.role,
        "label": shown.label,
        "layout": layout_text(layout.effective),
        **{key: getattr(layout, key) for key in _KEYS},
        "step_s": estimate.step.total_s,
        "relative_error": estimate.relative_error,
        "mfu": estimate.mfu,
        "hfu": estimate.hfu,
        "reserved_bytes": estimate.memory.reserved_bytes,
        "free_bytes": shown.candidate.free_bytes,
        **estimate.step.to_dict(),
    }


_NAMES = ("model", "seq_len", "global_batch_tokens", "global_batch_size")


@dataclass(frozen=True)
class PlanArguments:
    """What is planned: a job, or a model on a cluster with a batch."""

    job: JobSource | None = None
    overrides: tuple[str, ...] = ()
    """section.key=value."""
    _: KW_ONLY
    model: str | None = None
    """A preset, or the config.json of a Hugging Face model."""
    cluster: str | None = None
    """NAME:COUNT, such as "h100:256"; None for the job's."""
    seq_len: Positive | None = None
    """None for 8192."""
    global_batch_tokens: int | str | None = None
    """Such as 4_000_000 or "4M"."""
    global_batch_size: Positive | None = None
    """Sequences of a step."""
    precision: str | None = None
    """Format of the matmuls; None for the job's, or bfloat16."""
    adapter: Literal["none", "lora", "dora"] | None = None
    """Kind of adapter to train in place of all parameters; None for the job's."""
    adapter_rank: Positive | None = None
    """Its rank; None for 16."""
    adapter_targets: tuple[str, ...] = ()
    """Patterns of the linear layers that it is of; () for all those of the blocks."""
    stack: str = OURS
    """Software to predict."""
    given: tuple[Path, ...] = ()
    """Measured runs, CSV files or run folders, to which the software's constants are fitted."""
    simulate: NotNegative | None = None
    """Finalists to trace and simulate; None for what the job says."""
    top: Positive = 8
    """Layouts to list."""

    def __post_init__(self) -> None:
        require_allowed(PlanArguments, vars(self))

    def resolved(self) -> ResolvedJob:
        """Return the job; raises ConfigError for arguments that do not belong together."""
        with option_words(self.model is not None, self.overrides):
            return self._checked()

    def _checked(self) -> ResolvedJob:
        if problems := option_problems(Options(precision=self.precision, stack=self.stack)):
            raise_problems("the command line", [*problems, *problems_raised_by(self._read)])
        return self._read()

    def _read(self) -> ResolvedJob:
        named = [f"--{name.replace('_', '-')}" for name in _NAMES if getattr(self, name) is not None]
        if self.job is not None:
            if named:
                raise ConfigError(
                    f"{_name(self.job)!r} names a job file, which says the model and the batch already: leave out "
                    f"{', '.join(named)}, or write an override as section.key=value"
                )
            job = as_job(self.job, self.overrides, cluster=self.cluster)
            return _open_layout(job, self.overrides)
        if self.model is None:
            raise ConfigError("what should be planned is missing: name a job file, or give --model and --cluster")
        if self.cluster is None:
            raise ConfigError("--model needs --cluster NAME:COUNT of devices, such as --cluster h100:256")
        tokens = None if self.global_batch_tokens is None else count("global-batch-tokens", self.global_batch_tokens)
        if tokens is not None and self.global_batch_size is not None:
            raise ConfigError("--global-batch-tokens and --global-batch-size are both given: keep one of them")
        named_job = Named(self.model, self.cluster, self.seq_len, tokens, self.global_batch_size)
        return resolve_named(named_job, self.overrides)

    def _adapter(self) -> Adapter | None:
        """Return the adapter that the arguments describe; None where they describe none."""
        more = {"rank": self.adapter_rank, "targets": self.adapter_targets}
        given = {name: value for name, value in more.items() if value}
        if self.adapter in (None, "none") and given:
            options = " and ".join(f"--adapter-{name}" for name in given)
            raise ConfigError(f"{options} needs an adapter: give --adapter lora or dora, or leave {options} out")
        return None if self.adapter is None else Adapter.model_validate({"kind": self.adapter, **given})

    def request(self, resolved: ResolvedJob) -> PlanRequest:
        """Return what the planner is asked of the job; raises ConfigError or UnsupportedError."""
        section = resolved.job.cluster
        if self.cluster is None and takes_all_devices(resolved):
            devices = f"all {named_cluster(section.name).num_devices:,} devices"
            logger.warning(
                '%s of cluster.name = "%s" are used: limit them with cluster.num_devices or --cluster %s:COUNT',
                devices,
                section.name,
                section.name,
            )
        options = Options(
            self.cluster, self.precision, self.stack, self._adapter(), takes_example=True, keeps_overrides=True
        )
        resolved = settled_on(resolved, cluster_of(resolved.job, options, set_layout_keys(resolved)))
        request = plan_request(resolved, options)
        if not self.given:
            return request
        from meshwright.evaluation.fitting.given_runs import calibrated_stack

        return request.with_setup(stack=calibrated_stack(request.setup.stack, self.given))


def plan(
    job: JobSource | None = None,
    *overrides: str,
    model: str | None = None,
    cluster: str | None = None,
    seq_len: int | None = None,
    global_batch_tokens: int | str | None = None,
    global_batch_size: int | None = None,
    precision: str | None = None,
    adapter: Literal["none", "lora", "dora"] | None = None,
    adapter_rank: int | None = None,
    adapter_targets: tuple[str, ...] = (),
    stack: str = OURS,
    given: tuple[Path, ...] = (),
    simulate: int | None = None,
    top: int = 8,
    tokens: int | str | None = None,
    price_per_gpu_hour: float | None = None,
    deadline_days: float | None = None,
    frontier: bool = False,
    failures_per_gpu_day: float | None = None,
    restart_minutes: float | None = None,
) -> PlanResult:
    """Return the best layout for `job`, or for `model` on `cluster`, with what is predicted of it and of others.

    With `adapter` ("lora", "dora") the model's own parameters stay as they are, and adapters are trained: of all linear
    layers of the blocks, or of those that `adapter_targets` match.

    Layouts: keys given as overrides such as "layout.tp=8" are kept; those of a job file are judged next to the pick,
    or kept with layout.search = true. `given` are measured runs to fit to, CSV files or run folders. With `simulate`
    that many finalists are traced and simulated before one is picked, which takes torch.

    With `tokens` of the whole run ("15T"), `budget` of the result has its days, failures and cost, at
    `price_per_gpu_hour`, and whether that is within `deadline_days`; with `frontier`, `budgets` has those of fewer
    and of more devices, too. Raises ConfigError for bad input, InfeasibleLayout where no layout fits.
    """
    if isinstance(job, str) and "=" in job:
        overrides, job = (job, *overrides), None
    arguments = PlanArguments(
        job=job,
        overrides=overrides,
        model=model,
        cluster=cluster,
        seq_len=seq_len,
        global_batch_tokens=global_batch_tokens,
        global_batch_size=global_batch_size,
        precision=precision,
        adapter=adapter,
        adapter_rank=adapter_rank,
        adapter_targets=adapter_targets,
        stack=stack,
        given=given,
        simulate=simulate,
        top=top,
    )
    run = RunArguments(
        tokens=tokens,
        price_per_gpu_hour=price_per_gpu_hour,
        deadline_days=deadline_days,
        frontier=frontier,
        failures_per_gpu_day=failures_per_gpu_day,
        restart_minutes=restart_minutes,
    )
    resolved = arguments.resolved()
    return answer(arguments, resolved, run)


def answer(arguments: PlanArguments, resolved: ResolvedJob, run: RunArguments) -> PlanResult:
    """Return the plan for arguments whose job is known, and what the whole `run` takes."""
    with option_words(arguments.model is not None, arguments.overrides):
        request = arguments.request(resolved)
        found, note = _planned(arguments, resolved, request)
    if arguments.model is not None:
        found = plan_in_options(found, arguments.overrides)
    rate = resolved.job.cluster.failures_per_device_day
    if resolved.job.checkpoint.interval == "auto":
        chosen = predicted_interval(request, found.pick.step_s, rate)
        note = "; ".join(filter(None, (note, f"{chosen}; the run chooses by what it measures")))
    reference = reference_scoring(resolved.job, request, found.pick)
    if reference is not None:
        found = found.replace(reference_scoring_s=reference.scoring_s)
        note = "; ".join(filter(None, (note, f"the reference is {reference.text}")))
    return viewed(PlanResult, found, note=note, run=run, budgets=run.budgets(request, found.pick, rate))


def _planned(arguments: PlanArguments, resolved: ResolvedJob, request: PlanRequest) -> tuple[Plan, str]:
    """Return the plan, and what to know of the job."""
    device = request.cluster.device
    of_precision = None if arguments.precision else precision_note(resolved, device)
    # The page's head has the note on a precision that was replaced.
    of_float8 = "" if request.precision_note else request.float8_note
    of_limit = "" if request.given is None else idle_limit_note(request.given, request.cluster)
    # A misfit is in the words on the given layout.
    of_recompute = "" if request.recompute_misfit is not None else request.recompute_note
    notes = of_precision, of_float8, pools_note(resolved.job, device), of_limit, of_recompute
    note = "; ".join(filter(None, notes))
    num_simulated = resolved.job.planner.simulate if arguments.simulate is None else arguments.simulate
    if not num_simulated:
        with elapsed("searching layouts"):
            return make_plan(request, num_runners_up=arguments.top - 1), note
    from meshwright.app.simulated.simulated_plan import Finalists, simulated_plan

    if arguments.precision in (None, resolved.job.precision.matmuls):
        resolved, _ = settle_float8(resolved, request.cluster)
    finalists = Finalists(resolved, num_simulated, num_runners_up=arguments.top - 1)
    return simulated_plan(request, finalists), note


def _name(job: JobSource) -> str:
    return str(job.path if isinstance(job, ResolvedJob) else job)


def _open_layout(resolved: ResolvedJob, overrides: tuple[str, ...]) -> ResolvedJob:
    """Return the job with layout.search where only overrides set keys of its layout: they are kept."""
    origins = {resolved.origins[f"layout.{name}"] for name in set_layout_keys(resolved)}
    if resolved.job.layout.search or origins != {COMMAND_LINE}:
        return resolved
    return as_job(resolved.path, (*overrides, "layout.search=true"))
