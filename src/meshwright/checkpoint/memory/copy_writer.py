"""The writer process of one rank's copies in memory: its own gloo group with those of all ranks."""

import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from torch import distributed as dist

from meshwright.channels.channel_store import ChannelStore
from meshwright.channels.key_value import KeyValueClient
from meshwright.channels.listening_sockets import closed_afterwards
from meshwright.checkpoint.background.helper_process import answer, requests_of_rank
from meshwright.checkpoint.background.staging import OpenedBuffer
from meshwright.checkpoint.background.writer_process import parsed_extents, save_request_of
from meshwright.checkpoint.memory.nodes import Nodes
from meshwright.checkpoint.memory.write_copy import write_copy
from meshwright.checkpoint.peers import GroupPeers
from meshwright.checkpoint.saving import Extent
from meshwright.errors import CheckpointError


def main(options: dict[str, Any]) -> None:
    """Write the copies that arrive on standard input, until it ends."""
    requests = requests_of_rank(options["niceness"])
    if options["store"] is not None:
        # Not among the options, which are on the command line.
        token = next(requests)["token"]
        host, port = options["store"]
        store = ChannelStore(KeyValueClient((host, port), token, options["timeout_s"]))
        with closed_afterwards():
            dist.init_process_group(
                "gloo",
                store=store,
                rank=options["rank"],
                world_size=options["num_ranks"],
                timeout=timedelta(seconds=options["timeout_s"]),
            )
    peers, nodes = GroupPeers(), Nodes(tuple(options["hosts"]))
    for request in requests:
        started_s = time.perf_counter()
        error, is_lost = None, False
        try:
            _write(request, peers, nodes)
        except CheckpointError as explained:
            error = str(explained)
        except Exception as unknown:
            # Most often another rank's process has ended. With this one all of them end, so that none waits.
            error, is_lost = f"{type(unknown).__name__}: {unknown}", True
        answer({"number": request["number"], "error": error, "duration_s": time.perf_counter() - started_s})
        if is_lost:
            return


def _write(request: dict[str, Any], peers: GroupPeers, nodes: Nodes) -> None:
    save, save_id = save_request_of(request), request["save_id"]
    if "failure" in request:
        # All ranks need this one's answer to end the copy.
        write_copy(save, _Unstaged(request["failure"]), peers, nodes, save_id)
        return
    with OpenedBuffer(request["buffer"]) as buffer:
        write_copy(save, buffer.extents(parsed_extents(request)), peers, nodes, save_id)


class _Unstaged:
    """What a rank writes that could not stage its part: asked for it, it raises CheckpointError."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def __iter__(self) -> Iterator[tuple[Extent, memoryview]]:
        raise CheckpointError(self._reason)
