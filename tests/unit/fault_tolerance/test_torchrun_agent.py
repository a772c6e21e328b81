"""The end of a torchrun that is cut off from its rendezvous store, and of no other process."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshwright.fault_tolerance import torchrun_agent
from meshwright.fault_tolerance.torchrun_agent import end_cut_off_agent

AGENT = """
import subprocess, sys, time
subprocess.run([sys.executable, "-c", sys.argv[1]])
time.sleep(60)
"""
RANK = """
from meshwright.fault_tolerance import torchrun_agent
torchrun_agent.CUT_OFF_S = 0.3
torchrun_agent.end_cut_off_agent({environment})
"""


@pytest.fixture
def silent_port() -> Iterator[int]:
    """Yield a port of this host at which a connection is not answered: the queue of its listener is full."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(2):
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


def variables(host: str, port: int, **changes: str) -> dict[str, str]:
    """Return what torchrun sets for a rank of one of two nodes."""
    own = {
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "test",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    return own | changes


def parent_of_rank(folder: Path, name: str, environment: dict[str, str]) -> subprocess.Popen[str]:
    """Start a program with this name, and as its child a rank that is about to end."""
    program = folder / name
    program.write_text(AGENT)
    rank = RANK.format(environment=environment)
    return subprocess.Popen([sys.executable, str(program), rank], stderr=subprocess.PIPE, text=True)


def test_a_torchrun_whose_store_does_not_answer_is_killed(tmp_path: Path, silent_port: int) -> None:
    with parent_of_rank(tmp_path, "torchrun", variables("127.0.0.1", silent_port)) as agent:
        assert agent.wait(timeout=50) == -signal.SIGKILL
        assert agent.stderr is not None
        assert f"127.0.0.1:{silent_port}, has not answered" in agent.stderr.read()


def test_another_launcher_is_left_alone_and_named(tmp_path: Path, silent_port: int) -> None:
    with parent_of_rank(tmp_path, "launcher.py", variables("127.0.0.1", silent_port)) as launcher:
        assert launcher.stderr is not None
        assert f"kill -9 {launcher.pid}" in launcher.stderr.readline()
        assert launcher.poll() is None
        launcher.kill()


def test_a_store_that_answers_or_refuses_is_no_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    # This test's own parent would be killed.
    monkeypatch.setattr(torchrun_agent, "_command_of", lambda pid: pytest.fail("it answered"))
    with socket.create_server(("127.0.0.1", 0)) as store:
        port = store.getsockname()[1]
        assert not end_cut_off_agent(variables("127.0.0.1", port))
    assert not end_cut_off_agent(variables("127.0.0.1", port))


@pytest.mark.parametrize(
    "changes", [{"GROUP_WORLD_SIZE": "1"}, {"TORCHELASTIC_USE_AGENT_STORE": "False"}, {"MASTER_PORT": ""}]
)
def test_ranks_of_one_node_and_of_other_launchers_ask_no_store(
    changes: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchrun_agent, "_answers", lambda host, port: pytest.fail("asked"))
    assert not end_cut_off_agent(variables("127.0.0.1", 29500, **changes))
