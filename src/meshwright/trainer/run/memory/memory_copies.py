"""MemoryCopies: the copies of a run in memory while it trains; made when due, read at a restart, removed at its end."""

from __future__ import annotations

import os
import shutil
import socket
from typing import Any

from meshwright.checkpoint.background.staging import available_memory
from meshwright.checkpoint.memory.copy_saver import CopyOutcome, CopySaver, SaverState
from meshwright.checkpoint.memory.find_copy import find_copy
from meshwright.checkpoint.memory.memory_folder import MemoryFolder, MemoryOwner, memory_folder, new_owner, owner_of
from meshwright.checkpoint.memory.nodes import Nodes
from meshwright.checkpoint.peers import GroupPeers
from meshwright.log import logger
from meshwright.spec.run.run import Run
from meshwright.trainer.step.training import Training
from meshwright.units import counted, format_bytes

BACKGROUND_BYTES = 64 << 20
"""State of a rank from which copies are made in the background; less takes milliseconds, and no process more."""
_COPIES = 2
"""Of each file on a node while one is made: the one before is kept until all nodes have the new one."""


class MemoryCopies:
    """The copies of one rank of a run whose checkpoint.memory_interval is not 0; most methods are collectives."""

    def __init__(self, training: Training, run: Run, *, resume: bool) -> None:
        self._training, self._section = training, training.job.checkpoint
        self._peers = GroupPeers()
        owner = (owner_of(run) if resume else None) or new_owner(run) if self._peers.rank == 0 else None
        owner = MemoryOwner.from_dict(self._peers.publish(None if owner is None else owner.to_dict()))
        self._owner = owner
        self._nodes = Nodes(tuple(self._peers.gather(socket.gethostname())))
        self._is_leader = self._nodes.is_leader(self._peers.rank)
        self._memory = memory_folder(self._section.memory_dir, owner.id)
        self._saver: CopySaver | None = None
        self._last_problem: str | None = None
        self._num_left_out = 0
        self.restored_step: int | None = None
        """The step of the copy that this attempt began with, if it did."""
        self._is_off = not self._all_open()

    def _all_open(self) -> bool:
        """Make the folder on every node; return whether all could, each its own."""
        problem = identity = None
        if self._is_leader:
            try:
                self._memory.open(self._owner)
                identity = self._memory.identity
            except OSError as error:
                problem = f"{self._memory.folder} cannot be made on {socket.gethostname()} ({error.strerror})"
        found = self._peers.gather((problem, identity))
        problems = [each for each, _ in found if each is not None]
        folders = [each for _, each in found if each is not None]
        if len(set(folders)) < len(folders):
            problems.append(f"several nodes share {self._memory.folder.parent}: put {{host}} into its name")
        if problems:
            logger.warning("no copies in memory: %s: set checkpoint.memory_dir to a folder in memory", problems[0])
        return not problems

    def restore(self, run: Run) -> int:
        """Load the newest of the checkpoints on disk and the copy in memory; return its step, 0 without; a collective.

        Other copies are removed: their steps will be done again, or are done.
        """
        found = None if self._is_off else find_copy(self._memory, self._peers, self._nodes)
        step = self._training.load_newest(run, found)
        if found is not None and found.step == step:
            self.restored_step = step
            logger.info("the state after step %d was read from memory", step)
        if self._is_leader and not self._is_off:
            self._memory.remove_copies(but=step)
        # None may write a new copy before all have removed what is old.
        self._peers.gather(None)
        return step

    def after_step(self, step: int) -> None:
        """Make a copy where one is due after `step`, or start to; a collective."""
        interval, guard = self._section.memory_interval, self._training.step.guard
        is_due = step % interval == 0 and step != self._training.job.train.last_step
        if self._is_off or not is_due or (guard is not None and guard.is_skipping):
            return
        state = self._training.state()
        if self._saver is None and not self._prepare(state):
            self._is_off = True
            return
        assert self._saver is not None
        self._take(self._saver.ended())
        state_of_all = self._saver.agreed_state()
        if state_of_all != SaverState.READY:
            self._is_off = state_of_all == SaverState.ENDED
            self._num_left_out += 1
            return
        metadata, changing = self._training.metadata(step), self._training.changing_names()
        self._take(self._saver.copy(step, state, metadata, changing))

    def _prepare(self, state: dict[str, Any]) -> bool:
        """Make ready for the first copy and return whether there is memory for it."""
        saver = CopySaver(self._memory, self._peers, self._nodes, self._owner.id)
        sizes = self._peers.gather(saver.num_bytes(state))
        node = self._nodes.node_of(self._peers.rank)
        is_background = max(sizes) >= BACKGROUND_BYTES
        kept = _COPIES * self._nodes.kept_on(node, sizes)
        staged = sum(sizes[rank] for rank in self._nodes.ranks_of(node)) if is_background else 0
        problem = _shortage(self._memory, kept, staged) if self._is_leader else None
        problems = [each for each in self._peers.gather(problem) if each is not None]
        if problems:
            logger.warning("no copies in memory, checkpoints on disk only: %s", problems[0])
            return False
        if is_background:
            saver.start_background(os.environ.get("MASTER_ADDR", "localhost"), self._section.niceness)
        self._saver = saver
        if self._peers.rank == 0:
            logger.info("%s", self._announcement(kept + staged))
        return True

    def _announcement(self, num_bytes: int) -> str:
        every = counted(self._section.memory_interval, "step")
        text = f"a copy of the state in memory every {every}: {format_bytes(num_bytes)} on each node"
        if len(self._nodes.names) == 1:
            return f"{text}; there is one node, so it survives ranks, and not the machine"
        return f"{text}, its own and that of the node before it"

    def _take(self, outcome: CopyOutcome | None) -> None:
        if outcome is None:
            return
        if outcome.error is None:
            self._last_problem = None
            return
        if self._last_problem is None:
            logger.warning(
                "the copy of step %d in memory failed, training continues, as do checkpoints on disk: %s",
                *(outcome.step, outcome.error),
            )
        self._last_problem = outcome.error

    def wait_until_staged(self) -> None:
        """Return once the state may change; no collective."""
        if self._saver is not None:
            self._saver.wait_until_staged()

    def forget(self) -> None:
        """Remove all copies, such as those newer than the checkpoint that a rollback returned to; a collective."""
        if self._saver is not None:
            self._take(self._saver.ended(waits=True))
        self._peers.gather(None)
        if self._is_leader:
            self._memory.remove_copies()
        self._peers.gather(None)

    def close(self, *, is_saved: bool) -> None:
        """End the writer process; where the newest state `is_saved` on disk, remove the copies; a collective."""
        if self._saver is not None:
            self._saver.close()
            if self._num_left_out and self._peers.rank == 0:
                which = counted(self._num_left_out, "copy", "copies")
                logger.info("%s in memory left out, while the one before was written", which)
        self._peers.gather(None)
        if self._is_leader:
            if is_saved:
                self._memory.remove()
            else:
                self._memory.release()


def _shortage(memory: MemoryFolder, kept: int, staged: int) -> str | None:
    """Return why a node lacks memory for so many bytes in the folder and outside of it; None where it has them."""
    free = shutil.disk_usage(memory.folder).free + memory.num_bytes
    where = f"{socket.gethostname()} needs {format_bytes(kept)} in {memory.folder.parent}"
    if kept > free:
        return f"{where}, which has {format_bytes(free)}: enlarge that file system, or set checkpoint.memory_dir"
    available = available_memory() + memory.num_bytes
    if kept + staged > 0.8 * available:
        return f"{where}, and {format_bytes(staged)} to stage it: {format_bytes(available)} of memory are free"
    return None
