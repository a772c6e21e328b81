"""Ranks.join says what to change when its port is taken, or the network is another one."""

import socket

import pytest

from meshwright.errors import LostPeer, Retryable
from meshwright.spec.job.sections import RunSection
from meshwright.trainer.launch import rank_store
from meshwright.trainer.launch.ranks import Ranks


def test_a_port_in_use_is_named_with_what_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        for name, value in {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(Retryable, match=f"MASTER_PORT = {port} of 127.0.0.1 is in use .*--master-port"):
            Ranks.join(RunSection(device="cpu"))


@pytest.mark.parametrize("local_ranks", [2, 4])
def test_ranks_of_several_machines_that_find_no_other_say_which_network_to_name(
    monkeypatch: pytest.MonkeyPatch, local_ranks: int
) -> None:
    """What gloo says where each host's name is 127.0.1.1 (torch 2.13); on one machine its network is no cause."""

    def no_store(*_: object, **__: object) -> None:
        raise RuntimeError("Gloo connectFullMesh failed with [gloo/transport/tcp/pair.h:311] Connect timeout [none]")

    monkeypatch.setattr(rank_store, "TCPStore", no_store)
    place = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": str(local_ranks)}
    for name, value in {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LostPeer, match="rank 1 of 4 could not reach the others: Gloo connectFullMesh failed") as raised:
        Ranks.join(RunSection(device="cpu"))
    assert ("set GLOO_SOCKET_IFNAME" in str(raised.value)) == (local_ranks == 2)
