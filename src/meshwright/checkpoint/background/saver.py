"""BackgroundSaver: saves that let training go on; the optimizer step waits only until the state is staged.

    saver.save(...)            returns at once: a thread copies the shards into shared memory
    forward, backward          read parameters, change none
    saver.wait_until_staged()  before the optimizer step, so that no snapshot mixes two steps
    saver.finished()           at each step: which saves are committed and which failed

Up to two saves are in flight: one is staged while the writer process writes the other.
"""

import queue
import time
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from meshwright.channels.channel import new_token
from meshwright.channels.key_value import KeyValueClient, KeyValueServer
from meshwright.checkpoint.background.staging import StagingBuffer, no_staging, num_bytes_of, stage
from meshwright.checkpoint.background.store_peers import report_failure, serve_store
from meshwright.checkpoint.background.writer_process import Answer, WriterLink
from meshwright.checkpoint.format.find_checkpoint import FILE_NAME
from meshwright.checkpoint.peers import GroupPeers, ProcessGroup
from meshwright.checkpoint.saving import SaveRequest, extents_of
from meshwright.checkpoint.shards import Shard, flatten, local_shards, owned_shards
from meshwright.errors import CheckpointError
from meshwright.units import first_of

_MAX_IN_FLIGHT = 2
_TIMEOUT_S = 3600.0
"""How long a writer process waits for those of other ranks; a lost rank ends the training, and them, much sooner."""


class WriterOptions(NamedTuple):
    """How the writer processes treat the machine."""

    niceness: int = 10
    """Added to the niceness of the writer process, so that it yields the CPU to training."""
    bytes_per_s: float | None = None
    """Most bytes that one rank writes in a second; None for no limit."""


class Finished(NamedTuple):
    """A save that has ended."""

    folder: Path
    error: str | None
    """None for a committed checkpoint."""
    duration_s: float
    """From the call of `save` to the answer of the writer process."""


@dataclass
class _InFlight:
    number: int
    folder: Path
    started_s: float
    staged: Future[StagingBuffer | None]
    """Done once the shards are copied; their memory, or None where there was none."""


