"""Two nodes: network namespaces on this machine, each with a host name and an address, and torchrun on both."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshwright.config.write import to_toml
from meshwright.errors import ExitCode
from meshwright.spec.job.job import Job
from meshwright.spec.run.run import Manifest, Run
from training_runs import tiny_job, train_on_ranks

ADDRESSES = ("10.77.0.1", "10.77.0.2")
INTERFACE = "cable0"
RESOLVED = "".join(f"{address} node{node}\n" for node, address in enumerate(ADDRESSES))
"""Lines of /etc/hosts as a cluster's name server would answer."""
OWN_IS_LOOPBACK = ("127.0.1.1 node0\n", f"{ADDRESSES[0]} node0\n127.0.1.1 node1\n")
"""As Debian installs it: each node finds the other, and itself at an address that only it has."""
AS_NODE = 'mount --bind "$1" /etc/hosts && hostname "$2" && shift 2 && exec "$@"'


class TwoNodes:
    """A job file in a folder that both nodes see, and torchrun on each."""

    def __init__(self, folder: Path, namespaces: tuple[str, ...], **sections: dict[str, object]) -> None:
        self.run, self._folder, self._namespaces = Run(folder / "run"), folder, namespaces
        own = {"device": "cpu", "dir": str(self.run.folder), **sections.pop("run", {})}
        self.job = tiny_job(folder, run=own, **sections)
        (folder / "job.toml").write_text(to_toml(Job.from_dict(self.job)))

    def start(self, *arguments: str, hosts: tuple[str, str] = (RESOLVED, RESOLVED), **variables: str) -> None:
        """Start one rank on each node; `wait` returns how they ended."""
        self._processes = [self._start(node, hosts[node], arguments, variables) for node in (0, 1)]

    def _start(
        self, node: int, hosts: str, arguments: tuple[str, ...], variables: dict[str, str]
    ) -> subprocess.Popen[str]:
        hosts_file = self._folder / f"hosts{node}"
        hosts_file.write_text(f"127.0.0.1 localhost\n{hosts}")
        as_node = ("ip", "netns", "exec", self._namespaces[node], "unshare", "--mount", "--uts", "bash", "-c", AS_NODE)
        rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "node0:29500", "--rdzv-id", "test")
        torchrun = (sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1")
        train = ("-m", "meshwright", "train", str(self._folder / "job.toml"), *arguments)
        return subprocess.Popen(
            [*as_node, "node", str(hosts_file), f"node{node}", *torchrun, *rendezvous, *train],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | variables,
        )

    def wait(self) -> list[str]:
        """Return the output of each node, which torchrun has ended."""
        return [process.communicate(timeout=600)[0] for process in self._processes]

    @property
    def manifest(self) -> Manifest:
        return Manifest.from_json(self.run.manifest.read_text())

    def wait_for_checkpoint(self) -> None:
        """Return once a checkpoint is committed."""
        deadline = time.monotonic() + 600
        while time.monotonic() < deadline:
            if self.run.checkpoint_steps():
                return
            time.sleep(0.02)
        raise AssertionError("no checkpoint within 600 s")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def namespaces() -> Iterator[tuple[str, ...]]:
    """Yield the names of two network namespaces that a cable joins; skip where this user may not make them."""
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("needs the programs ip (iproute2) and unshare (util-linux)")
    names = tuple(f"meshwright-{os.getpid()}-{node}" for node in (0, 1))
    with contextlib.ExitStack() as stack:
        try:
            subprocess.run(["unshare", "--mount", "--uts", "true"], check=True, capture_output=True, text=True)
            for name in names:
                ip("netns", "add", name)
                stack.callback(ip, "netns", "del", name)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this user may not make network namespaces: {error.stderr.strip()}")
        ends = ("netns", names[0], "type", "veth", "peer", "name", INTERFACE, "netns", names[1])
        ip("link", "add", "name", INTERFACE, *ends)
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", INTERFACE)
            for interface in ("lo", INTERFACE):
                ip("-n", name, "link", "set", interface, "up")
        yield names


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
