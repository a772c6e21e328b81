"""Two nodes on this machine: network namespaces with a host name and an address each, and torchrun on both."""

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
from training_runs import tiny_job

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

    def start(
        self,
        *arguments: str,
        hosts: tuple[str, str] = (RESOLVED, RESOLVED),
        max_restarts: int = 0,
        ranks: int = 1,
        **variables: str,
    ) -> None:
        """Start `train` with `arguments` on `ranks` ranks of each node; `wait` returns how they ended."""
        self.start_command(
            "train",
            str(self._folder / "job.toml"),
            *arguments,
            hosts=hosts,
            options=("--max-restarts", str(max_restarts), "--nproc-per-node", str(ranks)),
            **variables,
        )

    def start_command(
        self,
        *command: str,
        hosts: tuple[str, str] = (RESOLVED, RESOLVED),
        options: tuple[str, ...] = ("--nproc-per-node", "1"),
        **variables: str,
    ) -> None:
        """Start torchrun with `options` and a command of meshwright on each node."""
        rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "node0:29500", "--rdzv-id", "test")
        torchrun = (sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", *options, *rendezvous)
        self.processes = [
            self._start(node, hosts[node], (*torchrun, "-m", "meshwright", *command), variables) for node in (0, 1)
        ]

    def _start(
        self, node: int, hosts: str, command: tuple[str, ...], variables: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        hosts_file = self._folder / f"hosts{node}"
        hosts_file.write_text(f"127.0.0.1 localhost\n{hosts}")
        as_node = ("ip", "netns", "exec", self._namespaces[node], "unshare", "--mount", "--uts", "bash", "-c", AS_NODE)
        # A pipe that is read at the end would hold up a long run.
        with self._output(node).open("wb") as output:
            return subprocess.Popen(
                [*as_node, "node", str(hosts_file), f"node{node}", *command],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | variables,
            )

    def _output(self, node: int) -> Path:
        return self._folder / f"output{node}.txt"

    def wait(self, timeout_s: float = 600) -> list[str]:
        """Return the output of each node, which torchrun has ended."""
        for process in self.processes:
            process.wait(timeout=timeout_s)
        return [self._output(node).read_text(errors="replace") for node in (0, 1)]

    def diagnose(self, node: int) -> str:
        """Return what `meshwright diagnose` prints on a node, which ends with 75: a restart may help."""
        inside = ("ip", "netns", "exec", self._namespaces[node], "unshare", "--uts", "bash", "-c")
        script = f'hostname node{node} && exec "$@"'
        words = (sys.executable, "-m", "meshwright", "diagnose", str(self.run.folder))
        found = subprocess.run([*inside, script, "node", *words], capture_output=True, text=True, check=False)
        assert found.returncode == ExitCode.RETRY, found.stderr
        return found.stdout

    def num_processes(self) -> int:
        """Return how many processes run on the nodes."""
        return sum(len(_pids(name)) for name in self._namespaces)

    def wait_for_no_process(self, timeout_s: float) -> float:
        """Return the seconds until no process ran on either node; raises AssertionError where one outlives them."""
        started_s = time.monotonic()
        while self.num_processes():
            assert time.monotonic() - started_s < timeout_s, f"{self.num_processes()} processes after {timeout_s} s"
            time.sleep(0.1)
        return time.monotonic() - started_s

    def set_link(self, state: str) -> None:
        """Take the cable "down" or "up"."""
        ip("-n", self._namespaces[0], "link", "set", INTERFACE, state)

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


def _pids(namespace: str) -> list[int]:
    found = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=True)
    return [int(pid) for pid in found.stdout.split()]


def _end_all(namespace: str) -> None:
    for pid in _pids(namespace):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def two_namespaces() -> Iterator[tuple[str, ...]]:
    """Yield the names of two network namespaces without a link; skip where this user may not make them.

    Processes that a test leaves in them are killed.
    """
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("needs the programs ip (iproute2) and unshare (util-linux)")
    names = tuple(f"meshwright-{os.getpid()}-{node}" for node in (0, 1))
    with contextlib.ExitStack() as stack:
        try:
            subprocess.run(["unshare", "--mount", "--uts", "true"], check=True, capture_output=True, text=True)
            for name in names:
                ip("netns", "add", name)
                stack.callback(ip, "netns", "del", name)
                stack.callback(_end_all, name)
                ip("-n", name, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this user may not make network namespaces: {error.stderr.strip()}")
        yield names


def connect(names: tuple[str, ...], interface: str = INTERFACE, addresses: tuple[str, ...] = ADDRESSES) -> None:
    """Join two namespaces by a cable whose ends have the same name."""
    ip(
        "link",
        "add",
        "name",
        interface,
        "netns",
        names[0],
        "type",
        "veth",
        "peer",
        "name",
        interface,
        "netns",
        names[1],
    )
    for name, address in zip(names, addresses, strict=True):
        ip("-n", name, "address", "add", f"{address}/24", "dev", interface)
        ip("-n", name, "link", "set", interface, "up")


def throttle(name: str, interface: str, rate: str) -> None:
    """Limit what an interface of a namespace sends, such as to "2mbit"."""
    bucket = ("tbf", "rate", rate, "burst", "16kb", "latency", "200ms")
    tc = ("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", interface, "root", *bucket)
    found = subprocess.run(tc, capture_output=True, text=True, check=False)
    if found.returncode != 0:
        pytest.skip(f"this kernel has no token bucket filter: {found.stderr.strip()}")


@contextlib.contextmanager
def delayed_cable(names: tuple[str, ...], delay_s: float) -> Iterator[None]:
    """Join two namespaces by a relay process that delivers each packet after `delay_s`."""
    if not Path("/dev/net/tun").exists():
        pytest.skip("needs /dev/net/tun, the kernel's device for a relay of packets")
    program = Path(__file__).parent / "programs" / "delayed_cable.py"
    command = (sys.executable, str(program), *names, INTERFACE, str(delay_s))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            for name, address in zip(names, ADDRESSES, strict=True):
                ip("-n", name, "address", "add", f"{address}/24", "dev", INTERFACE)
                ip("-n", name, "link", "set", INTERFACE, "mtu", "9000", "up")
            yield
        finally:
            process.kill()
