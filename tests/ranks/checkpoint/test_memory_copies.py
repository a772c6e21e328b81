"""Copies in memory on ranks of several simulated nodes: lost nodes, damage, full memory, other numbers of ranks."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from meshwright.checkpoint.checkpoint import load_newest, save
from meshwright.checkpoint.memory import transfer, write_copy
from meshwright.checkpoint.memory.copy_saver import CopySaver, SaverState
from meshwright.checkpoint.memory.find_copy import FoundCopy, find_copy
from meshwright.checkpoint.memory.memory_folder import MemoryFolder
from meshwright.checkpoint.memory.nodes import Nodes
from meshwright.checkpoint.peers import GroupPeers
from meshwright.spec.run.run import Run
from run_ranks import run_ranks

SHAPE = (64, 5)
State = dict[str, dict[str, torch.Tensor]]


def state_of(value: float, num_ranks: int) -> State:
    """Return a state whose matrix is sharded over all ranks and whose vector all have."""
    mesh = init_device_mesh("cpu", (num_ranks,))
    weight = torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float32).view(SHAPE) + value
    return {"model": {"w": distribute_tensor(weight, mesh, [Shard(0)]), "b": torch.full((3,), float(value))}}


def holds(state: State, value: float, num_ranks: int) -> bool:
    expected = state_of(value, num_ranks)
    own, wanted = state["model"]["w"], expected["model"]["w"]
    assert isinstance(own, DTensor)
    assert isinstance(wanted, DTensor)
    same = torch.equal(own.to_local(), wanted.to_local())
    return same and torch.equal(state["model"]["b"], expected["model"]["b"])


class OneRank:
    """A rank of simulated nodes, whose memory are folders in `folder`."""

    def __init__(self, folder: Path, sizes: list[int]) -> None:
        self.peers = GroupPeers()
        self.nodes = Nodes(tuple(f"node{node}" for node, size in enumerate(sizes) for _ in range(size)))
        self.is_leader = self.nodes.is_leader(self.peers.rank)
        self.memory = MemoryFolder(folder / self.nodes.hosts[self.peers.rank])
        self.memory.folder.mkdir(parents=True, exist_ok=True)
        self.num_ranks = self.peers.num_ranks

    def copy(self, saver: CopySaver, step: int) -> str | None:
        """Make a copy of the state of `step`; return the error."""
        outcome = saver.copy(step, state_of(step, self.num_ranks), {"step": step}, [])
        assert outcome is not None
        return outcome.error

    def saver(self) -> CopySaver:
        return CopySaver(self.memory, self.peers, self.nodes, "test")

    def find(self) -> FoundCopy | None:
        dist.barrier()
        return find_copy(self.memory, self.peers, self.nodes)

    def restores(self, step: int) -> bool:
        """Return whether the copy that is found is of `step` and loads every bit of it."""
        found = self.find()
        state = state_of(-1.0, self.num_ranks)
        if found is None or found.step != step or found.load(state) != {"step": step}:
            return False
        return holds(state, step, self.num_ranks)


def lose_nodes(folder: Path, sizes: list[int], lost: list[int]) -> tuple[bool, bool]:
    """Copy twice, lose nodes; return whether the second copy is restored, and again by what came from the others."""
    one = OneRank(folder, sizes)
    saver = one.saver()
    assert [one.copy(saver, step) for step in (1, 2)] == [None, None]
    dist.barrier()
    assert one.memory.steps() == [2]
    # Before the leader deletes the folder, which all ranks of its node look into.
    dist.barrier()
    if one.is_leader and one.nodes.node_of(one.peers.rank) in lost:
        shutil.rmtree(one.memory.folder)
    return one.restores(2), one.restores(2)


def test_a_lost_node_gets_its_state_from_the_next_one(tmp_path: Path) -> None:
    assert run_ranks(lose_nodes, 3, tmp_path, [2, 1], [0]) == [(True, True)] * 3


@pytest.mark.long
@pytest.mark.parametrize(("sizes", "lost"), [([1, 1, 1], [1]), ([1, 1, 1, 1], [0, 2]), ([2, 2], [1]), ([2], [])])
def test_every_loss_that_leaves_all_files_is_made_good(tmp_path: Path, sizes: list[int], lost: list[int]) -> None:
    assert run_ranks(lose_nodes, sum(sizes), tmp_path, sizes, lost) == [(True, True)] * sum(sizes)


@pytest.mark.long
def test_neighbours_that_are_both_lost_leave_no_copy(tmp_path: Path) -> None:
    assert run_ranks(lose_nodes, 3, tmp_path, [1, 1, 1], [0, 1]) == [(False, False)] * 3


def damage(folder: Path, how: str) -> None:
    data = folder / "rank-00000.bin"
    if how == "flipped bit":
        content = bytearray(data.read_bytes())
        content[len(content) // 2] ^= 1
        data.write_bytes(content)
    elif how == "truncated":
        os.truncate(data, data.stat().st_size - 1)
    elif how == "missing":
        data.unlink()
    else:
        (folder / "checkpoint.json").write_text("{")


def refuse_damage(folder: Path, how: str) -> tuple[bool, bool]:
    """Damage one of two copies of a rank's files, then both; return if the other is read, and then the disk."""
    one = OneRank(folder / "memory", [1, 1])
    run = Run(folder / "run")
    save(run.checkpoint(1), state_of(1, 2), {"step": 1})
    assert one.copy(one.saver(), 2) is None
    dist.barrier()
    if one.peers.rank == 0:
        damage(one.memory.copy(2), how)
    from_other = one.restores(2)
    dist.barrier()
    damage(one.memory.copy(2), how)
    state = state_of(-1.0, 2)
    found = load_newest(run, state, one.find())
    return from_other, found == (1, {"step": 1}) and holds(state, 1, 2)


