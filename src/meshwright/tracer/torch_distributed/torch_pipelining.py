"""torch.distributed.pipelining under the tracer: objects and messages between stages, and the vote on their shapes.

Stages infer the shapes that they receive from objects that their neighbours send, unless the program passes examples of
inputs and outputs. They vote on this by numbers on the device, which fake tensors do not have: here all stages are
assumed equal, and the rank's own decide. Checked in torch 2.13 and 2.15; before 2.12 there is no vote.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.pipelining import schedules

from meshwright.tracer.numbers.number_exchange import ObjectExchange
from meshwright.tracer.record.scopes import Scopes
from meshwright.tracer.torch_patches.torch_names import replace, with_values


class StageMessages:
    """Whether a schedule exchanges messages between stages, often in the default group, without a name."""

    is_under_way = False


def vote_by_own_stages() -> None:
    """Make schedules decide by the stages of this rank, from now on."""
    replace(schedules._PipelineSchedule, "_warmup_p2p", _decided)
    # Since 2.15; it rejects fake groups.
    replace(schedules._PipelineSchedule, "_initialize_pipeline_distributed_state", _initialized)


def mark_stage_messages() -> None:
    """Mark the messages of schedules from now on."""
    replace(schedules, "_batch_p2p", with_values(StageMessages, is_under_way=True))


def follow_schedules(scopes: Scopes) -> None:
    """Mark the runs of schedules from now on."""
    runs = with_values(scopes, is_in_schedule=True)
    replace((schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti), "step", runs)


def _decided(warm_up: Callable[..., None]) -> Callable[..., None]:
    def warmed_up(self: Any, stages: list[Any], has_backward: bool, p2p_done: bool) -> None:
        if not _decide(stages, has_backward):
            warm_up(self, stages, has_backward, p2p_done)

    return warmed_up


def _initialized(initialize: Callable[..., None]) -> Callable[..., None]:
    def initialized(self: Any, stages: list[Any], has_backward: bool, initialize_p2p: bool) -> None:
        if not _decide(stages, has_backward):
            initialize(self, stages, has_backward, initialize_p2p)
            return
        for stage in stages if initialize_p2p else ():
            if stage.p2p_per_edge:
                where = (stage._parent_group, stage.stage_index_to_group_rank, torch.device(stage.device))
                stage._p2p_edge_groups, _ = schedules._build_p2p_edge_groups(*where)  # type: ignore[attr-defined]

    return initialized


def _decide(stages: list[Any], has_backward: bool) -> bool:
    """Make all stages infer their shapes if any has to; return False for stages that torch traced itself."""
    if not all(isinstance(stage, schedules.PipelineStage) for stage in stages):
        return False
    mode = schedules.InferenceMode
    is_dynamic = any(mode.needs_dynamic(stage._user_meta, has_backward) for stage in stages)
    for stage in stages:
        stage._inference_mode = mode.DYNAMIC if is_dynamic else mode.STATIC
    return True


def send_objects_by(exchange: ObjectExchange) -> None:
    """Route torch's messages of Python objects through `exchange`, permanently."""

    def send(objects: list[Any], dst: int | None = None, group: Any = None, *_: Any, **more: Any) -> None:
        exchange.send(objects, _global_rank(dst, group, more.get("group_dst")))

    def receive(objects: list[Any], src: int | None = None, group: Any = None, *_: Any, **more: Any) -> int:
        sender = _global_rank(src, group, more.get("group_src"))
        objects[:] = exchange.receive(sender)
        return sender

    replace((dist, distributed_c10d), "send_object_list", lambda _: send)
    replace((dist, distributed_c10d), "recv_object_list", lambda _: receive)


def _global_rank(rank: int | None, group: Any, group_rank: int | None) -> int:
    if rank is not None:
        return rank
    assert group_rank is not None, "torch requires one of them"
    return dist.get_global_rank(group or distributed_c10d._get_default_group(), group_rank)
