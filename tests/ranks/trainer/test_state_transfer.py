"""A state on its way between replicas of one rank: three processes, and a coordinator in that of the test."""

import contextlib
import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from meshwright.channels.channel import new_token
from meshwright.fault_tolerance.replicas.coordinator import Coordinator
from meshwright.fault_tolerance.replicas.member import Member
from meshwright.fault_tolerance.replicas.roll_call import RollCall
from meshwright.fault_tolerance.replicas.silence import Silence
from meshwright.fault_tolerance.replicas.state_transfer import StateTransfer
from meshwright.spec.run.quorum import Quorum, ReplicaPlace
from run_ranks import run_ranks

TIMEOUT_S = 30.0
METADATA = {"step": 4, "words": ["é"]}
NUM_REPLICAS = 3
NUMBER = 5.0
"""In all tensors of the state."""


class State:
    """Tensors of one number, one of them not contiguous."""

    def __init__(self, number: float) -> None:
        self.parameter = torch.full((1000, 3), number, requires_grad=True)
        self.others = [torch.full((4, 1000), number).t(), torch.full((), number), torch.full((20, 7), number).half()]

    def parts(self) -> tuple[list[Tensor], list[Tensor]]:
        return [self.parameter, self.others[0]], self.others[1:]

    def metadata(self, step: int) -> dict[str, Any]:
        return METADATA | {"step": step}

    @property
    def numbers(self) -> set[float]:
        return {float(number) for part in self.parts() for tensor in part for number in tensor.detach().unique()}


class LostState(State):
    def metadata(self, step: int) -> dict[str, Any]:
        raise RuntimeError("its process ends")


@pytest.fixture
def places() -> Iterator[list[ReplicaPlace]]:
    """Return the places of three replicas with a coordinator."""
    silence, token = Silence(TIMEOUT_S, TIMEOUT_S, TIMEOUT_S), new_token()
    with Coordinator("127.0.0.1", token, RollCall(NUM_REPLICAS, 1, 4), silence, TIMEOUT_S) as server:
        yield [ReplicaPlace.of(replica, server.address, token) for replica in range(NUM_REPLICAS)]


@contextlib.contextmanager
def connected(places: list[ReplicaPlace], steps: list[int | None]) -> Iterator[tuple[Member, Quorum]]:
    """Return the connection of this rank, a replica, and the first quorum of which each has a state or none."""
    replica = dist.get_rank()
    with contextlib.closing(Member(places[replica], 0, 1, TIMEOUT_S)) as member:
        assert member.ready(None).restores
        yield member, member.ready(steps[replica])
        dist.barrier()


def passed_on(places: list[ReplicaPlace], steps: list[int | None]) -> tuple[bool, bool, Any, set[float]]:
    """Return whether this rank took part and received, the metadata that came, and the numbers that it has then."""
    with connected(places, steps) as (member, quorum):
        transfer = StateTransfer(member, 0, TIMEOUT_S)
        state = State(0.0 if steps[dist.get_rank()] is None else NUMBER)
        transfer.begin(quorum, state)
        is_under_way, is_receiving = transfer.is_under_way, transfer.is_receiving
        metadata = transfer.receive_model() if is_receiving else None
        assert {float(number) for number in state.parts()[0][0].detach().unique()} == {NUMBER}
        assert not is_under_way or transfer.finish()
        assert not transfer.is_under_way
        return is_under_way, is_receiving, metadata, state.numbers


@pytest.mark.parametrize("steps", [[None, 4, None], [4, 4, None], [4, 4, 4], [3, 4, 4]])
def test_what_lacks_the_state_receives_it_and_no_other_does(
    places: list[ReplicaPlace], steps: list[int | None]
) -> None:
    results = run_ranks(passed_on, NUM_REPLICAS, places, steps)
    lacks = [step != 4 for step in steps]
    source = steps.index(4)
    for replica, (is_under_way, is_receiving, metadata, numbers) in enumerate(results):
        assert is_receiving == lacks[replica]
        assert is_under_way == (any(lacks) and (lacks[replica] or replica == source))
        assert metadata == (METADATA if lacks[replica] else None)
        assert numbers == {NUMBER}


def received_from_one_that_is_lost(places: list[ReplicaPlace]) -> tuple[Any, bool]:
    """Return what the third replica received; the first, which is to send, connects, and closes all connections."""
    with connected(places, [4, 4, None]) as (member, quorum):
        assert quorum.sources == {2: 0}
        transfer = StateTransfer(member, 0, TIMEOUT_S)
        if dist.get_rank() == 0:
            with contextlib.suppress(RuntimeError):
                transfer.begin(quorum, LostState(NUMBER))
            member.on_loss.clear()
            del transfer
            gc.collect()
            return None, False
        transfer.begin(quorum, State(0.0))
        if not transfer.is_under_way:
            return None, False
        received = transfer.receive_model(), transfer.finish()
        for thread in threading.enumerate():
            if thread.name == "state-0":
                thread.join(TIMEOUT_S)
                assert not thread.is_alive()
        return received


def test_one_whose_source_is_lost_on_the_way_knows_so(places: list[ReplicaPlace]) -> None:
    assert run_ranks(received_from_one_that_is_lost, NUM_REPLICAS, places) == [(None, False)] * NUM_REPLICAS


def waited_for_a_frozen_source(places: list[ReplicaPlace]) -> Any:
    """Return what the third replica received of the first, which keeps its connections open and sends nothing."""
    with connected(places, [4, 4, None]) as (member, quorum):
        # Longer than this test may take.
        transfer, rank, lost = StateTransfer(member, 0, 3600.0), dist.get_rank(), threading.Event()
        member.on_loss.append(lambda epoch: lost.set())
        received = None
        if rank == 0:
            with contextlib.suppress(RuntimeError):
                transfer.begin(quorum, LostState(NUMBER))
        elif rank == 2:
            transfer.begin(quorum, State(0.0))
        dist.barrier()
        if rank == 0:
            member.close()
        elif rank == 2:
            assert lost.wait(TIMEOUT_S)
            received = transfer.receive_model(), transfer.finish()
        dist.barrier()
        return received


def test_one_whose_source_was_lost_before_it_waits_does_not_wait_for_its_timeout(places: list[ReplicaPlace]) -> None:
    assert run_ranks(waited_for_a_frozen_source, NUM_REPLICAS, places) == [None, None, (None, False)]
