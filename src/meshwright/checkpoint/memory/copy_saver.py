"""CopySaver: copies of the state in memory, in the foreground or in a writer process of each rank, one at a time."""

import queue
import time
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple

import torch

from meshwright.channels.channel import new_token
from meshwright.channels.key_value import KeyValueServer
from meshwright.checkpoint.background.saver import require_unchanged, versions_of
from meshwright.checkpoint.background.staging import StagingBuffer, num_bytes_of, stage
from meshwright.checkpoint.background.store_peers import serve_store
from meshwright.checkpoint.background.writer_process import WriterLink
from meshwright.checkpoint.checkpoint import save_request
from meshwright.checkpoint.format.boxes import Box
from meshwright.checkpoint.format.manifest import hash_bytes
from meshwright.checkpoint.memory.memory_folder import MemoryFolder
from meshwright.checkpoint.memory.nodes import Nodes
from meshwright.checkpoint.memory.write_copy import write_copy
from meshwright.checkpoint.peers import GroupPeers
from meshwright.checkpoint.saving import extents_of, with_bytes
from meshwright.checkpoint.shards import Shard, flatten, local_shards, owned_shards
from meshwright.errors import CheckpointError

_TIMEOUT_S = 3600.0


class SaverState(IntEnum):
    """Whether a rank can make a copy."""

    READY = 0
    BUSY = 1
    """It writes one."""
    ENDED = 2
    """Its writer process has ended, and there is no other."""


class CopyOutcome(NamedTuple):
    """How a copy ended on this rank."""

    step: int
    error: str | None
    """None for a committed one."""


class CopySaver:
    """The copies of one rank; construct and `copy` are collectives."""

    def __init__(self, memory: MemoryFolder, peers: GroupPeers, nodes: Nodes, owner_id: str) -> None:
        self._memory, self._peers, self._nodes = memory, peers, nodes
        # Two attempts of a run have different ids of their copies, also of the same step.
        self._token = peers.publish(f"{owner_id} {time.time_ns()}")
        self._number = 0
        self._boxes: dict[str, Box] | None = None
        """What this rank writes of each tensor that it holds, as of `_held`."""
        self._held: list[tuple[str, Box]] = []
        self._background: _Background | None = None

    def start_background(self, host: str, niceness: int) -> None:
        """Make all further copies in the background; `host` is how other hosts reach rank 0; a collective."""
        self._background = _Background(self._peers, self._nodes, host, niceness)

    @property
    def writer_pid(self) -> int | None:
        """Return the process id of the writer process; None in the foreground."""
        return None if self._background is None else self._background.writer_pid

    def num_bytes(self, state: Mapping[str, Any]) -> int:
        """Return the bytes that this rank writes of `state`; a collective."""
        return num_bytes_of(self._owned(local_shards(flatten(state))))

    def agreed_state(self) -> SaverState:
        """Return the state of the rank that is furthest from making a copy, once `ended` was called; a collective."""
        own = SaverState.READY if self._background is None else self._background.state
        return SaverState(self._peers.maximum(own))

    def copy(
        self, step: int, state: Mapping[str, Any], metadata: dict[str, Any], changing: Collection[str]
    ) -> CopyOutcome | None:
        """Make a copy of `state` after `step`, or start to and return None; all ranks must be ready; a collective.

        In the background tensors must not change before `wait_until_staged` has returned, but for `changing`.
        """
        shards = local_shards(flatten(state))
        request = save_request(self._memory.copy(step), state, metadata, shards)
        owned = self._owned(shards)
        save_id = hash_bytes(f"{self._token} {self._number}".encode())
        self._number += 1
        if self._background is None:
            try:
                write_copy(request, with_bytes(owned), self._peers, self._nodes, save_id)
            except CheckpointError as error:
                return CopyOutcome(step, str(error))
            return CopyOutcome(step, None)
        owned = [each._replace(data=each.data.clone()) if each.name in changing else each for each in owned]
        values = {
            "number": step,
            "save_id": save_id,
            "folder": str(request.folder.absolute()),
            "metadata": request.metadata,
            "sections": request.sections,
            "tensors": request.tensors,
        }
        self._background.start(values, owned)
        return None

    def wait_until_staged(self) -> None:
        """Return once the state of the newest copy may change."""
        if self._background is not None:
            self._background.wait_until_staged()

    def ended(self, *, waits: bool = False) -> CopyOutcome | None:
        """Return how the copy in flight ended; None while it has not, or `waits` for it."""
        return None if self._background is None else self._background.ended(waits=waits)

    def close(self) -> None:
        """End the writer process, after the copy in flight."""
        if self._background is not None:
            self._background.close()

    def _owned(self, shards: list[Shard]) -> list[Shard]:
        """Return what this rank writes; agreed on by all once, and again where any rank holds something else."""
        held = [(shard.name, shard.box) for shard in shards]
        if self._peers.maximum(int(self._boxes is None or held != self._held)):
            owned = owned_shards(shards, self._peers)
            self._boxes, self._held = {shard.name: shard.box for shard in owned}, held
            return owned
        assert self._boxes is not None
        return [_part(shard, self._boxes[shard.name]) for shard in shards if shard.name in self._boxes]


