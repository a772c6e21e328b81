"""find_copy and FoundCopy: the newest copy in memory that all nodes together hold and that is as it was saved."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint.format.find_checkpoint import FILE_NAME
from meshwright.checkpoint.format.manifest import (
    Index,
    RankManifest,
    read_index,
    read_manifest,
    size_problem,
    without_remedy,
)
from meshwright.checkpoint.format.saved import saved_in
from meshwright.checkpoint.loading import fill, open_data, read_verified
from meshwright.checkpoint.lookup import look_up
from meshwright.checkpoint.memory.choose_copy import ChosenCopy, Held, choose, without
from meshwright.checkpoint.memory.memory_folder import MemoryFolder
from meshwright.checkpoint.memory.nodes import Nodes
from meshwright.checkpoint.memory.transfer import receive, start_sending
from meshwright.checkpoint.peers import GroupPeers
from meshwright.checkpoint.shards import flatten, local_shards
from meshwright.errors import CheckpointError, DamagedCheckpoint
from meshwright.log import logger


def find_copy(memory: MemoryFolder, peers: GroupPeers, nodes: Nodes) -> "FoundCopy | None":
    """Return the newest copy whose every byte is held by some node as it was saved; None without; a collective.

    Files that are damaged are named in a warning; another node's are taken instead, or an older copy.
    """
    own = held_on(memory) if nodes.is_leader(peers.rank) else None
    holdings: list[list[Held]] = [each for each in peers.gather(own) if each is not None]
    while (chosen := choose(holdings, nodes)) is not None:
        damaged = [each for of_rank in peers.gather(_damaged(memory, chosen, peers, nodes)) for each in of_rank]
        if not damaged:
            return FoundCopy(chosen, memory, peers, nodes)
        for node, file, problem in damaged:
            logger.warning("files of rank %d in the memory of %s are refused: %s", file, nodes.names[node], problem)
        holdings = without(holdings, chosen.save_id, [(node, file) for node, file, _ in damaged])
    return None


def held_on(memory: MemoryFolder) -> list[Held]:
    """Return what this node holds of each copy, by indexes, manifests and sizes; what is damaged is left out."""
    held = []
    for step in memory.steps():
        folder = memory.copy(step)
        try:
            index = read_index(folder)
        except CheckpointError as error:
            logger.warning("a copy in memory is refused: %s", without_remedy(str(error)))
            continue
        files = frozenset(rank for rank in range(len(index.ranks)) if _is_there(folder, index, rank))
        held.append(Held(step, index.save_id, len(index.ranks), files))
    return held


def _is_there(folder: Path, index: Index, rank: int) -> bool:
    try:
        read_manifest(folder, index, rank)
    except CheckpointError:
        return False
    return size_problem(folder, index, rank) is None


def _own_files(chosen: ChosenCopy, peers: GroupPeers, nodes: Nodes) -> list[int]:
    """Return the files that this rank reads for all, a part of those of its node."""
    own = nodes.node_of(peers.rank)
    of_node = [file for file, node in enumerate(chosen.sources) if node == own]
    return [file for number, file in enumerate(of_node) if nodes.member_for(own, number) == peers.rank]


def _damaged(memory: MemoryFolder, chosen: ChosenCopy, peers: GroupPeers, nodes: Nodes) -> list[tuple[int, int, str]]:
    """Return (node, file, problem) for each file that this rank reads and that differs from what was saved."""
    found = []
    folder = memory.copy(chosen.step)
    for file in _own_files(chosen, peers, nodes):
        try:
            verify_file(folder, file)
        except CheckpointError as error:
            found.append((nodes.node_of(peers.rank), file, without_remedy(str(error))))
    return found


def verify_file(folder: Path, rank: int) -> None:
    """Compare every byte of one rank's data file with its hash; raises DamagedCheckpoint."""
    index = read_index(folder)
    manifest = read_manifest(folder, index, rank)
    with open_data(folder, rank) as file:
        shards = [saved for saved in saved_in(manifest, index.sections) if saved.shard is not None]
        most = max((saved.shard.num_bytes for saved in shards if saved.shard is not None), default=0)
        scratch = torch.empty(most, dtype=torch.uint8).numpy().data
        for saved in shards:
            assert saved.shard is not None
            read_verified(file, folder, saved, scratch[: saved.shard.num_bytes])


