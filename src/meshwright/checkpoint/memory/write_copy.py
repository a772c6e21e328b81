"""write_copy: one copy of the state in the memory of all nodes, each rank's files on its node and on the next one.

The same steps run in the training process and, for a copy in the background, in writer processes. On each node:

    step-30.tmp-ID/     the files of the node's ranks, then those that the node before it sends
    checkpoint.json     written once every rank has all of this
    step-30             renamed
    step-29             removed once every node has renamed

So a copy that can be put together from what the nodes hold exists at every moment, whichever one of them is lost.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from meshwright.checkpoint.format.durable import commit, remove, write_durably
from meshwright.checkpoint.format.find_checkpoint import FILE_NAME
from meshwright.checkpoint.memory.memory_folder import MemoryFolder
from meshwright.checkpoint.memory.nodes import Nodes
from meshwright.checkpoint.memory.transfer import receive, start_sending
from meshwright.checkpoint.peers import GroupPeers
from meshwright.checkpoint.saving import Extent, SaveRequest, attempt, index_of, summary, write_rank
from meshwright.errors import CheckpointError


def write_copy(
    request: SaveRequest,
    extents: Iterable[tuple[Extent, memoryview]],
    peers: GroupPeers,
    nodes: Nodes,
    save_id: str,
) -> None:
    """Commit `extents` of all ranks as the copy `request.folder` of every node; a collective.

    Raises CheckpointError on all ranks if any fails; then the copy before it is unchanged.
    """
    temporary = request.folder.with_name(f"{request.folder.name}.tmp-{save_id}")
    own = attempt(lambda: _write(request, extents, peers.rank, temporary), request.folder)
    problem = _pass_on(temporary, peers.rank, nodes, is_written="error" not in own)
    if problem is not None:
        own.setdefault("error", problem)
    outcomes = peers.collect(own)
    ended = peers.publish(_ended(request, save_id, outcomes) if peers.rank == 0 else None)
    is_leader = nodes.is_leader(peers.rank)
    committed: dict[str, Any] = {}
    if ended["error"] is None and is_leader:
        committed = attempt(lambda: _commit(temporary, request.folder, ended["index"]), request.folder)
    if ended["error"] is None:
        failed = _failures(peers.collect(committed))
        ended = peers.publish({"error": summary(failed) if failed else None})
    if ended["error"] is not None:
        if is_leader:
            remove(temporary)
            # Where this node had renamed and another could not: each kept copy takes memory.
            remove(request.folder)
        raise CheckpointError(ended["error"])
    if is_leader:
        MemoryFolder(request.folder.parent).remove_copies(but=int(request.folder.name.removeprefix("step-")))


def _write(
    request: SaveRequest, extents: Iterable[tuple[Extent, memoryview]], rank: int, temporary: Path
) -> dict[str, Any]:
    temporary.mkdir(parents=True, exist_ok=True)
    return write_rank(request, extents, rank, temporary, lambda num_bytes: None)


def _pass_on(temporary: Path, rank: int, nodes: Nodes, *, is_written: bool) -> str | None:
    """Send this rank's files to the next node and take those of the node before; return what failed, or None."""
    target = nodes.target_of(rank)
    sending = None if target is None else start_sending(temporary, rank, target, is_whole=is_written)
    problems = [receive(temporary, source, source) for source in nodes.sources_of(rank)]
    if sending is not None:
        sending.wait()
    return next((problem for problem in problems if problem is not None), None)


def _ended(request: SaveRequest, save_id: str, outcomes: list[dict[str, Any]]) -> dict[str, Any]:
    """Return {"error": None, "index": text} or {"error": the text for all}, from what each rank wrote."""
    if failures := _failures(outcomes):
        return {"error": summary(failures)}
    made = attempt(lambda: {"index": index_of(request, save_id, outcomes)}, request.folder)
    return {"error": None, **made}


def _failures(outcomes: list[dict[str, Any]]) -> dict[int, str]:
    return {rank: outcome["error"] for rank, outcome in enumerate(outcomes) if "error" in outcome}


def _commit(temporary: Path, folder: Path, index: str) -> dict[str, Any]:
    write_durably(temporary / FILE_NAME, index)
    commit(temporary, folder)
    return {}
