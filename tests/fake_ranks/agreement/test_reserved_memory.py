"""What the allocator reserves: by the formulas, and by replaying the traced step of every pipeline rank."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from meshwright.config.load import load_job
from meshwright.cost.layout_table import layout_table
from meshwright.cost.memory.footprint import footprint_of_rank
from meshwright.cost.own_stack import OwnChoices, own_stack
from meshwright.cost.stack_factors import load_stack
from meshwright.cost.training_setup import Configurations, TrainingSetup
from meshwright.hardware.catalogue import load_cluster
from meshwright.simulator.simulate_step import simulate
from meshwright.spec.layout.layout import Layout
from meshwright.spec.machine.cluster import Cluster
from meshwright.spec.model.model_source import resolve_architecture
from meshwright.spec.model.model_spec import model_spec
from meshwright.spec.trace.traces import Traces
from meshwright.tracer.programs.job_steps import layout_of
from meshwright.tracer.trace_job import TraceOptions, trace_job
from meshwright.trainer.step.step_builder import TRAINER_STEP

MOST_OFF, MOST_ALLOCATED_OFF = 0.08, 0.05
JOB = """
model = { source = "llama3-8b", options = { num_layers = 4 } }
data = { source = "stdlib", tokenizer = "bytes" }
train = { steps = 10, seq_len = 2048, global_batch_size = 16 }
precision = { compute = "bfloat16" }
layout = { activation_checkpoint = "none" }
"""
LARGER = "model.options.num_layers=8 train.seq_len=4096 train.global_batch_size=32"
"""Activations leave a gap wide enough for the tensor that gradients of embedding and head are reduced in, as they do
in models of ordinary depth: of 4 short blocks they do not, and 3 to 21 % more is reserved than by the formula."""
ONE = "model.options.num_layers=8 train.seq_len=4096 train.global_batch_size=8"
"""One microbatch."""
MIXTURE = "model.source=mixtral-8x7b model.options.dim=2560 model.options.ffn_dim=7168 train.seq_len=4096"
QUICK = (f"dp_shard=4 pp=2 {LARGER}",)
LONG = (
    "dp_shard=8",
    f"dp_shard=8 compile=true activation_checkpoint=selective {LARGER}",
    f"dp_shard=8 reshard_after_forward=never {LARGER}",
    f"dp_shard=4 dp_replicate=2 {LARGER}",
    "dp_replicate=8",
    f"dp_shard=4 tp=2 {LARGER}",
    f"dp_shard=4 cp=2 {LARGER} train.seq_len=8192",
    "dp_shard=4 pp=2 compile=true",
    f"dp_shard=2 pp=4 {LARGER}",
    f"dp_shard=2 pp=4 activation_checkpoint=full activation_checkpoint_every=4 {LARGER}",
    "dp_shard=4 pp=2 schedule=InterleavedZeroBubble virtual_stages=2",
    "dp_shard=4 pp=2 schedule=ZBVZeroBubble virtual_stages=2",
    f"dp_shard=4 pp=2 schedule=ZBVZeroBubble compile=true activation_checkpoint=selective {LARGER}",
    f"dp_shard=4 pp=2 schedule=Interleaved1F1B virtual_stages=2 compile=true activation_checkpoint=selective {LARGER}",
    f"dp_shard=4 pp=2 schedule=Interleaved1F1B virtual_stages=4 gradient_sync=microbatch compile=true {LARGER}",
    f"dp_shard=4 pp=2 schedule=GPipe {LARGER}",
    f"dp_shard=4 pp=2 schedule=LoopedBFS virtual_stages=2 compile=true {LARGER}",
    f"dp_shard=8 cpu_offload=true activation_checkpoint=full {LARGER}",
    "dp_shard=8 compile=true model.source=qwen3-30b-a3b train.seq_len=4096",
    f"dp_shard=4 cp=2 compile=true activation_checkpoint=selective loss_chunks=8 {LARGER} train.seq_len=8192",
    "dp_shard=8 compile=model train.seq_len=4096",
    "dp_shard=4 cp=2 compile=model model.options.num_layers=8 train.seq_len=8192",
    f"dp_shard=8 compile=true {ONE} optimizer.in_backward=true optimizer.max_grad_norm=0.0",
    f"dp_shard=8 compile=true {ONE} optimizer.name=muon",
    f"dp_shard=8 compile=true {ONE} optimizer.state_dtype=bfloat16",
    f"dp_shard=8 {MIXTURE} precision.float8=rowwise precision.float8_experts=true",
    f"dp_shard=8 compile=true {MIXTURE} precision.float8=rowwise precision.float8_experts=true",
    "dp_shard=8 compile=true loss_chunks=2 compile_loss=true microbatch_size=8 model.source=qwen3-8b "
    "train.global_batch_size=64",
    f"dp_shard=8 activation_offload=true {LARGER}",
    "dp_shard=8 compile=true activation_checkpoint=selective activation_offload=true compile_loss=true "
    f"microbatch_size=4 {LARGER}",
    f"dp_shard=8 cpu_offload=true activation_checkpoint=full loss_chunks=8 {ONE}",
    "dp_shard=8 cpu_offload=true activation_checkpoint=full model.options.num_layers=32 train.global_batch_size=8",
)
ALONE = f"cuda_graphs=true compile=true {ONE} train.global_batch_size=2"
"""On one device."""
SHORT = (
    "dp_shard=8 compile=true activation_checkpoint=full",
    "dp_shard=8 activation_checkpoint=selective train.seq_len=1024",
    "dp_shard=1 pp=4 tp=2 schedule=GPipe compile=true",
    "dp_shard=2 pp=2 tp=2 schedule=InterleavedZeroBubble virtual_stages=2 activation_checkpoint=selective",
    "dp_shard=4 cp=2 compile=true activation_checkpoint=full loss_chunks=8 model.source=llama3.2-1b "
    "model.options.num_layers=16 train.seq_len=8192 train.global_batch_size=8",
    f"dp_shard=8 compile=true compile_loss=true {LARGER}",
    f"dp_shard=8 compile=true activation_checkpoint=selective loss_chunks=8 {LARGER}",
)
"""Where the replay reserves 5 to 25 % more than the formula: gaps that it has no need to close."""


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.parametrize("layout", QUICK)
def test_the_formulas_reserve_what_the_replay_does(tmp_path: Path, layout: str) -> None:
    _compare(tmp_path, layout)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", LONG)
def test_other_layouts_reserve_what_the_replay_does(tmp_path: Path, layout: str) -> None:
    _compare(tmp_path, layout)


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_step_of_graphs_reserves_what_the_replay_does(tmp_path: Path) -> None:
    _compare(tmp_path, ALONE, num_ranks=1)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", SHORT)
def test_a_device_with_no_more_than_the_formula_says_has_enough(tmp_path: Path, layout: str) -> None:
    asked = _asked(tmp_path, layout)
    formulas = [footprint_of_rank(asked.configs, stage).needed_bytes[0] for stage in range(asked.layout.pp)]
    device = asked.cluster.device
    taken = device.memory_bytes.value - device.usable_memory_bytes
    memory = device.memory_bytes.replace(value=max(formulas) + taken)
    small = asked.cluster.replace(device=device.replace(memory_bytes=memory))
    # At the limit the allocator gives back pages that nothing is in.
    most = max(curve.reserved_bytes.max() for curve in simulate(asked.traces, small).memory)
    assert most <= max(formulas)


class _Asked(NamedTuple):
    """A layout of the job above: as formulas take it, and its traced step."""

    layout: Layout
    cluster: Cluster
    configs: Configurations
    traces: Traces


def _asked(folder: Path, layout: str, num_ranks: int = 8) -> _Asked:
    file = folder / "job.toml"
    file.write_text(JOB, encoding="utf-8")
    overrides = tuple(_override(word) for word in layout.split())
    loaded = load_job(file, overrides)
    job = loaded.job
    cluster = load_cluster("h100-ib400").with_num_devices(num_ranks)
    architecture = resolve_architecture(job.model)
    assert architecture is not None
    resolved = layout_of(job, num_ranks)
    table = layout_table([resolved])
    kernels = bool(table.compiles_blocks[0]), resolved.compile_loss, resolved.compile_optimizer, resolved.cuda_graphs
    stack = own_stack(load_stack("meshwright"), OwnChoices(*kernels))
    setup = TrainingSetup(model_spec(architecture), job.workload, cluster, stack)
    traces = trace_job(TRAINER_STEP, loaded, num_ranks, how=TraceOptions(use_cache=False))
    return _Asked(resolved, cluster, Configurations.of_one(setup, table), traces)


def _compare(folder: Path, layout: str, num_ranks: int = 8) -> None:
    """Compare the two for every pipeline rank, and what the fullest allocates."""
    asked = _asked(folder, layout, num_ranks)
    found, allocated = {}, []
    for curve in simulate(asked.traces, asked.cluster).memory:
        stage = curve.rank * asked.layout.pp // num_ranks
        formula = footprint_of_rank(asked.configs, stage)
        found[stage] = float(formula.reserved_bytes[0] / curve.reserved_bytes.max() - 1)
        allocated.append((float(curve.allocated_bytes.max()), float(formula.allocated_bytes[0])))
    assert len(found) == asked.layout.pp
    assert {stage: off for stage, off in found.items() if abs(off) > MOST_OFF} == {}
    fullest, predicted = max(allocated)
    assert predicted == pytest.approx(fullest, rel=MOST_ALLOCATED_OFF)


def _override(word: str) -> str:
    key, _, value = word.partition("=")
    return word if "." in key else f"layout.{key}={value}"
