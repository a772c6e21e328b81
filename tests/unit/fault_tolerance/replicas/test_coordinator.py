"""The coordinator among ranks that come, ask and go, and strangers that send it anything."""

import contextlib
import json
import logging
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from queue import SimpleQueue

import pytest

from meshwright.channels.channel import MAX_LINE_BYTES, ChannelClosed, ProvenChannel, new_token
from meshwright.channels.channel_store import ChannelStore
from meshwright.errors import LostPeer
from meshwright.fault_tolerance.replicas.coordinator import Coordinator
from meshwright.fault_tolerance.replicas.lanes import Lane
from meshwright.fault_tolerance.replicas.member import EpochValues, Member
from meshwright.fault_tolerance.replicas.roll_call import RollCall
from meshwright.fault_tolerance.replicas.silence import GivenUp, Silence
from meshwright.spec.run.quorum import Quorum, ReplicaPlace

Join = Callable[..., Member]
TOKEN = new_token()
TIMEOUT_S = 30.0


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    roll_call = RollCall(num_expected=2, minimum=1, most=4)
    with Coordinator("127.0.0.1", TOKEN, roll_call, Silence(TIMEOUT_S, TIMEOUT_S, TIMEOUT_S), TIMEOUT_S) as server:
        yield server


@pytest.fixture
def join(coordinator: Coordinator) -> Iterator[Join]:
    """Return a function that connects a rank of a replica."""
    with ExitStack() as stack:

        def connect(replica: int, rank: int = 0, num_ranks: int = 1, incarnation: str = "a") -> Member:
            address = coordinator.address
            place = ReplicaPlace(
                replica=replica, incarnation=incarnation, host=address[0], port=address[1], token=TOKEN
            )
            return stack.enter_context(contextlib.closing(Member(place, rank, num_ranks, TIMEOUT_S)))

        yield connect


def all_ready(members: list[Member], step: int | None) -> list[Quorum]:
    with ThreadPoolExecutor(len(members)) as threads:
        waiting: list[Future[Quorum]] = [threads.submit(one.ready, step) for one in members]
        return [one.result() for one in waiting]


def trained(join: Join, step: int = 3) -> list[Member]:
    """Return two replicas that have agreed on a step."""
    members = [join(replica) for replica in (0, 1)]
    assert all(quorum.restores for quorum in all_ready(members, None))
    assert {quorum.step for quorum in all_ready(members, step)} == {step}
    return members


def test_a_replica_that_closes_its_connection_is_not_waited_for(join: Join) -> None:
    first, second = trained(join)
    second.close()
    quorum = first.ready(4)
    assert quorum.members == (0,)


def test_a_replica_is_ready_when_all_of_its_ranks_are(join: Join) -> None:
    ranks = [join(0, rank, 2) for rank in (0, 1)]
    other = join(1)
    answers = all_ready([*ranks, other], None)
    assert answers[0] == answers[1] == answers[2]
    assert answers[0].members == (0, 1)


def test_one_that_connects_to_a_lost_replica_is_not_left_waiting(coordinator: Coordinator, join: Join) -> None:
    first, second = trained(join)
    values = EpochValues(first, coordinator.quorum.epoch if coordinator.quorum else 0)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(values.get, "an address of replica 1")
        second.close()
        with pytest.raises(RuntimeError, match="lost"):
            waiting.result(timeout=TIMEOUT_S)


def test_values_pass_between_ranks(coordinator: Coordinator, join: Join) -> None:
    first, second = trained(join)
    epoch = coordinator.quorum.epoch if coordinator.quorum else 0
    ChannelStore(EpochValues(first, epoch)).set("key", b"\x00\xff")
    store = ChannelStore(EpochValues(second, epoch))
    assert store.get("key") == b"\x00\xff"
    assert store.check(["key"])


def test_a_rank_that_waits_for_a_value_is_heard_meanwhile(coordinator: Coordinator, join: Join) -> None:
    first, _ = trained(join)
    epoch = coordinator.quorum.epoch if coordinator.quorum else 0
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(EpochValues(first, epoch).get, "own")
        # Over the connection of the rank that waits, after its question.
        EpochValues(first, epoch).set("own", "here")
        assert waiting.result(timeout=TIMEOUT_S) == "here"


@pytest.mark.parametrize(("most", "what"), [(3, "takes part once it is ready"), (2, "waits in reserve: 2 take part")])
def test_a_replica_that_comes_to_a_run_is_announced(caplog: pytest.LogCaptureFixture, most: int, what: str) -> None:
    caplog.set_level(logging.INFO)
    silence = Silence(TIMEOUT_S, TIMEOUT_S, TIMEOUT_S)
    with Coordinator("127.0.0.1", TOKEN, RollCall(2, 1, most), silence, TIMEOUT_S) as server, ExitStack() as stack:

        def connect(replica: int) -> Member:
            place = ReplicaPlace.of(replica, server.address, TOKEN)
            return stack.enter_context(contextlib.closing(Member(place, 0, 1, TIMEOUT_S)))

        all_ready([connect(0), connect(1)], None)
        assert caplog.messages == []
        connect(2)
        deadline_s = time.monotonic() + TIMEOUT_S
        while not caplog.messages and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert [text.removeprefix("replica 2 has come, and ") for text in caplog.messages] == [what]


