"""Sockets of process groups stop to accept once the ranks are connected; others, and connections, are left alone."""

import socket
import sys

import pytest

from meshwright.channels.listening_sockets import closed_afterwards

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a filter of Linux")


def connects(server: socket.socket) -> bool:
    try:
        socket.create_connection(server.getsockname(), 0.3).close()
    except TimeoutError:
        return False
    return True


def test_what_begins_to_listen_within_the_block_accepts_nothing_after_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as before:
        with closed_afterwards():
            within = socket.create_server(("127.0.0.1", 0))
            peer = socket.create_connection(within.getsockname())
            accepted, _ = within.accept()
            assert connects(within)
        assert not connects(within)
        assert connects(before)
        with socket.create_server(("127.0.0.1", 0)) as after:
            assert connects(after)
        peer.sendall(b"still connected")
        assert accepted.recv(100) == b"still connected"
        for each in (within, peer, accepted):
            each.close()


def test_ranks_that_connect_lazily_keep_their_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    with closed_afterwards():
        lazy = socket.create_server(("127.0.0.1", 0))
    assert connects(lazy)
    lazy.close()
