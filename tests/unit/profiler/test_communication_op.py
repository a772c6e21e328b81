"""Whose axis a collective is, and when it began for all."""

from dataclasses import replace

import pytest

from meshwright.profiler.chrome_trace import StepLocation
from meshwright.profiler.communication_op import CommunicationOp, align_starts, axis_of

OF_TP = {"mesh_pp": (0,), "mesh_cp": (0,), "mesh_ep": (0,), "default_pg": (0, 1)}
OF_ALL = {"mesh_pp": (0, 4), "mesh_cp": (0,), "mesh_ep": (0,), "mesh_tp": (0, 1)}


@pytest.mark.parametrize(
    ("name", "description", "fsdp_mark", "groups", "axis"),
    [
        ("c10d.allreduce_", "mesh_tp", None, OF_ALL, "tp"),
        ("c10d.allreduce_", None, None, OF_ALL, ""),
        ("_c10d_functional.all_reduce", "default_pg", None, OF_TP, "tp"),
        ("_c10d_functional.all_reduce", None, None, OF_ALL, "tp"),
        ("c10d._allgather_base_", None, "FSDP::all_gather (blocks.1)", OF_TP, "fsdp"),
        ("c10d._allgather_base_", None, "FSDP::all_gather (blocks.1.experts)", OF_TP, "expert_dp_shard"),
        ("c10d.allreduce_", None, "FSDP::post_backward_reduce (blocks.1)", OF_TP, "dp_replicate"),
        ("c10d.send", None, None, OF_TP, "pp"),
    ],
)
def test_the_axis_follows_from_what_is_known(
    name: str, description: str | None, fsdp_mark: str | None, groups: dict[str, tuple[int, ...]], axis: str
) -> None:
    assert axis_of(name, description, fsdp_mark, groups) == axis


def part_of(rank: int, start_ns: int, end_ns: int, source: int = -1, target: int = -1) -> CommunicationOp:
    return CommunicationOp(
        rank=rank,
        name="c10d.x",
        axis="tp",
        group=(0, 1),
        num_bytes=4,
        place=StepLocation("forward", "", ""),
        issued_ns=start_ns,
        start_ns=start_ns,
        end_ns=end_ns,
        stream=1,
        source=source,
        target=target,
    )


def test_a_collective_begins_with_the_last_rank() -> None:
    parts = [part_of(0, 10, 50), part_of(1, 40, 52), part_of(0, 60, 70), part_of(1, 61, 71)]
    align_starts(parts)
    assert [part.began_ns for part in parts] == [40, 40, 61, 61]


def test_a_message_ends_when_it_is_received() -> None:
    sent, received = part_of(0, 10, 900, source=0, target=1), part_of(1, 30, 45, source=0, target=1)
    align_starts([sent, received])
    assert (sent.began_ns, sent.end_ns, received.began_ns) == (30, 45, 30)


def test_a_rank_alone_waits_for_no_other() -> None:
    alone = replace(part_of(0, 10, 50), group=(0,), issued_ns=4)
    align_starts([alone])
    assert alone.began_ns == 4


def test_what_only_one_rank_tells_begins_when_it_says() -> None:
    alone = part_of(0, 10, 50)
    align_starts([alone])
    assert alone.began_ns == 10
