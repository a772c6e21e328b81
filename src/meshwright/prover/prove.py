"""Proof: one process and each layout run the same small job with the real trainer, and are compared."""

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from meshwright.errors import ConfigError, InfeasibleLayout, MeshwrightError
from meshwright.log import logger, progress
from meshwright.prover.buffers import buffer_problem
from meshwright.prover.differences import TOLERANCES, Incomparable, Record, assemble, compare
from meshwright.prover.proof_data import proof_dataset, reads_own_data, write_corpus
from meshwright.prover.record import record
from meshwright.prover.small_job import SmallJob, small_job
from meshwright.spec.job.job import Job
from meshwright.spec.job.validity import layout_problems
from meshwright.spec.layout.layout import Layout
from meshwright.spec.layout.layout_text import layout_text
from meshwright.spec.run.proof import Difference, LayoutProof, PlantedAxis, Proof, ProofPrecision
from meshwright.trainer.launch.local.local_ranks import RanksFailed, run_ranks
from meshwright.trainer.run.open_run import versions


@dataclass(frozen=True)
class ProofRequest:
    """Layouts to prove, and how."""

    job: Job
    layouts: Sequence[Layout]
    num_steps: int = 3
    precision: ProofPrecision = "float32"
    """Precision of computation; float64 leaves the least rounding."""
    repeat: bool = False
    """Run each layout twice and require bitwise equality."""
    planted: PlantedAxis | None = None
    """Axis of the fault to inject."""
    device: str = "cpu"
    timeout_s: float = 300.0
    """Time limit of one layout."""
    max_ranks: int = 64
    """Limit of ranks per layout; each is a process on this machine."""


def prove(request: ProofRequest, report: Callable[[LayoutProof], None]) -> Proof:
    """Return the comparison of each layout with one process; call `report` after each.

    Raises ConfigError before the first run for invalid layouts and for a fault without effect.
    """
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="meshwright-prove-") as folder:
        corpus = Path(folder, "sums.jsonl")
        write_corpus(corpus)
        small = small_job(request.job, request.layouts, corpus, request.num_steps, request.precision)
        _require_fitting(request, small)
        _read_data(request.job, small)
        progress.info("training the small model in one process, to compare with")
        reference = _one_process(request, small)
        proofs = []
        for layout in request.layouts:
            proofs.append(_prove_layout(request, small, layout, reference))
            report(proofs[-1])
    return Proof(
        job=small.job,
        changes=small.changes,
        num_steps=request.num_steps,
        num_parameters=sum(weight.size for weight in assemble([reference]).weights.values()),
        precision=request.precision,
        planted=request.planted,
        layouts=tuple(proofs),
        date=datetime.now(UTC).date().isoformat(),
        versions=versions(),
        took_s=time.monotonic() - started_s,
    )


def _read_data(job: Job, small: SmallJob) -> None:
    """Read the job's own data once, before ranks do; raises DataError for data that cannot be read."""
    if reads_own_data(job):
        notes = "; ".join(proof_dataset(small.job).notes)
        progress.info("proving with the job's own data%s", f": {notes}" if notes else "")
    elif job.train.task != "pretrain":
        text = "data.source = %r is not on this machine: proving with written conversations and pairs"
        logger.warning(text, job.data.source)


def _require_fitting(request: ProofRequest, small: SmallJob) -> None:
    """Raise for every layout that is invalid for the job with the small job's batch."""
    job = request.job.replace(train=small.job.train)
    problems = [
        f"{layout_text(layout)}: {problem}" for layout in request.layouts for problem in layout_problems(job, layout)
    ]
    if problems:
        raise InfeasibleLayout("\n".join(problems))
    many = [layout for layout in request.layouts if layout.num_ranks > request.max_ranks]
    if many:
        raise ConfigError("\n".join(_too_many_ranks(layout, request.max_ranks) for layout in many))
    axis = request.planted
    if axis is not None and not any(getattr(layout, axis) > 1 for layout in request.layouts):
        texts = " ".join(layout_text(layout) for layout in request.layouts)
        raise ConfigError(
            f"--plant {axis} has no effect: no layout of {texts} has {axis} > 1; "
            f"add one that has, or plant another axis"
        )


def _too_many_ranks(layout: Layout, max_ranks: int) -> str:
    small = on_few_ranks(layout)
    smaller = f"prove {layout_text(small)}, the same axes with small degrees, or " * (small.num_ranks <= max_ranks)
    return (
        f"{layout_text(layout)}: {layout.num_ranks:,} ranks, each a process on this machine, exceed --max-ranks = "
        f"{max_ranks}: {smaller}set --max-ranks {layout.num_ranks}"
    )


def _one_process(request: ProofRequest, small: SmallJob) -> Record:
    only: Record
    try:
        [(only, _)] = run_ranks(
            record, 1, small.job, request.device, None, False, timeout_s=request.timeout_s, device=request.device
        )
    except RanksFailed as failure:
        logger.error("%s", failure)
        raise MeshwrightError(f"the reference run in one process failed: {failure.reason}") from None
    return only


def _prove_layout(request: ProofRequest, small: SmallJob, layout: Layout, reference: Record) -> LayoutProof:
    started_s = time.monotonic()
    tolerances = TOLERANCES[request.precision]
    differences: tuple[Difference, ...] = ()
    repeats, problem = None, None
    try:
        answers = run_ranks(
            record,
            layout.num_ranks,
            small.with_layout(layout),
            request.device,
            request.planted,
            request.repeat,
            timeout_s=request.timeout_s,
            device=request.device,
        )
        repeats = all(is_equal for _, is_equal in answers) if request.repeat else None
        records = [one for one, _ in answers]
        whole = assemble(records)
        problems = [_unequal_text(whole.unequal_copies)]
        if request.precision != "mixed":
            # In bfloat16 a token may go to another expert, and the buffer that balances these then takes another step.
            problems.append(buffer_problem(records, reference, tolerances.weight))
        problem = "; ".join(filter(None, problems)) or None
        differences = compare(whole, assemble([reference]), tolerances)
    except RanksFailed as failure:
        logger.error("%s: %s", layout_text(layout), failure)
        problem = failure.reason
    except Incomparable as difference:
        problem = str(difference)
    return LayoutProof(
        layout=layout,
        differences=differences,
        problem=problem,
        repeats=repeats,
        took_s=time.monotonic() - started_s,
    )


def _unequal_text(unequal: Sequence[str]) -> str | None:
    if not unequal:
        return None
    return f"copies differ: {unequal[0]}" + (f", and {len(unequal) - 1} more" if len(unequal) > 1 else "")


_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
_MOST_RANKS = 8


def on_few_ranks(layout: Layout) -> Layout:
    """Return `layout` with degrees of at most 2, and data parallelism of 1 if more than 8 ranks would remain.

    Compilation, offload and asynchronous tensor parallelism are disabled.
    """
    degrees = {axis: min(getattr(layout, axis), 2) for axis in _AXES}
    stages = min(layout.stages_per_rank, 2)
    small = layout.replace(
        **degrees,
        etp=min(layout.etp, degrees["tp"]),
        microbatch_size=1,
        virtual_stages=stages if layout.virtual_stages is not None else None,
        stage_boundaries=None,
        activation_checkpoint_blocks=None,
        async_tp=False,
        compile=False,
        cpu_offload=False,
        activation_offload=False,
        loss_chunks=min(layout.loss_chunks, 2),
    )
    for axis in ("dp_replicate", "dp_shard"):
        if small.num_ranks > _MOST_RANKS and (axis != "dp_shard" or small.ep == 1):
            small = small.replace(**{axis: 1})
    return small
