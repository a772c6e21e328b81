"""Two nodes: network namespaces on this machine, each with a host name and an address, and torchrun on both."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from meshwright.errors import ExitCode
from training_runs import train_on_ranks
from two_nodes import INTERFACE, OWN_IS_LOOPBACK, TwoNodes


@pytest.mark.long
def test_a_run_on_two_nodes_that_lost_a_rank_resumes_to_the_bits_of_one_machine(
    tmp_path: Path, namespaces: tuple[str, ...]
) -> None:
    (tmp_path / "straight").mkdir()
    nodes = TwoNodes(tmp_path, namespaces, train={"steps": 200}, checkpoint={"interval": 20, "mode": "async"})
    nodes.start()
    nodes.wait_for_checkpoint()
    [attempt] = nodes.manifest.attempts
    assert attempt.hosts == ["node0", "node1"]
    os.kill(attempt.pids[1], signal.SIGKILL)
    nodes.wait()
    assert nodes.manifest.exit == ExitCode.RETRY

    nodes.start("--resume")
    output = nodes.wait()
    assert nodes.manifest.exit == ExitCode.DONE, output
    assert nodes.manifest.attempts[1].start_step >= 20
    one_machine = train_on_ranks(nodes.job, tmp_path / "straight" / "run", 2)
    assert nodes.manifest.results["parameter_hash"] == one_machine.parameter_hash


@pytest.mark.long
def test_a_node_that_lost_its_rank_and_its_memory_gets_the_state_from_the_other(
    tmp_path: Path, namespaces: tuple[str, ...]
) -> None:
    (tmp_path / "straight").mkdir()
    in_memory = {"interval": 0, "memory_interval": 1, "memory_dir": str(tmp_path / "memory-{host}")}
    nodes = TwoNodes(tmp_path, namespaces, train={"steps": 200}, checkpoint=in_memory)
    nodes.start()
    deadline = time.monotonic() + 600
    while not list(tmp_path.glob("memory-node1/*/step-??/checkpoint.json")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    [attempt] = nodes.manifest.attempts
    os.kill(attempt.pids[1], signal.SIGKILL)
    nodes.wait()
    assert nodes.manifest.exit == ExitCode.RETRY
    assert not nodes.run.checkpoint_steps()

    shutil.rmtree(tmp_path / "memory-node1")
    nodes.start("--resume")
    output = nodes.wait()
    assert nodes.manifest.exit == ExitCode.DONE, output
    assert nodes.manifest.attempts[1].start_step >= 10
    one_machine = train_on_ranks(nodes.job, tmp_path / "straight" / "run", 2)
    assert nodes.manifest.results["parameter_hash"] == one_machine.parameter_hash


@pytest.mark.long
def test_a_node_whose_name_is_a_loopback_address_is_reached_by_its_interface(
    tmp_path: Path, namespaces: tuple[str, ...]
) -> None:
    nodes = TwoNodes(tmp_path, namespaces, run={"timeout_s": 10.0})
    nodes.start(hosts=OWN_IS_LOOPBACK)
    output = "\n".join(nodes.wait())
    assert "could not reach the others" in output
    assert "set GLOO_SOCKET_IFNAME" in output
    assert "a bug in Meshwright" not in output
    assert not nodes.run.manifest.exists()

    nodes.start(hosts=OWN_IS_LOOPBACK, GLOO_SOCKET_IFNAME=INTERFACE)
    output = "\n".join(nodes.wait())
    assert nodes.manifest.exit == ExitCode.DONE, output
