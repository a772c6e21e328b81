"""[replicas]: whether replicas of the model are lost, replaced and joined one by one while the others train."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from meshwright.spec.frozen import Frozen
from meshwright.spec.job.rules.sync_rules import sync_problems
from meshwright.spec.layout.layout import Layout
from meshwright.spec.problem import Problem, shown_value

if TYPE_CHECKING:
    from meshwright.spec.job.job import Job


class ReplicasSection(Frozen):
    """How replicas of the model (layout.dp_replicate of them) depend on each other."""

    independent: bool = False
    """Whether each replica starts, fails and is replaced by itself while the others train; false: all start again."""
    minimum: PositiveInt = 1
    """Fewest replicas that train; with fewer left, they wait run.timeout_s for others, then end with exit code 75."""
    address: str = "127.0.0.1"
    """Where replicas of other machines reach the coordinator; the default lets in this machine's only."""
    sync_every: PositiveInt = 1
    """Steps between sums over replicas: 1 sums gradients in every step, more sum changes of parameters (DiLoCo)."""
    outer_learning_rate: PositiveFloat = 0.7
    """Learning rate of the outer optimizer, SGD with Nesterov momentum, on the mean change of parameters."""
    outer_momentum: float = Field(0.9, ge=0, lt=1)
    """Momentum of the outer optimizer; 0 is plain SGD, which with outer_learning_rate = 1 averages parameters."""
    fragments: PositiveInt = 1
    """Parts of the parameters, summed in turn, each every sync_every steps (Streaming DiLoCo); 1 sums all at once."""
    sync_delay_steps: NonNegativeInt = 0
    """Steps that a replica trains while a fragment is summed in the background; 0 waits for each sum."""
    merge_factor: float = Field(0.0, ge=0, lt=1)
    """Share of its own parameters that a replica keeps when it takes a sum; 0 keeps none, 0.5 is for delayed sums."""
    outer_dtype: Literal["float32", "bfloat16"] = "float32"
    """Format in which changes of parameters are summed over replicas; bfloat16 halves the bytes."""

    @property
    def trains_locally(self) -> bool:
        """Return whether replicas train for several steps between their sums."""
        return self.independent and self.sync_every > 1

    @property
    def sums_gradients(self) -> bool:
        """Return whether replicas that depend on no other sum the gradients of every step."""
        return self.independent and self.sync_every == 1

    @property
    def steps_between_syncs(self) -> int:
        """Return the steps from one sum to the next, of another fragment where there are several."""
        return max(1, self.sync_every // self.fragments)

    def is_sync(self, step: int, last_step: int) -> bool:
        """Return whether replicas have summed something when `step` ends; all fragments in the last one of all."""
        return step % self.steps_between_syncs == 0 or step == last_step


_KEY: Final = "replicas.independent"
_Rules = Iterator[tuple[str, Any, bool, Any, str]]
"""Of (key, its value, whether that is ruled out, a value that is not, why)."""


def replicas_problems(job: Job) -> Iterator[Problem]:
    """Yield what of a job does not go with independent replicas."""
    yield from sync_problems(job)
    if not job.replicas.independent:
        return
    for key, value, is_ruled_out, default, why in _rules(job):
        if is_ruled_out:
            message = f"{key} = {shown_value(value)}: {why}, so {_KEY} = true refuses it"
            yield Problem(message, [{key: default}, {_KEY: False}])


def _rules(job: Job) -> _Rules:
    layout, optimizer = job.layout, job.optimizer
    own = "its graph sums gradients over replicas itself, and cannot drop one"
    yield "layout.compile", layout.compile, layout.compile == "model", True, own
    yield "layout.cuda_graphs", layout.cuda_graphs, layout.cuda_graphs, False, own
    early = "parameters change before it is known whether all replicas have summed the step"
    yield "optimizer.in_backward", optimizer.in_backward, optimizer.in_backward, False, early
    experts = "the loads of experts are not summed over independent replicas yet"
    yield "layout.ep", layout.ep, layout.ep > 1, 1, experts
    float8 = job.precision.float8
    yield "precision.float8", float8, float8 != "none", "none", "its scales are not shared by independent replicas yet"
    guards, returns = job.guards, job.guards.skips_any and job.guards.max_rollbacks > 0
    alone = "replicas do not return to an earlier checkpoint together yet"
    yield "guards.max_rollbacks", guards.max_rollbacks, returns, 0, alone
    compared, twice = guards.replica_check_interval, guards.recompute_interval
    unequal = "only one replica would return to a checkpoint"
    yield "guards.replica_check_interval", compared, compared > 0, 0, unequal
    yield "guards.recompute_interval", twice, twice > 0, 0, unequal
    interval = job.checkpoint.memory_interval
    yield "checkpoint.memory_interval", interval, interval > 0, 0, "a replica takes its state from the others' memory"
    few = f"there are only layout.dp_replicate = {layout.dp_replicate} of them"
    minimum = job.replicas.minimum
    yield "replicas.minimum", minimum, minimum > layout.dp_replicate, layout.dp_replicate, few


def layout_of_replica(job: Job, num_ranks: int) -> Layout:
    """Return the layout of the ranks of one independent replica."""
    return job.layout.replace(dp_replicate=1).resolve(num_ranks)
