"""A channel server among strangers: none is served, none keeps a client of the job out."""

import contextlib
import json
import os
import socket
import threading
from collections.abc import Iterator

import pytest

from meshwright.channels import channel
from meshwright.channels.channel import ChannelClosed, ProvenChannel, new_token
from meshwright.channels.channel_server import ChannelServer
from meshwright.channels.key_value import KeyValueClient, KeyValueServer
from strangers import listening

TOKEN = new_token()
TIMEOUT_S = 30.0


@pytest.fixture
def server() -> Iterator[ChannelServer]:
    """A server that answers each message with itself."""

    def echo(channel: ProvenChannel, hello: dict[str, object]) -> None:
        while True:
            channel.send(channel.receive())

    with contextlib.closing(ChannelServer("127.0.0.1", TOKEN, echo)) as echoing:
        echoing.start()
        yield echoing


def assert_serves(server: ChannelServer) -> None:
    with contextlib.closing(ProvenChannel.connect(server.address, TOKEN, {}, TIMEOUT_S)) as client:
        client.send({"a": 1})
        assert client.receive() == {"a": 1}


def test_clients_are_served_however_many_connections_prove_nothing(server: ChannelServer) -> None:
    with contextlib.ExitStack() as held:
        for _ in range(300):
            held.enter_context(socket.create_connection(server.address, TIMEOUT_S))
        assert_serves(server)


def test_a_recorded_handshake_is_of_no_use_again(server: ChannelServer) -> None:
    recorded = _recorded_hello(server)
    assert b'"proof"' in recorded
    with socket.create_connection(server.address, TIMEOUT_S) as replayed, replayed.makefile("rb") as lines:
        lines.readline()
        replayed.sendall(recorded)
        assert lines.readline() == b""
    assert_serves(server)


def _recorded_hello(server: ChannelServer) -> bytes:
    """Return what a real client sends, as one sees it who passes everything on."""
    with socket.create_server(("127.0.0.1", 0)) as between:
        client = threading.Thread(target=_connect, args=(between.getsockname(),))
        client.start()
        near, _ = between.accept()
        far = socket.create_connection(server.address, TIMEOUT_S)
        with near, far, far.makefile("rb") as from_server, near.makefile("rb") as from_client:
            near.sendall(from_server.readline())
            hello = from_client.readline()
            far.sendall(hello)
            near.sendall(from_server.readline())
        client.join()
    return hello


def _connect(address: tuple[str, int]) -> None:
    ProvenChannel.connect(address, TOKEN, {}, TIMEOUT_S).close()


def test_bytes_that_arrive_slowly_give_no_more_time(server: ChannelServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "PROOF_TIMEOUT_S", 1.0)
    with socket.create_connection(server.address, TIMEOUT_S) as slow:
        ended = threading.Event()
        sender = threading.Thread(target=_drip, args=(slow, ended))
        sender.start()
        slow.recv(4096)
        with contextlib.suppress(ConnectionError):
            assert slow.recv(1) == b""
        ended.set()
        sender.join()


def _drip(connection: socket.socket, ended: threading.Event) -> None:
    with contextlib.suppress(OSError):
        while not ended.wait(0.2):
            connection.sendall(b" ")


def test_a_line_without_end_is_cut_off_before_the_proof(server: ChannelServer) -> None:
    with socket.create_connection(server.address, TIMEOUT_S) as stranger:
        stranger.recv(4096)
        with contextlib.suppress(ConnectionError):
            stranger.sendall(b"x" * (1 << 20))
            assert stranger.recv(1) == b""
    assert_serves(server)


def test_it_listens_on_one_address(server: ChannelServer) -> None:
    assert server.address in listening(os.getpid())


def test_values_are_waited_for_and_taken_once() -> None:
    with contextlib.closing(KeyValueServer("localhost", TOKEN)) as values:
        first, second = (KeyValueClient(values.address, TOKEN, TIMEOUT_S) for _ in range(2))
        timer = threading.Timer(0.1, first.set, ("a", json.dumps(["x" * (2 << 20)])))
        timer.start()
        assert json.loads(second.get("a")) == ["x" * (2 << 20)]
        assert second.take("a")
        hasty = KeyValueClient(values.address, TOKEN, 1.0)
        with pytest.raises(TimeoutError, match="no a within"):
            hasty.get("a")
        with pytest.raises(ConnectionError, match=r"ended|closed|reset"):
            KeyValueClient(values.address, new_token(), TIMEOUT_S)
        for client in (first, second, hasty):
            client.close()


def test_a_client_that_sends_what_is_no_request_loses_its_connection() -> None:
    with contextlib.closing(KeyValueServer("localhost", TOKEN)) as values:
        with contextlib.closing(ProvenChannel.connect(values.address, TOKEN, {}, TIMEOUT_S)) as client:
            client.send({"kind": "exec", "key": "a"})
            with pytest.raises(ChannelClosed):
                client.receive()
        KeyValueClient(values.address, TOKEN, TIMEOUT_S).close()
