"""A state on its way between replicas, over a coordinator and connections of loopback, both ends in this process."""

import contextlib
import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.channels.channel import new_token
from meshwright.fault_tolerance.replicas.coordinator import Coordinator
from meshwright.fault_tolerance.replicas.member import Member
from meshwright.fault_tolerance.replicas.roll_call import RollCall
from meshwright.fault_tolerance.replicas.silence import Silence
from meshwright.fault_tolerance.replicas.state_transfer import StateTransfer
from meshwright.spec.run.quorum import Quorum, ReplicaPlace

TOKEN = new_token()
TIMEOUT_S = 30.0


class State:
    """Tensors of one number, one of them not contiguous."""

    def __init__(self, number: float, size: int = 1000) -> None:
        self.parameter = torch.full((size, 3), number, requires_grad=True)
        self.others = [torch.full((4, size), number).t(), torch.full((), number), torch.full((20, 7), number).half()]

    def tensors(self) -> list[Tensor]:
        return [self.parameter, *self.others]

    def metadata(self, step: int) -> dict[str, Any]:
        return {"step": step, "words": ["é"]}

    @property
    def numbers(self) -> set[float]:
        return {float(number) for tensor in self.tensors() for number in tensor.detach().unique()}


@pytest.fixture
def members() -> Iterator[list[Member]]:
    """Return three connected replicas."""
    silence = Silence(TIMEOUT_S, TIMEOUT_S, TIMEOUT_S)
    with Coordinator("127.0.0.1", TOKEN, RollCall(3, 1, 4), silence, TIMEOUT_S) as server, ExitStack() as stack:
        places = [ReplicaPlace.of(replica, server.address, TOKEN) for replica in range(3)]
        yield [stack.enter_context(contextlib.closing(Member(place, 0, 1, TIMEOUT_S))) for place in places]


def quorum_of(members: list[Member], steps: list[int | None]) -> Quorum:
    """Return the quorum of three replicas of which one has been ready with each step."""
    with ThreadPoolExecutor(len(members)) as threads:
        assert all(quorum.restores for quorum in threads.map(lambda member: member.ready(None), members))
        answers = list(threads.map(lambda member, step: member.ready(step), members, steps))
    return answers[0]


def begun(members: list[Member], quorum: Quorum, states: list[State]) -> list[StateTransfer]:
    transfers = [StateTransfer(member, 0, TIMEOUT_S) for member in members]
    with ThreadPoolExecutor(len(members)) as threads:
        list(threads.map(lambda one, state: one.begin(quorum, state), transfers, states))
    return transfers


def test_what_lacks_the_state_receives_it_and_no_one_else_does(members: list[Member]) -> None:
    quorum = quorum_of(members, [None, 4, None])
    assert quorum.sources == {0: 1, 2: 1}
    assert quorum.computing == (1,)
    states = [State(0.0), State(5.0), State(0.0)]
    transfers = begun(members, quorum, states)
    assert [one.is_receiving for one in transfers] == [True, False, True]
    assert [one.finish() for one in transfers] == [{"step": 4, "words": ["é"]}, None, {"step": 4, "words": ["é"]}]
    assert [state.numbers for state in states] == [{5.0}] * 3
    assert not any(one.is_under_way or one.is_receiving for one in transfers)


def test_none_takes_part_where_all_have_the_state(members: list[Member]) -> None:
    quorum = quorum_of(members, [4, 4, 4])
    assert not any(one.is_under_way for one in begun(members, quorum, [State(0.0)] * 3))


def test_a_backward_under_way_does_not_mind_that_its_parameters_are_received(members: list[Member]) -> None:
    """What it computes is of no use, but it must come to its end: the step's sums are made in it."""
    quorum = quorum_of(members, [4, 4, None])
    states = [State(1.0), State(1.0), State(0.0)]
    loss = (states[2].parameter ** 2).sum() + (states[2].others[0] * states[2].parameter[:, :1]).sum()
    for one in begun(members, quorum, states):
        if one.is_under_way:
            one.finish()
    assert states[2].numbers == {1.0}
    loss.backward()  # type: ignore[no-untyped-call]
    assert states[2].parameter.grad is not None


def test_one_whose_source_is_lost_on_the_way_knows_so(members: list[Member]) -> None:
    """The source connects, and its process ends before it has sent anything, by which its connections close."""
    quorum = quorum_of(members, [4, 4, None])
    assert quorum.sources == {2: 0}

    class Lost(State):
        def metadata(self, step: int) -> dict[str, Any]:
            raise RuntimeError("killed")

    def send() -> None:
        source = StateTransfer(members[0], 0, TIMEOUT_S)
        with contextlib.suppress(RuntimeError):
            source.begin(quorum, Lost(1.0))
        members[0].on_loss.clear()

    receiver = StateTransfer(members[2], 0, TIMEOUT_S)
    sending = threading.Thread(target=send)
    sending.start()
    receiver.begin(quorum, State(0.0))
    sending.join()
    members[0].close()
    gc.collect()
    assert receiver.finish() is None
    assert not receiver.is_receiving
    for thread in threading.enumerate():
        if thread.name == "state-0":
            # One that still waits as the process ends aborts it.
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()
