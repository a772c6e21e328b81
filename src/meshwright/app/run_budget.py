"""Days, failures and cost of a whole run in the layout that plan picks: what --tokens adds, and mw.plan(tokens=...)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field
from rich.console import RenderableType

from meshwright.app.arguments import require_allowed
from meshwright.errors import ConfigError
from meshwright.hardware.choice import choose_cluster
from meshwright.pages.tables.budget_table import budget_page, frontier_page
from meshwright.planner.request import PlanRequest
from meshwright.planner.run_cost import BudgetRequest, budget, frontier
from meshwright.spec.run.layout_plan import Budget, Candidate, Reliability
from meshwright.units import parse_count

MAX_RATE = 1e9
"""Of a price, failures or minutes: keeps days and cost of any run within the range of a float."""
Rate = Annotated[float, Field(ge=0, le=MAX_RATE, allow_inf_nan=False)]
Days = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_DAY_S = 86_400.0


@dataclass(frozen=True)
class RunArguments:
    """What is asked of a whole run."""

    tokens: int | str | None = None
    """Tokens of the run, such as "15T"; None asks nothing."""
    price_per_gpu_hour: Rate | tuple[Rate, ...] | None = None
    """In any currency; several are one for each of `clusters`."""
    deadline_days: Days | None = None
    """That the run may take."""
    frontier: bool = False
    """Whether to ask for fewer devices and for more, too."""
    failures_per_gpu_day: Rate | None = None
    """None for the job's, cluster.failures_per_device_day."""
    restart_minutes: Rate | None = None
    """From a failure to new steps; None for 15."""
    clusters: tuple[str, ...] = ()
    """NAME:COUNT of several to compare; () for the plan's."""

    def __post_init__(self) -> None:
        require_allowed(RunArguments, {name: value for name, value in vars(self).items() if name != "clusters"})
        of_whole = {
            "price-per-gpu-hour": self.price_per_gpu_hour,
            "deadline": self.deadline_days,
            "frontier": self.frontier,
        }
        for option, value in of_whole.items():
            if value and not self.tokens:
                raise ConfigError(f"--{option} needs --tokens, the tokens of the whole run, such as 15T")
        if len(self.clusters) > 1 and not self.tokens:
            raise ConfigError("several --cluster are compared by days and cost: give --tokens too, or one --cluster")
        if len(self.prices) > 1 and len(self.prices) != len(self.clusters):
            raise ConfigError(
                f"{len(self.prices)} times --price-per-gpu-hour for {len(self.clusters)} times --cluster: give one for "
                "each, or one"
            )

    @property
    def prices(self) -> tuple[float | None, ...]:
        """Return the prices; one None where none is given."""
        given = self.price_per_gpu_hour
        return (given or (None,)) if isinstance(given, tuple) else (given,)

    def budgets(self, request: PlanRequest, pick: Candidate, failures_per_device_day: float) -> tuple[Budget, ...]:
        """Return the budget of the pick, followed by those of the frontier; none without tokens.

        `failures_per_device_day` is the job's, in place of the argument's.
        """
        if not self.tokens:
            return ()
        prices, reliability = self.prices, self._reliability(failures_per_device_day)
        run = BudgetRequest(
            num_tokens=count("tokens", self.tokens),
            num_parameters=request.setup.model.num_parameters,
            workload=request.workload,
            price_per_device_hour=prices[0],
            deadline_s=None if self.deadline_days is None else _DAY_S * self.deadline_days,
        )
        found = [budget(run, request.cluster, pick, reliability)]
        clusters = [choose_cluster(text) for text in self.clusters] or [request.cluster]
        if self.frontier or len(clusters) > 1:
            each = prices if len(prices) == len(clusters) else prices * len(clusters)
            found += frontier(request, zip(clusters, each, strict=True), run, reliability)
        return tuple(found)

    def page(self, budgets: tuple[Budget, ...]) -> Iterator[RenderableType]:
        """Yield the parts of the page on days and cost; none without tokens."""
        if budgets:
            yield ""
            yield from budget_page(budgets[0], f"{self.tokens}", self.deadline_days, budgets[1:])
        if len(budgets) > 1:
            yield ""
            yield from frontier_page(budgets[1:])

    def _reliability(self, failures_per_device_day: float) -> Reliability:
        said = {"failures_per_device_day": failures_per_device_day}
        if self.failures_per_gpu_day is not None:
            said["failures_per_device_day"] = self.failures_per_gpu_day
        if self.restart_minutes is not None:
            said["restart_s"] = 60 * self.restart_minutes
        return Reliability(**said)


def count(name: str, value: int | str) -> int:
    """Return a count such as "4M"; raises ConfigError that names the option `name`."""
    try:
        number = parse_count(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ConfigError(f"--{name}: {error}") from None
    if number < 1:
        raise ConfigError(f"--{name} {value} is less than 1: give a positive number")
    return number