@dataclass(frozen=True)
class FoundCopy:
    """A copy that was verified where its files lie; all ranks have the same."""

    chosen: ChosenCopy
    memory: MemoryFolder
    peers: GroupPeers
    nodes: Nodes

    @property
    def step(self) -> int:
        """Return the steps that its state has done."""
        return self.chosen.step

    def load(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Fill the tensors of `state` in place and return the metadata; raises as checkpoint.load; a collective."""
        folder = self.memory.copy(self.step)
        index = self._share_index(folder)
        flat = flatten(state)
        shards = local_shards(flat)
        answers = look_up(folder, self._manifests(folder, index), shards, state.keys(), self.peers)
        needed = {part.rank for parts in answers for part in parts}
        self._fetch(folder, needed)
        own = self.nodes.node_of(self.peers.rank)
        verified = {file for file in needed if self.chosen.sources[file] == own}
        problem = None
        try:
            fill(folder, shards, answers, verified)
        except CheckpointError as error:
            problem = error
        self.peers.raise_on_all(problem)
        for first, *others in flat.values():
            for other in others:
                other.copy_(first)
        return index.metadata

    def _share_index(self, folder: Path) -> Index:
        """Return the index, which a node that has lost it writes again."""
        own = self.nodes.node_of(self.peers.rank)
        is_leader = self.nodes.is_leader(self.peers.rank)
        reads = is_leader and own == self.chosen.sources[0]
        text = next(each for each in self.peers.gather(_text(folder) if reads else None) if each is not None)
        problem = None
        if is_leader:
            try:
                _complete(folder, text, self.chosen.save_id)
            except OSError as error:
                problem = DamagedCheckpoint(f"{folder} cannot be written ({error.strerror})")
        self.peers.raise_on_all(problem)
        return read_index(folder)

    def _manifests(self, folder: Path, index: Index) -> list[RankManifest]:
        problem, manifests = None, []
        try:
            manifests = [read_manifest(folder, index, file) for file in _own_files(self.chosen, self.peers, self.nodes)]
        except CheckpointError as error:
            problem = error
        self.peers.raise_on_all(problem)
        return manifests

    def _fetch(self, folder: Path, needed: set[int]) -> None:
        """Receive the files that this node needs and other nodes have, each once; raises on all ranks what failed."""
        own = self.nodes.node_of(self.peers.rank)
        wanted = self.peers.gather(sorted(file for file in needed if self.chosen.sources[file] != own))
        by_node: dict[tuple[int, int], int] = {}
        for rank, files in enumerate(wanted):
            for file in files:
                by_node.setdefault((self.nodes.node_of(rank), file), rank)
        problems = []
        # One after the other, in the order of all ranks: none waits for one that waits for it.
        for (_, file), to in sorted(by_node.items()):
            source = self.nodes.member_for(self.chosen.sources[file], file)
            if self.peers.rank == source:
                start_sending(folder, file, to).wait()
            elif self.peers.rank == to and (failed := receive(folder, file, source)) is not None:
                problems.append(failed)
        self.peers.raise_on_all(DamagedCheckpoint("\n".join(problems)) if problems else None)
        if by_node and self.peers.rank == 0:
            logger.info("%d files of the copy of step %d were received from other nodes", len(by_node), self.step)


def _text(folder: Path) -> str:
    return (folder / FILE_NAME).read_text(encoding="utf-8")


def _complete(folder: Path, index: str, save_id: str) -> None:
    """Make `folder` one of this copy, where this node has none or one of another save."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if read_index(folder).save_id == save_id:
            return
    except CheckpointError:
        pass
    (folder / FILE_NAME).write_text(index, encoding="utf-8")
