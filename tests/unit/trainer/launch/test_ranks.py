"""Ranks.join says what to change when its port is taken."""

import socket

import pytest

from meshwright.errors import Retryable
from meshwright.spec.job.sections import RunSection
from meshwright.trainer.launch.ranks import Ranks


def test_a_port_in_use_is_named_with_what_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        for name, value in {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(Retryable, match=f"MASTER_PORT = {port} of 127.0.0.1 is in use .*--master-port"):
            Ranks.join(RunSection(device="cpu"))
