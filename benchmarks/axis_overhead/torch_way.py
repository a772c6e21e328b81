"""torch's own way, for the axes where it has one that trains on a CPU, applied to the same modules."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from benchmarks.axis_overhead.workload import Step, Workload
from meshwright.data.loader import Microbatch
from meshwright.models.contract import blocks_of, next_token_loss
from meshwright.parallelism.pipeline.stages import split
from meshwright.spec.layout.schedule.schedule import build_schedule

Backward = Callable[[Sequence[Microbatch]], Tensor]
"""Leaves the gradients of the mean loss, and returns this rank's loss."""


def fully_sharded(work: Workload) -> Step:
    """Return the step of dp_shard: FSDP2."""
    model, mesh = work.whole_model(), init_device_mesh("cpu", (dist.get_world_size(),))
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    return _step(work, model, _whole_backward(model))


def replicated(work: Workload) -> Step:
    """Return the step of dp_replicate: DistributedDataParallel."""
    model = nn.parallel.DistributedDataParallel(work.whole_model())
    return _step(work, model, _whole_backward(model))


def tensor_parallel(work: Workload) -> Step:
    """Return the step of tp: parallelize_module with sequence and loss parallelism."""
    model, mesh = work.whole_model(), init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, _plan(len(blocks_of(model))))
    plain = _whole_backward(model)

    def backward(microbatches: Sequence[Microbatch]) -> Tensor:
        with loss_parallel():
            return plain(microbatches)

    return _step(work, model, backward)


def pipelined(work: Workload) -> Step:
    """Return the step of pp: PipelineStage and Schedule1F1B, on the stages that Meshwright has cut."""
    num_microbatches, rank = work.job.num_microbatches(work.layout), dist.get_rank()
    schedule = build_schedule(work.layout, num_microbatches)
    model = split(work.whole_model(), work.layout, schedule, rank)[rank]
    stage = PipelineStage(model, rank, dist.get_world_size(), torch.device("cpu"))
    run = Schedule1F1B(stage, num_microbatches, loss_fn=next_token_loss)

    def backward(microbatches: Sequence[Microbatch]) -> Tensor:
        if rank == 0:
            run.step(torch.cat([one.inputs for one in microbatches]))
            return torch.zeros(())
        losses: list[Tensor] = []
        run.step(target=torch.cat([one.targets for one in microbatches]), losses=losses)
        return torch.stack(losses).mean().detach()

    return _step(work, model, backward)


def _whole_backward(model: nn.Module) -> Backward:
    def backward(microbatches: Sequence[Microbatch]) -> Tensor:
        (microbatch,) = microbatches
        loss = next_token_loss(model(microbatch.inputs), microbatch.targets)
        loss.backward()
        return loss.detach()

    return backward


def _step(work: Workload, model: nn.Module, backward: Backward) -> Step:
    """Return `backward`, clipping and AdamW, all with torch's own functions."""
    section, is_pipeline = work.job.optimizer, work.layout.pp > 1
    optimizer = torch.optim.AdamW(
        model.parameters(), section.learning_rate, section.betas, section.eps, section.weight_decay, fused=True
    )

    def step(microbatches: Sequence[Microbatch]) -> float:
        loss = backward(microbatches)
        if is_pipeline:
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).square()
            dist.all_reduce(norm)
            nn.utils.clip_grads_with_norm_(model.parameters(), section.max_grad_norm, norm.sqrt())
        else:
            norm = nn.utils.clip_grad_norm_(model.parameters(), section.max_grad_norm)
        total = (loss.full_tensor() if hasattr(loss, "full_tensor") else loss) / (1 if is_pipeline else 2)
        dist.all_reduce(total)
        assert math.isfinite(norm.item())
        optimizer.step()
        optimizer.zero_grad()
        return total.item()

    return step


def _plan(num_layers: int) -> dict[str, ParallelStyle]:
    attention = PrepareModuleInput(
        input_layouts=(Shard(1), None, None, None, None), desired_input_layouts=(Replicate(), None, None, None, None)
    )
    of_block: dict[str, ParallelStyle] = {
        "attention_norm": SequenceParallel(),
        "attention": attention,
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.output": RowwiseParallel(output_layouts=Shard(1)),
        "ffn_norm": SequenceParallel(),
        "ffn": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "ffn.gate": ColwiseParallel(),
        "ffn.up": ColwiseParallel(),
        "ffn.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    return {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        **{f"blocks.{number}.{name}": style for number in range(num_layers) for name, style in of_block.items()},
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
