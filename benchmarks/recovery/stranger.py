"""Whether a stranger's request ends a replica of torchft: `python -m benchmarks.recovery.stranger`, where torchft is.

Any program that reaches the lighthouse's port may send what its dashboard's button sends. With torchft 0.2.0 the
replica's process ends (2026-11-27, torch 2.13.0). Ours closes the connection of what does not know the job's token
(tests/unit/fault_tolerance/replicas/test_coordinator.py).
"""

import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import TCPStore
from torchft import Manager
from torchft.coordination import LighthouseServer
from torchft.process_group import ProcessGroupGloo

_STARTING_S, _ENDING_S = 90.0, 10.0


def train(lighthouse: str) -> None:
    """Train as a replica until it is ended."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager: Any = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        min_replica_size=1,
        load_state_dict=lambda _: None,
        state_dict=dict,
        replica_id="replica",
        lighthouse_addr=lighthouse,
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        use_async_quorum=False,
    )
    while True:
        manager.start_quorum()
        manager.allreduce(torch.ones(2)).wait()
        manager.should_commit()
        time.sleep(0.2)


def ask(address: str, method: str) -> str:
    """Return what a request is answered, without any credential."""
    try:
        with urllib.request.urlopen(urllib.request.Request(address, method=method), timeout=5) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        return f"HTTP {error.code}"
    except OSError:
        return ""


def main() -> None:
    """Start a lighthouse and a replica, send the request, and print how the replica ended."""
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=100)
    port = re.findall(r":(\d+)", lighthouse.address())[-1]
    replica = subprocess.Popen([sys.executable, "-m", __spec__.name, lighthouse.address()])
    deadline = time.monotonic() + _STARTING_S
    found: list[str] = []
    while not found and time.monotonic() < deadline:
        time.sleep(0.5)
        found = re.findall(r"/replica/([^/\"]+)/kill", ask(f"http://127.0.0.1:{port}/status", "GET"))
    print("POST /replica/ID/kill:", ask(f"http://127.0.0.1:{port}/replica/{found[0]}/kill", "POST"))
    try:
        print("the replica ended with", replica.wait(_ENDING_S))
    except subprocess.TimeoutExpired:
        print("the replica trains on")
        replica.kill()


if __name__ == "__main__":
    train(sys.argv[1]) if len(sys.argv) > 1 else main()