def _part(shard: Shard, box: Box) -> Shard:
    return shard if shard.box == box else shard._replace(box=box, data=shard.data[box.within(shard.box)])


class _Background:
    """The writer process of a rank and the memory through which it gets the state."""

    def __init__(self, peers: GroupPeers, nodes: Nodes, host: str, niceness: int) -> None:
        self._server: KeyValueServer | None = None
        token, address = None, None
        if peers.num_ranks > 1:
            place = None
            if peers.rank == 0:
                token = new_token()
                self._server = serve_store(host, token)
                place = [*self._server.address, token]
            served_at, port, token = peers.publish(place)
            address = [served_at, port]
        options = {
            "rank": peers.rank,
            "num_ranks": peers.num_ranks,
            "hosts": nodes.hosts,
            "store": address,
            "timeout_s": _TIMEOUT_S,
            "niceness": niceness,
        }
        self._writer = WriterLink(options, token, "meshwright.checkpoint.memory.copy_writer")
        uses_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
        self._gpu = torch.cuda.current_device() if uses_gpu else None
        on_gpu = None if self._gpu is None else partial(torch.cuda.set_device, self._gpu)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="memory-staging", initializer=on_gpu)
        self._buffer: StagingBuffer | None = None
        self._staged: Future[None] | None = None
        self._step: int | None = None
        self._has_ended = False

    @property
    def writer_pid(self) -> int:
        """Return the process id of the writer process."""
        return self._writer.pid

    @property
    def state(self) -> SaverState:
        """Return whether a copy can be started, one has been and its end not been taken by `ended`, or none can."""
        if self._has_ended:
            return SaverState.ENDED
        return SaverState.READY if self._step is None else SaverState.BUSY

    def start(self, values: dict[str, Any], owned: list[Shard]) -> None:
        ready = None
        if self._gpu is not None:
            ready = torch.cuda.Event()
            ready.record()
        self._step = values["number"]
        self._staged = self._thread.submit(self._stage, values, owned, versions_of(owned), ready)

    def wait_until_staged(self) -> None:
        if self._staged is not None:
            self._staged.result()

    def ended(self, *, waits: bool) -> CopyOutcome | None:
        if self._step is None:
            return None
        try:
            answer = self._writer.receive(None if waits else 0)
        except queue.Empty:
            return None
        step, self._step = self._step, None
        if answer is None:
            self._has_ended = True
            return CopyOutcome(step, self._writer.end_reason())
        return CopyOutcome(step, answer.error)

    def close(self) -> None:
        self.ended(waits=True)
        self._writer.close()
        self._thread.shutdown()
        if self._server is not None:
            self._server.close()
        if self._buffer is not None:
            self._buffer.close()

    def _stage(self, values: dict[str, Any], owned: list[Shard], versions: list[int | None], ready: Any) -> None:
        """Copy the shards and send them to the writer process; where that fails, send why, so that none waits."""
        try:
            num_bytes = num_bytes_of(owned)
            if self._buffer is None or self._buffer.num_bytes != num_bytes:
                self._buffer = StagingBuffer(num_bytes, is_pinned=self._gpu is not None)
            if ready is not None:
                ready.synchronize()
            stage(owned, self._buffer)
            require_unchanged(owned, versions)
        except Exception as error:
            reason = error.strerror if isinstance(error, OSError) else error
            self._writer.send({**values, "failure": f"staging failed ({reason})"})
            return
        self._writer.send({**values, "extents": extents_of(owned), "buffer": self._buffer.path})
