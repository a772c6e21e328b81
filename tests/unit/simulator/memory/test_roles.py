"""What storages are for, told by what reads and writes them."""

from __future__ import annotations

import numpy as np

from meshwright.simulator.memory.memory_curve import memory_of, roles_of, uncached_totals
from meshwright.spec.trace.timeline import TensorRole
from meshwright.spec.trace.trace import RecordKind
from written_steps import WrittenStep


def sharded_step() -> tuple[WrittenStep, dict[str, int]]:
    """Return a step of one matmul whose weight is sharded as FSDP2 does it, and its storages by name."""
    step, found = WrittenStep(), {}
    found["shard"], found["moment"], found["unused"] = step.there(8), step.there(16), step.there(2)
    step.scope = "FSDP::all_gather"
    found["buffer"] = step.make(16, reads=(found["shard"],), op="fsdp.all_gather_copy_in.default")
    step.op(reads=(found["buffer"],), writes=(found["buffer"],), kind=int(RecordKind.COLLECTIVE), group=0)
    step.scope = "FSDP::all_gather_copy_out"
    found["weight"] = step.make(16, reads=(found["buffer"],), op="fsdp.split_with_sizes_copy.default")
    step.scope = "block"
    found["input"] = step.make(64)
    found["scratch"] = step.make(32, reads=(found["input"],))
    found["output"] = step.make(64, reads=(found["input"], found["weight"], found["scratch"]))
    step.free(found["scratch"], found["buffer"])
    step.phase = "backward"
    found["output gradient"] = step.make(64, reads=(found["output"],))
    step.free(found["output"])
    found["whole gradient"] = step.make(16, reads=(found["input"], found["output gradient"]))
    step.free(found["input"], found["weight"], found["output gradient"])
    step.scope = "FSDP::post_backward_reduce"
    found["to reduce"] = step.make(16, reads=(found["whole gradient"],), op="fsdp.chunk_cat.default")
    step.free(found["whole gradient"])
    found["gradient"] = step.make(8)
    step.op(reads=(found["to reduce"],), writes=(found["gradient"],), kind=int(RecordKind.COLLECTIVE), group=0)
    step.free(found["to reduce"])
    step.phase, step.scope = "optimizer", "Optimizer.step#AdamW.step"
    storages = (found["shard"], found["moment"])
    step.op(reads=(*storages, found["gradient"]), writes=storages, op="aten._fused_adamw_.default")
    step.free(found["gradient"])
    step.op()
    return step, found


def test_each_storage_of_a_sharded_step_is_for_something() -> None:
    step, found = sharded_step()
    roles = roles_of(step.trace())
    assert {name: TensorRole(roles[storage]).name for name, storage in found.items()} == {
        "shard": "PARAMETER",
        "moment": "OPTIMIZER_STATE",
        "unused": "OTHER",
        "buffer": "UNSHARDED_PARAMETER",
        "weight": "UNSHARDED_PARAMETER",
        "input": "ACTIVATION",
        "scratch": "TEMPORARY",
        "output": "ACTIVATION",
        "output gradient": "TEMPORARY",
        "whole gradient": "GRADIENT",
        "to reduce": "COMMUNICATION",
        "gradient": "GRADIENT",
    }


def test_a_bucket_that_is_made_in_forward_and_reduced_in_backward_holds_gradients() -> None:
    step = WrittenStep()
    bucket, kept = step.make(16), step.make(8)
    step.phase = "backward"
    step.op(reads=(kept,), writes=(bucket,), op="aten.copy_.default")
    step.op(reads=(bucket,), writes=(bucket,), kind=int(RecordKind.COLLECTIVE), group=0)
    roles = roles_of(step.trace())
    assert [TensorRole(roles[one]).name for one in (bucket, kept)] == ["GRADIENT", "ACTIVATION"]


def test_the_bytes_of_all_roles_are_those_of_the_trace() -> None:
    trace = sharded_step()[0].trace()
    by_role = memory_of(trace, np.zeros(len(trace.records)), uncached_totals(trace)).by_role
    assert by_role.sum(axis=1).max() == trace.live_bytes().max()
    assert {TensorRole(role).name: size for role, size in enumerate(by_role[-1]) if size} == {
        "PARAMETER": 8,
        "OPTIMIZER_STATE": 16,
        "OTHER": 2,
    }


def test_gradients_that_were_there_are_added_to() -> None:
    step = WrittenStep()
    weight, gradient = step.there(8), step.there(8)
    step.op(reads=(weight,))
    step.phase = "backward"
    step.op(reads=(weight,), writes=(gradient,))
    assert roles_of(step.trace()).tolist() == [TensorRole.PARAMETER, TensorRole.GRADIENT]


def test_what_a_split_backward_keeps_for_its_second_part_is_an_activation() -> None:
    step = WrittenStep()
    step.phase, step.action = "backward", "0I0"
    kept, gone = step.make(8), step.make(8)
    step.op(reads=(kept, gone))
    step.action = "0W0"
    step.op(reads=(kept,))
    step.free(kept, gone)
    step.op()
    assert roles_of(step.trace()).tolist() == [TensorRole.ACTIVATION, TensorRole.TEMPORARY]


def test_what_is_made_again_in_backward_and_kept_there_is_an_activation() -> None:
    step = WrittenStep()
    step.phase = "recompute"
    again, scratch = step.make(8), step.make(8)
    step.free(scratch)
    step.phase = "backward"
    step.op(reads=(again,))
    step.free(again)
    step.op()
    assert roles_of(step.trace()).tolist() == [TensorRole.ACTIVATION, TensorRole.TEMPORARY]


def test_nothing_has_no_roles() -> None:
    assert roles_of(WrittenStep().trace()).shape == (0,)
