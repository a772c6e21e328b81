"""Collectives of this process in torch's flight recorder; its JSON dump and the list of groups are private.

Checked in 2.13: by default it records the collectives of gloo and NCCL, and no P2P ops of gloo. `retired` marks a
complete collective; on gloo its `state` stays "scheduled".
"""

import json
import os
from typing import Any, NamedTuple

from torch import distributed as dist
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d


class RecordedCollective(NamedTuple):
    """One collective as torch recorded it."""

    group: str
    sequence: int
    op: str
    sizes: list[list[int]]
    is_done: bool
    entered_ns: int
    """Time of the call, in nanoseconds since 1970."""


class RecordedGroup(NamedTuple):
    """One process group of this process."""

    name: str
    description: str
    ranks: list[int]


def keep_more_collectives() -> None:
    """Enlarge the recorder's buffer to a whole step of a deep model; call it before the process group exists.

    The default is 2,000 entries; one takes some hundred bytes.
    """
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "16384")


def recorded_collectives() -> list[RecordedCollective]:
    """Return the collectives in the recorder's buffer, oldest first; sends and receives are left out."""
    recorder: Any = _distributed_c10d
    record = json.loads(recorder._dump_fr_trace_json(includeCollectives=True, onlyActive=False))
    entries = sorted(record.get("entries", []), key=lambda entry: int(entry["record_id"]))
    return [_read(entry) for entry in entries if not entry["is_p2p"]]


def recorded_groups() -> list[RecordedGroup]:
    """Return the process groups of this process."""
    names = distributed_c10d._world.pg_names
    return [RecordedGroup(name, group.group_desc, dist.get_process_group_ranks(group)) for group, name in names.items()]


def _read(entry: dict[str, Any]) -> RecordedCollective:
    return RecordedCollective(
        group=entry["process_group"][0],
        sequence=int(entry["collective_seq_id"]),
        op=entry["profiling_name"].partition(":")[2],
        sizes=entry["input_sizes"],
        is_done=bool(entry["retired"]) or entry["state"] == "completed",
        entered_ns=int(entry["time_created_ns"]),
    )
