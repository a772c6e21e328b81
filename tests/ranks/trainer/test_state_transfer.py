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

    def tensors(self) -> list[Tensor]:
        return [self.parameter, *self.others]

    def metadata(self, step: int) -> dict[str, Any]:
        return METADATA | {"step": step}

    @property
    def numbers(self) -> set[float]:
        return {float(number) for tensor in self.tensors() for number in tensor.detach().unique()}


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
    """Return whether this rank took part and received, the rest that it received, and the numbers that it has then."""
    with connected(places, steps) as (member, quorum):
        transfer = StateTransfer(member, 0, TIMEOUT_S)
        state = State(0.0 if steps[dist.get_rank()] is None else NUMBER)
        transfer.begin(quorum, state)
        is_under_way, is_receiving = transfer.is_under_way, transfer.is_receiving
        rest = transfer.finish() if is_under_way else None
        assert not transfer.is_under_way
        assert not transfer.is_receiving
        return is_under_way, is_receiving, rest, state.numbers


@pytest.mark.parametrize("steps", [[None, 4, None], [4, 4, None], [4, 4, 4], [3, 4, 4]])
def test_what_lacks_the_state_receives_it_and_no_other_does(
    places: list[ReplicaPlace], steps: list[int | None]
) -> None:
    results = run_ranks(passed_on, NUM_REPLICAS, places, steps)
    lacks = [step != 4 for step in steps]
    source = steps.index(4)
    for replica, (is_under_way, is_receiving, rest, numbers) in enumerate(results):
        assert is_receiving == lacks[replica]
        assert is_under_way == (any(lacks) and (lacks[replica] or replica == source))
        assert rest == (METADATA if lacks[replica] else None)
        assert numbers == {NUMBER}


def backward_while_it_arrives(places: list[ReplicaPlace]) -> None:
    with connected(places, [4, 4, None]) as (member, quorum):
        transfer, state = StateTransfer(member, 0, TIMEOUT_S), State(float(dist.get_rank()))
        loss = (state.parameter**2).sum() + (state.others[0] * state.parameter[:, :1]).sum()
        transfer.begin(quorum, state)
        if transfer.is_under_way:
            transfer.finish()
        loss.backward()  # type: ignore[no-untyped-call]
        assert state.parameter.grad is not None


def test_a_backward_under_way_does_not_mind_that_its_parameters_are_received(places: list[ReplicaPlace]) -> None:
    """What it computes is of no use, but it must come to its end: the step's sums are made in it."""
    run_ranks(backward_while_it_arrives, NUM_REPLICAS, places)


def received_from_one_that_is_lost(places: list[ReplicaPlace]) -> Any:
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
            return None
        transfer.begin(quorum, State(0.0))
        rest = transfer.finish() if transfer.is_under_way else None
        for thread in threading.enumerate():
            if thread.name == "state-0":
                thread.join(TIMEOUT_S)
                assert not thread.is_alive()
        return rest


def test_one_whose_source_is_lost_on_the_way_knows_so(places: list[ReplicaPlace]) -> None:
    assert run_ranks(received_from_one_that_is_lost, NUM_REPLICAS, places) == [None] * NUM_REPLICAS