def test_a_replica_that_does_not_come_to_connect_is_given_up() -> None:
    given_up = SimpleQueue[int]()
    held_up_s: list[float] = []
    silence = Silence(limit_s=1.0, least_s=1.0, longest_s=TIMEOUT_S)
    with Coordinator("127.0.0.1", TOKEN, RollCall(2, 1, 4), silence, TIMEOUT_S) as server, ExitStack() as stack:

        def give_up(found: Mapping[int, GivenUp]) -> None:
            for replica, one in found.items():
                held_up_s.append(one.held_up_s)
                given_up.put(replica)

        server.give_up = give_up
        places = [ReplicaPlace.of(replica, server.address, TOKEN) for replica in (0, 1)]
        members = [stack.enter_context(contextlib.closing(Member(place, 0, 1, TIMEOUT_S))) for place in places]
        # The first steps of a replica have no limit but the long one.
        quorums = [all_ready(members, step)[0] for step in (None, 0, 1, 2, 3)]
        with ThreadPoolExecutor(1) as threads:
            lane = Lane(members[0], 0, TIMEOUT_S)
            connecting = threads.submit(lane.form, quorums[-1])
            assert given_up.get(timeout=TIMEOUT_S / 2) == 1
            connecting.result(timeout=TIMEOUT_S)
        assert lane.has_failed
        assert held_up_s[0] >= 1.0


def test_a_wrong_token_is_refused_both_ways(coordinator: Coordinator) -> None:
    place = ReplicaPlace.of(0, coordinator.address, new_token())
    with pytest.raises(LostPeer):
        Member(place, 0, 1, TIMEOUT_S)
    with socket.create_server(("127.0.0.1", 0)) as server:
        impostor = threading.Thread(target=_answer_with_a_guess, args=(server,))
        impostor.start()
        with pytest.raises(LostPeer, match=r"not of this job|ended"):
            Member(ReplicaPlace.of(0, server.getsockname(), TOKEN), 0, 1, TIMEOUT_S)
        impostor.join()


def _answer_with_a_guess(server: socket.socket) -> None:
    connection, _ = server.accept()
    with connection, connection.makefile("rwb") as lines:
        lines.write(b'{"challenge": "x"}\n')
        lines.flush()
        hello = json.loads(lines.readline())
        # What it was sent itself, in the hope that one proof serves for both directions.
        lines.write(json.dumps({"proof": hello["proof"]}).encode() + b"\n")
        lines.flush()


@pytest.mark.parametrize("seed", range(6))
def test_garbage_ends_no_more_than_its_connection(coordinator: Coordinator, join: Join, seed: int) -> None:
    """Bytes of strangers, and messages of ranks that are none, while two replicas train on."""
    members = trained(join)
    rng = random.Random(seed)
    for _ in range(20):
        with contextlib.suppress(OSError), socket.create_connection(coordinator.address, timeout=5) as stranger:
            stranger.sendall(_garbage(rng))
    hello = {"replica": 7, "rank": 0, "incarnation": "b", "num_ranks": 1}
    for message in ({"kind": "ready"}, {"kind": "ready", "ready": {"replica": -1}}, {"kind": []}, {"kind": "get"}):
        intruder = ProvenChannel.connect(coordinator.address, TOKEN, hello, TIMEOUT_S)
        intruder.send(message)
        with contextlib.closing(intruder), pytest.raises(ChannelClosed):
            intruder.receive()
    for step in (4, 5, 6):
        assert {quorum.members for quorum in all_ready(members, step)} == {(0, 1)}


def _garbage(rng: random.Random) -> bytes:
    kinds = [
        rng.randbytes(rng.randrange(2000)),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b'{"challenge": ' + b"[" * 5000 + b"\n",
        b'{"proof": 5, "replica": 0}\n',
        b"x" * (MAX_LINE_BYTES + 10),
        json.dumps({"challenge": "a", "proof": "b", "replica": "c", "rank": []}).encode() + b"\n",
        b"",
    ]
    return rng.choice(kinds)


def test_a_channel_takes_no_line_beyond_its_limit() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = threading.Thread(target=_send_until_closed, args=(theirs, b"y" * MAX_LINE_BYTES))
        sender.start()
        with pytest.raises(ChannelClosed):
            ProvenChannel(ours).receive()
        ours.shutdown(socket.SHUT_RDWR)
        sender.join()


def _send_until_closed(connection: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(data)