@pytest.mark.long
@pytest.mark.parametrize("how", ["flipped bit", "truncated", "missing", "no index"])
def test_damage_is_refused_for_the_other_node_and_then_for_the_disk(tmp_path: Path, how: str) -> None:
    assert run_ranks(refuse_damage, 2, tmp_path, how) == [(True, True)] * 2


def write(folder: Path, sizes: list[int]) -> None:
    one = OneRank(folder, sizes)
    assert one.copy(one.saver(), 5) is None


def read(folder: Path, sizes: list[int]) -> bool:
    return OneRank(folder, sizes).restores(5)


@pytest.mark.long
@pytest.mark.parametrize(("before", "after"), [([2, 2], [1, 1]), ([1, 1], [2, 2]), ([2, 1], [1]), ([1], [2, 1])])
def test_other_numbers_of_ranks_and_nodes_read_a_copy(tmp_path: Path, before: list[int], after: list[int]) -> None:
    run_ranks(write, sum(before), tmp_path, before)
    assert run_ranks(read, sum(after), tmp_path, after) == [True] * sum(after)


def run_out_of_memory(folder: Path) -> tuple[list[str | None], bool]:
    """Copy, copy while the other node's files find no memory, and once more; return the errors and what is left."""
    one = OneRank(folder, [1, 1])
    saver = one.saver()
    errors = [one.copy(saver, 1)]
    with patch.object(transfer.os, "posix_fallocate", side_effect=OSError(28, "No space left on device")):
        errors.append(one.copy(saver, 2))
    kept = one.restores(1)
    leftovers = [path.name for path in one.memory.folder.iterdir() if "tmp" in path.name]
    dist.barrier()
    errors.append(one.copy(saver, 3))
    return errors, kept and not leftovers and one.restores(3)


@pytest.mark.long
def test_a_copy_without_memory_fails_on_all_ranks_and_leaves_the_one_before(tmp_path: Path) -> None:
    for errors, is_kept in run_ranks(run_out_of_memory, 2, tmp_path):
        assert errors[0] is errors[2] is None
        assert errors[1] is not None
        assert "No space left on device" in errors[1]
        assert is_kept


def fail_to_commit(folder: Path) -> tuple[list[str | None], list[int], bool]:
    """Copy twice where node 1 cannot rename; return the errors, the steps that are left, and whether all is right."""
    one = OneRank(folder, [1, 1])
    saver = one.saver()
    assert one.copy(saver, 1) is None
    errors = []
    for step in (2, 3):
        if one.peers.rank == 1:
            with patch.object(write_copy, "commit", side_effect=OSError(5, "Input/output error")):
                errors.append(one.copy(saver, step))
        else:
            errors.append(one.copy(saver, step))
    return errors, one.memory.steps(), one.restores(1)


@pytest.mark.long
def test_copies_that_one_node_cannot_commit_do_not_pile_up_on_others(tmp_path: Path) -> None:
    for errors, steps, is_kept in run_ranks(fail_to_commit, 2, tmp_path):
        assert all(error is not None and "Input/output error" in error for error in errors)
        assert steps == [1]
        assert is_kept


def copy_in_background(folder: Path) -> tuple[list[str | None], bool]:
    """Copy twice in the background, and change the state as early as it may be; return errors and what is read."""
    one = OneRank(folder, [1, 1])
    saver = one.saver()
    saver.start_background("localhost", 0)
    state = state_of(1, 2)
    local = state["model"]["w"]
    assert isinstance(local, DTensor)
    errors = []
    for step in (1, 2):
        assert saver.agreed_state() == SaverState.READY
        assert saver.copy(step, state, {"step": step}, ["model/b"]) is None
        saver.wait_until_staged()
        local.to_local().add_(1)
        state["model"]["b"].add_(1)
        assert saver.agreed_state() == SaverState.BUSY
        ended = saver.ended(waits=True)
        assert ended is not None
        errors.append(ended.error)
    restored = one.restores(2)
    saver.close()
    return errors, restored


@pytest.mark.long
def test_a_copy_in_the_background_is_of_the_step_that_was_staged(tmp_path: Path) -> None:
    assert run_ranks(copy_in_background, 2, tmp_path) == [([None, None], True)] * 2


def lose_writer(folder: Path) -> tuple[str | None, SaverState, bool]:
    """Copy, then copy after the writer process of rank 1 was killed; return the error, the state, what is left."""
    one = OneRank(folder, [1, 1])
    saver = one.saver()
    saver.start_background("localhost", 0)
    saver.copy(1, state_of(1, 2), {"step": 1}, [])
    saver.ended(waits=True)
    dist.barrier()
    if one.peers.rank == 1:
        assert saver.writer_pid is not None
        os.kill(saver.writer_pid, signal.SIGKILL)
    dist.barrier()
    saver.copy(2, state_of(2, 2), {"step": 2}, [])
    ended = saver.ended(waits=True)
    assert ended is not None
    state = saver.agreed_state()
    saver.close()
    return ended.error, state, one.restores(1)


@pytest.mark.long
def test_a_writer_process_that_died_ends_the_copies_of_all_ranks_and_no_training(tmp_path: Path) -> None:
    for error, state, is_kept in run_ranks(lose_writer, 2, tmp_path):
        assert error is not None
        assert state == SaverState.ENDED
        assert is_kept