class BackgroundSaver:
    """The asynchronous saves of one rank; construct, `save` and `drain` are collectives, the rest is not."""

    def __init__(self, host: str, options: WriterOptions | None = None, group: ProcessGroup = None) -> None:
        """`host` is the name by which other hosts reach rank 0, such as MASTER_ADDR."""
        self._peers = GroupPeers(group)
        self._server: KeyValueServer | None = None
        self._token: str | None = None
        self._store, address = self._join_store(host)
        self._options = {
            "rank": self._peers.rank,
            "num_ranks": self._peers.num_ranks,
            "store": address,
            "timeout_s": _TIMEOUT_S,
            **(options or WriterOptions())._asdict(),
        }
        self._writer = WriterLink(self._options, self._token)
        # A new thread would be on the first GPU, and take memory of it.
        uses_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
        self._gpu = torch.cuda.current_device() if uses_gpu else None
        on_gpu = None if self._gpu is None else partial(torch.cuda.set_device, self._gpu)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-staging", initializer=on_gpu)
        self._in_flight: list[_InFlight] = []
        self._free: list[StagingBuffer] = []
        self._ended: list[Finished] = []
        self._num_saves = 0

    @property
    def writer_pid(self) -> int:
        """Return the process id of the writer process."""
        return self._writer.pid

    @property
    def num_in_flight(self) -> int:
        """Return the saves that have begun and not been committed."""
        return len(self._in_flight)

    def why_synchronous(self, state: Mapping[str, Any]) -> str | None:
        """Return why `state` cannot be staged on some rank, or None; a collective."""
        num_bytes = _MAX_IN_FLIGHT * num_bytes_of(owned_shards(local_shards(flatten(state)), self._peers))
        reasons = [reason for reason in self._peers.gather(no_staging(num_bytes)) if reason is not None]
        return reasons[0] if reasons else None

    def prepare(self, state: Mapping[str, Any]) -> None:
        """Allocate the memory of a first save in the background, so that the save need not wait for it."""
        num_bytes = num_bytes_of(owned_shards(local_shards(flatten(state)), self._peers))
        self._thread.submit(self._allocate, num_bytes)

    def save(
        self, folder: Path, state: Mapping[str, Any], metadata: dict[str, Any], changing: Collection[str] = ()
    ) -> None:
        """Start a save of `state`, as checkpoint.save does it, and return; a collective.

        Tensors must not change before `wait_until_staged` has returned, but for those whose names (section/fqn) are in
        `changing`: these are copied before this returns. Waits for an earlier save where two are in flight.
        """
        while len(self._in_flight) >= _MAX_IN_FLIGHT:
            self._receive(None)
        started_s = time.perf_counter()
        shards = local_shards(flatten(state))
        owned = [_now(shard) if shard.name in changing else shard for shard in owned_shards(shards, self._peers)]
        ready = None
        if self._gpu is not None:
            ready = torch.cuda.Event()
            ready.record()
        tensors = {shard.name: (shard.dtype, shard.shape) for shard in shards}
        request = SaveRequest(folder, metadata, sorted(state), tensors)
        staged = self._thread.submit(self._stage, self._num_saves, request, owned, versions_of(owned), ready)
        self._in_flight.append(_InFlight(self._num_saves, folder, started_s, staged))
        self._num_saves += 1

    def wait_until_staged(self) -> None:
        """Return once the state of the newest save is copied."""
        if self._in_flight:
            self._in_flight[-1].staged.result()

    def finished(self) -> list[Finished]:
        """Return the saves that ended since the last call, without waiting."""
        try:
            while self._in_flight:
                self._receive(0)
        except queue.Empty:
            pass
        ended, self._ended = self._ended, []
        return ended

    def drain(self) -> list[Finished]:
        """Wait for all saves in flight and return those that ended since the last call."""
        while self._in_flight:
            self._receive(None)
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """End the writer process, after the saves in flight."""
        self._ended += self.drain()
        self._writer.close()
        self._thread.shutdown()
        if self._store is not None:
            self._store.close()
        if self._server is not None:
            self._server.close()
        for buffer in self._free:
            buffer.close()
        self._free = []

    def _join_store(self, host: str) -> tuple[KeyValueClient | None, list[Any] | None]:
        """Return the store of the writer processes, which rank 0 serves, and its address; none for one rank."""
        if self._peers.num_ranks == 1:
            return None, None
        place = None
        if self._peers.rank == 0:
            token = new_token()
            self._server = serve_store(host, token)
            place = [*self._server.address, token]
        host, port, self._token = self._peers.publish(place)
        return KeyValueClient((host, port), self._token or "", _TIMEOUT_S), [host, port]

    def _stage(
        self, number: int, request: SaveRequest, owned: list[Shard], versions: list[int | None], ready: Any
    ) -> StagingBuffer | None:
        """Copy the shards and send the save to the writer process; a failure ends the save on all ranks."""
        try:
            buffer = self._buffer(num_bytes_of(owned))
            if ready is not None:
                ready.synchronize()
            stage(owned, buffer)
            require_unchanged(owned, versions)
        except Exception as error:
            # Whatever it was: without an answer all ranks would wait for this save.
            reason = error.strerror if isinstance(error, OSError) else error
            self._writer.put(Answer(number, self._report(number, f"staging failed ({reason})"), 0.0))
            return None
        self._writer.send(
            {
                "number": number,
                "folder": str(request.folder.absolute()),
                "metadata": request.metadata,
                "sections": request.sections,
                "tensors": request.tensors,
                "extents": extents_of(owned),
                "buffer": buffer.path,
            }
        )
        return buffer

    def _buffer(self, num_bytes: int) -> StagingBuffer:
        for buffer in self._free:
            if buffer.num_bytes == num_bytes:
                self._free.remove(buffer)
                return buffer
        return StagingBuffer(num_bytes, is_pinned=self._gpu is not None)

    def _allocate(self, num_bytes: int) -> None:
        # A shortage is one of the save that needs the memory, which reports it.
        with suppress(OSError):
            self._free.append(StagingBuffer(num_bytes, is_pinned=self._gpu is not None))

    def _report(self, number: int, what: str) -> str:
        """Let the save fail on the writer processes of all ranks; return the message."""
        reason = f"saving failed on rank {self._peers.rank}: {what}"
        if self._store is not None:
            report_failure(self._store, f"save-{number}", self._peers.rank, reason)
        return reason

    def _receive(self, timeout_s: float | None) -> None:
        """Take the next answer of the writer process; a process that died fails the saves in flight."""
        answer = self._writer.receive(timeout_s)
        if answer is None:
            self._replace_writer()
            return
        ended = next(each for each in self._in_flight if each.number == answer.number)
        self._end(ended, answer.error)

    def _replace_writer(self) -> None:
        what = self._writer.end_reason()
        for each in list(self._in_flight):
            each.staged.result()
            reason = self._report(each.number, what)
            self._end(each, None if (each.folder / FILE_NAME).is_file() else reason)
        self._writer = WriterLink(self._options, self._token)

    def _end(self, ended: _InFlight, error: str | None) -> None:
        self._in_flight.remove(ended)
        if (buffer := ended.staged.result()) is not None:
            self._free.append(buffer)
        self._ended.append(Finished(ended.folder, error, time.perf_counter() - ended.started_s))


def _now(shard: Shard) -> Shard:
    return shard._replace(data=shard.data.detach().clone())


def versions_of(shards: list[Shard]) -> list[int | None]:
    """Return, by shard, what torch counts up when a tensor changes in place; None where it does not count."""
    return [None if shard.data.is_inference() else shard.data._version for shard in shards]


def require_unchanged(shards: list[Shard], versions: list[int | None]) -> None:
    """Raise CheckpointError if a tensor has changed since `versions_of` returned `versions`."""
    changed = [shard.name for shard, old, new in zip(shards, versions, versions_of(shards), strict=True) if old != new]
    if changed:
        raise CheckpointError(
            f"{first_of(changed)} changed while being copied: call wait_until_staged() before tensors change"
        )
