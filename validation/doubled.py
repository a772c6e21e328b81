"""doubled: each published model at twice its largest measured microbatch, and without recomputation: does it fit?

All published runs did run, so that a planner which always says yes would be right on every one of them. Here it is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshwright.cost.memory.footprint import footprint
from meshwright.evaluation.dataset.read import MeasuredRun
from meshwright.evaluation.fitting.timed_runs import configs_of_runs


@dataclass(frozen=True)
class Doubled:
    """One model on one kind of device."""

    model: str
    device: str
    microbatch_size: int
    """Twice the largest that was measured."""
    reserved_bytes: float
    usable_bytes: float

    @property
    def fits(self) -> bool:
        """Return whether it is predicted to fit."""
        return self.reserved_bytes <= self.usable_bytes


def doubled(runs: Sequence[MeasuredRun]) -> list[Doubled]:
    """Return every model and device of the runs, in their order."""
    largest: dict[tuple[str, str], MeasuredRun] = {}
    for run in runs:
        key = (run.row.text("model_family"), run.row.text("gpu"))
        if run.is_supported and (key not in largest or _microbatch_size(run) > _microbatch_size(largest[key])):
            largest[key] = run
    tried = [_twice(run) for run in largest.values()]
    reserved = footprint(configs_of_runs(tried)).reserved_bytes.tolist()
    return [_named(key, run, num_bytes) for key, run, num_bytes in zip(largest, tried, reserved, strict=True)]


def _twice(run: MeasuredRun) -> MeasuredRun:
    assert run.layout is not None, "a run that cannot be priced"
    assert run.setup is not None, "a run that cannot be priced"
    layout = run.layout.replace(microbatch_size=2 * run.layout.microbatch_size, activation_checkpoint="none")
    batch = 2 * run.setup.workload.global_batch_size
    setup = replace(run.setup, workload=run.setup.workload.replace(global_batch_size=batch))
    return replace(run, setup=setup, layout=layout)


def _microbatch_size(run: MeasuredRun) -> int:
    assert run.layout is not None, "a run that cannot be priced"
    return run.layout.microbatch_size


def _named(key: tuple[str, str], run: MeasuredRun, reserved_bytes: float) -> Doubled:
    assert run.setup is not None, "a run that cannot be priced"
    usable = run.setup.cluster.device.usable_memory_bytes
    return Doubled(*key, _microbatch_size(run), reserved_bytes, float(usable))
