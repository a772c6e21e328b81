"""read_runs: a file of measured runs as configurations to price, the rows that cannot be priced with the reason."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.cost.layout_table import layout_table
from meshwright.cost.memory.footprint import fits, footprint
from meshwright.cost.training_setup import Configurations, TrainingSetup
from meshwright.errors import ConfigError, MeshwrightError
from meshwright.evaluation.dataset.row import RunRow, run_row
from meshwright.evaluation.dataset.run_cluster import cluster_of
from meshwright.evaluation.dataset.run_layout import layout_of
from meshwright.evaluation.dataset.run_model import model_of
from meshwright.evaluation.dataset.run_stack import stack_of
from meshwright.spec.layout.layout import Layout
from meshwright.spec.step.stack import Stack
from meshwright.spec.step.workload import Workload

_LEAST_FIRST: list[dict[str, Any]] = [
    {},
    *({"activation_checkpoint": "full", "activation_checkpoint_every": every} for every in (8, 4, 2)),
    {"activation_checkpoint": "selective"},
    {"activation_checkpoint": "full"},
]
"""Ways to keep less for the backward pass, from the one that computes the least again."""
_REQUIRED = ("id", "n_layers", "hidden", "gpu", "n_gpus")


@dataclass(frozen=True)
class MeasuredRun:
    """One row: what ran, or why it cannot be priced, and what was measured."""

    row: RunRow
    setup: TrainingSetup | None
    layout: Layout | None
    assumed: tuple[str, ...] = ()
    """What was taken for granted where the row says nothing."""
    unsupported_reason: str = ""

    @property
    def is_supported(self) -> bool:
        """Return whether the run can be priced."""
        return self.setup is not None


def read_runs(file: Path, known: dict[str, Stack] | None = None) -> list[MeasuredRun]:
    """Return every row of the CSV `file`, in order; raises ConfigError where it is no such file."""
    try:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            reader = csv.DictReader(stream)
            # An empty file has no names, which the reader looks for as late as it can.
            names = reader.fieldnames or ()
            rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{file}: cannot be read as CSV ({error}): name a file of measured runs") from None
    missing = [name for name in _REQUIRED if name not in names]
    if missing:
        raise ConfigError(f"{file}: has no column {', '.join(missing)}: add it (see docs/planning.md for the format)")
    return [measured_run(cells, known) for cells in rows]


def measured_run(cells: dict[str, str | None], known: dict[str, Stack] | None = None) -> MeasuredRun:
    """Return the run that one row describes, with the reason where it cannot be priced."""
    plain = {key: value for key, value in cells.items() if isinstance(value, str)}
    row = RunRow({key: value for key, value in plain.items() if value})
    assumed: list[str] = []
    try:
        row = run_row(plain)
        model = model_of(row, assumed)
        stack = stack_of(row, known)
        cluster = cluster_of(row, assumed)
        seq_len = row.count("seq_len")
        if seq_len is None:
            return MeasuredRun(row, None, None, (), "seq_len is empty: it is required")
        batch = _global_batch(row, assumed)
        layout = layout_of(row, stack, batch, assumed)
        workload = Workload(
            seq_len=seq_len,
            global_batch_size=batch,
            precision=row.precision,
            gradient_dtype=stack.gradient_accumulation_dtype,
        )
    except MeshwrightError as error:
        return MeasuredRun(row, None, None, tuple(assumed), str(error))
    except ValueError as error:  # a data type's own validation
        return MeasuredRun(row, None, None, tuple(assumed), " ".join(str(error).split())[:300])
    setup, layout = _that_fits(row, TrainingSetup(model, workload, cluster, stack), layout, assumed)
    return MeasuredRun(row, setup, layout, tuple(assumed))


def _that_fits(row: RunRow, setup: TrainingSetup, layout: Layout, assumed: list[str]) -> tuple[TrainingSetup, Layout]:
    """Return the setup and layout with the least that a silent row must have done for its run to fit its devices.

    That is recomputation, and an optimizer's state shared by data-parallel ranks. Where nothing helps, as they were.
    """
    stack = setup.stack
    is_silent = not row.text("activation_ckpt") and layout.activation_checkpoint == "none"
    # Only a vendor's table hides a recipe; elsewhere what does not fit shows that the prediction is wrong.
    policies = _LEAST_FIRST if is_silent and stack.is_tuned else [{}]
    shares = not row.text("fsdp_zero_stage") and stack.sharding == "none" and layout.dp_replicate > 1
    for is_shared in (False, True) if shares else (False,):
        tried = replace(setup, stack=stack.replace(sharding="optimizer")) if is_shared else setup
        degrees = {"dp_shard": layout.dp_replicate, "dp_replicate": 1} if is_shared else {}
        for policy in policies:
            changed = layout.replace(**degrees, **policy)
            configs = Configurations.of_one(tried, layout_table([changed]))
            if fits(footprint(configs), configs)[0]:
                assumed += [f"{name}={value}: it would not fit otherwise" for name, value in policy.items()]
                assumed += ["optimizer state is shared: it would not fit otherwise"] if is_shared else []
                return tried, changed
    return setup, layout


def _global_batch(row: RunRow, assumed: list[str]) -> int:
    """Return the sequences of a step: as stated, else one microbatch of each data-parallel rank, or so many of them."""
    stated = row.count("global_batch")
    if stated is not None:
        return stated
    split = math.prod(row.count(axis) or 1 for axis in ("tp", "cp", "pp"))
    dp = row.count("dp") or max(1, row.required("n_gpus") // split)
    batch = (row.count("micro_batch") or 1) * dp * (row.count("grad_accum") or 1)
    assumed.append(f"global_batch={batch}")
    return batch
