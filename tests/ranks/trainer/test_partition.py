"""A network between two nodes that is cut, slow or late: no process outlives a cut, and runs end with their bits."""

from __future__ import annotations

import contextlib
import subprocess
import time
from pathlib import Path

import pytest

from meshwright.errors import ExitCode
from meshwright.fault_tolerance.torchrun_agent import CUT_OFF_S
from training_runs import train_on_ranks
from two_nodes import ADDRESSES, INTERFACE, TwoNodes, connect, delayed_cable, throttle, two_namespaces

TIMEOUT_S = 15.0
UNDER_LOAD_S = 90.0
"""Far below the 15 minutes after which TCP gives up."""


def assert_same_as_one_machine(nodes: TwoNodes, folder: Path, num_ranks: int) -> None:
    assert nodes.manifest.exit == ExitCode.DONE
    (folder / "straight").mkdir()
    one_machine = train_on_ranks(nodes.job, folder / "straight" / "run", num_ranks)
    assert nodes.manifest.results["parameter_hash"] == one_machine.parameter_hash


@pytest.mark.long
def test_no_process_outlives_a_cut_which_is_named_from_either_side(tmp_path: Path, namespaces: tuple[str, ...]) -> None:
    nodes = TwoNodes(
        tmp_path,
        namespaces,
        run={"timeout_s": TIMEOUT_S},
        train={"steps": 200},
        checkpoint={"interval": 20, "mode": "async"},
    )
    nodes.start(ranks=2)
    nodes.wait_for_checkpoint()
    nodes.set_link("down")
    nodes.wait_for_no_process(TIMEOUT_S + CUT_OFF_S + UNDER_LOAD_S)

    output = nodes.wait()
    assert "torchrun on node1" in output[1], output[1]
    assert "is killed" in output[1]
    assert nodes.manifest.exit == ExitCode.RETRY
    for node in (0, 1):
        found = " ".join(nodes.diagnose(node).split())
        assert "run: network" in found
        assert "the connection between node0 (ranks 0 and 1) and node1 (ranks 2 and 3) was lost" in found

    nodes.set_link("up")
    nodes.start("--resume", ranks=2)
    nodes.wait()
    assert nodes.manifest.attempts[1].start_step >= 20
    assert_same_as_one_machine(nodes, tmp_path, 4)


@pytest.mark.long
def test_torchrun_restarts_the_ranks_of_a_cut_that_ends(tmp_path: Path, namespaces: tuple[str, ...]) -> None:
    nodes = TwoNodes(
        tmp_path,
        namespaces,
        run={"timeout_s": TIMEOUT_S},
        train={"steps": 100},
        checkpoint={"interval": 20, "mode": "async"},
    )
    nodes.start(max_restarts=3)
    nodes.wait_for_checkpoint()
    nodes.set_link("down")
    deadline_s = time.monotonic() + TIMEOUT_S + UNDER_LOAD_S
    while not nodes.run.failure.exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    nodes.set_link("up")
    output = nodes.wait()
    assert len(nodes.manifest.attempts) > 1, output
    assert_same_as_one_machine(nodes, tmp_path, 2)


def netem(names: tuple[str, ...]) -> None:
    for name in names:
        tc = ("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", INTERFACE, "root", "netem")
        found = subprocess.run([*tc, "delay", "10ms", "loss", "1%"], capture_output=True, text=True, check=False)
        if found.returncode != 0:
            pytest.skip(f"this kernel has no netem (CONFIG_NET_SCH_NETEM): {found.stderr.strip()}")


@pytest.mark.long
@pytest.mark.parametrize("network", ["throttled", "delayed", "lossy"])
def test_a_slow_network_changes_no_bit(tmp_path: Path, network: str) -> None:
    with two_namespaces() as names, contextlib.ExitStack() as stack:
        if network == "delayed":
            stack.enter_context(delayed_cable(names, 0.01))
        else:
            connect(names)
        if network == "throttled":
            for name in names:
                throttle(name, INTERFACE, "20mbit")
        elif network == "lossy":
            netem(names)
        nodes = TwoNodes(tmp_path, names, train={"steps": 10})
        nodes.start()
        output = nodes.wait()
        assert nodes.run.manifest.exists(), output
        assert nodes.manifest.attempts[0].hosts == ["node0", "node1"]
        assert_same_as_one_machine(nodes, tmp_path, len(ADDRESSES))
