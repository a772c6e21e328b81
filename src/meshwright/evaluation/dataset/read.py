"""read_runs: a file of measured runs as configurations to price, the rows that cannot be priced with the reason."""

import csv
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from meshwright.cost.layout_table import layout_table
from meshwright.cost.memory.footprint import fits, footprint
from meshwright.cost.training_setup import Configurations, TrainingSetup
from meshwright.errors import ConfigError, MeshwrightError, UnsupportedError
from meshwright.evaluation.dataset.row import RunRow, run_row
from meshwright.evaluation.dataset.run_adapter import adapter_of
from meshwright.evaluation.dataset.run_cluster import cluster_of
from meshwright.evaluation.dataset.run_model import model_of
from meshwright.evaluation.dataset.run_stack import stack_of
from meshwright.spec.layout.layout import ActivationCheckpoint, Layout
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


def read_runs(file: Path) -> list[MeasuredRun]:
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
    return [measured_run(cells) for cells in rows]


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
            adapter=adapter_of(row, assumed),
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


_FULL: Literal["full"] = "full"
_USUAL_LOSS_CHUNKS = 16
"""Where notes say that there are some: a usual vocabulary in parts of 8192."""
_OFFLOADED = "+offload"
_SOME_BLOCKS = re.compile(r"full-block(?P<number>\d+)")
"""So many of all blocks are recomputed, as Megatron's recompute_method = "block" does."""
_USUAL_DEVICES_PER_NODE = 8


def layout_of(row: RunRow, stack: Stack, batch: int, assumed: list[str]) -> Layout:
    """Return the row's layout; raises UnsupportedError where its degrees do not make its devices."""
    tp, cp, pp = (row.count(axis) or 1 for axis in ("tp", "cp", "pp"))
    devices = row.required("n_gpus")
    if devices % (tp * cp * pp):
        raise UnsupportedError(f"tp={tp} x cp={cp} x pp={pp} do not divide n_gpus={devices}")
    dp = devices // (tp * cp * pp)
    shard = _shard_degree(row, stack, dp, cp, assumed)
    size = _microbatch_size(row, batch, dp, assumed)
    stages = row.count_or("vpp", 1, assumed) if pp > 1 else 1
    # The first stage can do with the embedding alone, the last one with the head.
    if pp * stages > row.required("n_layers") + 2:
        raise UnsupportedError(f"pp={pp} x vpp={stages} are more stages than n_layers={row.required('n_layers')} fill")
    checkpoint, every = _activation_checkpoint(row, stack, assumed)
    is_mixture = (row.count("moe_experts") or 0) > 0
    ep = (row.count("ep") or 1) if is_mixture else 1
    return Layout(
        pp=pp,
        dp_replicate=dp // shard,
        dp_shard=shard,
        cp=cp,
        tp=tp,
        ep=ep,
        etp=(row.count("etp") or 1) if is_mixture else 1,
        microbatch_size=size,
        schedule="Interleaved1F1B" if stages > 1 else "1F1B",
        virtual_stages=stages,
        activation_checkpoint=checkpoint,
        activation_checkpoint_every=every,
        activation_offload=row.text("activation_ckpt").endswith(_OFFLOADED),
        loss_chunks=_loss_chunks(row, assumed),
        reshard_after_forward="never" if row.text("fsdp_zero_stage") == "2" else "auto",
        async_tp=row.text("async_tp") == "yes" and tp > 1,
        compile=stack.kernels == "compiled",
    )


def _loss_chunks(row: RunRow, assumed: list[str]) -> int:
    """Return the chunks that head and loss are computed in, whether of tokens or of the vocabulary."""
    stated = row.count("loss_chunks")
    if stated is not None or "chunked LM head" not in row.text("notes"):
        return stated or 1
    assumed.append(f"loss_chunks={_USUAL_LOSS_CHUNKS}")
    return _USUAL_LOSS_CHUNKS


def _shard_degree(row: RunRow, stack: Stack, dp: int, cp: int, assumed: list[str]) -> int:
    """Return the data-parallel ranks that share one copy of what the stack shards."""
    if stack.sharding == "none":
        return 1
    group = row.count("fsdp_group")
    if group is None and row.text("fsdp_zero_stage") == "hsdp":
        group = row.count("gpus_per_node") or _USUAL_DEVICES_PER_NODE
    if group is None and "fsdp_group" in row.assume:
        group = row.count_or("fsdp_group", dp * cp, assumed)
    wanted = dp if group is None else max(1, group // cp)
    return wanted if dp % wanted == 0 else dp


def _microbatch_size(row: RunRow, batch: int, dp: int, assumed: list[str]) -> int:
    stated = row.count("micro_batch")
    accumulation = row.count("grad_accum")
    if stated is None and accumulation is not None and batch % (dp * accumulation) == 0:
        stated = batch // (dp * accumulation)
    size = stated
    if size is None:
        size = row.count_or("micro_batch", 1, assumed)
    if batch % (dp * size):
        if batch % dp:
            raise UnsupportedError(f"global_batch={batch} does not divide by dp={dp}")
        if stated is not None:
            raise UnsupportedError(f"global_batch={batch} does not divide by dp={dp} x micro_batch={size}")
        size = 1
    return size


def _activation_checkpoint(row: RunRow, stack: Stack, assumed: list[str]) -> tuple[ActivationCheckpoint, int]:
    # Unfused attention keeps its scores, so that hardly any model fits without recomputation.
    stated = row.text_or("activation_ckpt", _FULL if stack.attention == "unfused" else "none", assumed)
    stated = stated.removesuffix(_OFFLOADED)
    if some := _SOME_BLOCKS.fullmatch(stated):
        number, layers = int(some["number"]), row.required("n_layers")
        every = max(1, round(layers / max(number, 1)))
        assumed.append(f"activation_checkpoint_every={every}: {number} of {layers} blocks")
        return _FULL, every
    if stated == "selective-layer":
        return _FULL, 2
    if stated.startswith("selective"):
        return "selective", 1
    if stated not in ("none", _FULL):
        raise UnsupportedError(f"activation_ckpt = {stated!r} must be one of none, selective, full, full-blockN")
    return (_FULL if stated == _FULL else "none"), 1
