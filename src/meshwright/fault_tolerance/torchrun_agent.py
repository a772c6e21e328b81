"""The torchrun agent that started this rank: whether it is cut off from its rendezvous store, and its end.

A network that goes down closes no connection. The agent asks the store of the rendezvous ten times a second whether a
node waits to join, and with the network down that call returns once TCP gives up, after some 15 minutes; it is a C++
call in the agent's main thread, so the agent ignores SIGTERM and the exit of its ranks meanwhile (torch 2.13).
"""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from meshwright.fault_tolerance.stop_request import ignore_stops

CUT_OFF_S: Final = 10.0
"""Seconds without an answer from the store's host after which an agent counts as cut off."""
_TRY_S: Final = 2.0
_FIRST_ACTS_S: Final = 3.0
_COMMANDS: Final = ("torchrun", "torch.distributed.run", "torch.distributed.launch")


def end_cut_off_agent(environment: Mapping[str, str] = os.environ) -> bool:
    """Kill the torchrun that started this rank if its rendezvous store does not answer; return whether it was killed.

    For a rank that is about to end with an error. Takes CUT_OFF_S where the store's host does not answer, else
    milliseconds. Such an agent can neither restart its ranks nor join another round. Agents of one node, whose store is
    local, and launchers other than torchrun are left alone.
    """
    store, agent = _store_of_nodes(environment), os.getppid()
    if store is None or _answers(*store):
        return False
    if environment.get("LOCAL_RANK", "0") != "0":
        # The first rank of the node has the terminal; where it is gone, another one acts.
        time.sleep(_FIRST_ACTS_S)
    words = _command_of(agent)
    if os.getppid() != agent or not words:
        return False  # another rank has ended it
    host, port = store
    cut_off = f"the rendezvous store of torchrun, {host}:{port}, has not answered for {CUT_OFF_S:.0f} s"
    # As in torchrun ..., python /bin/torchrun ..., or python -u -m torch.distributed.run ...
    if not any(Path(word).name in _COMMANDS for word in words[:4]):
        _say(f"{cut_off}: the launcher of this rank, pid {agent}, may not end by itself: kill -9 {agent}")
        return False
    _say(f"{cut_off}: torchrun on {socket.gethostname()}, pid {agent}, is killed, since it would wait for it")
    if threading.current_thread() is threading.main_thread():
        # The kernel sends SIGTERM to the ranks of a launcher that is gone: this one reports its error first.
        ignore_stops()
    with suppress(ProcessLookupError, PermissionError):
        os.kill(agent, signal.SIGKILL)
        return True
    return False


def _say(what: str) -> None:
    """Print for the terminal, not for the log of a rank, where a reader of torchrun's end would not look."""
    print(what, file=sys.stderr, flush=True)


def _store_of_nodes(environment: Mapping[str, str]) -> tuple[str, int] | None:
    """Return the address of the rendezvous store where the agents of several nodes use it; None for any other run."""
    try:
        num_nodes, port = int(environment.get("GROUP_WORLD_SIZE", "1")), int(environment.get("MASTER_PORT", ""))
    except ValueError:
        return None
    is_agents_own = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if num_nodes == 1 or not is_agents_own or "TORCHELASTIC_RUN_ID" not in environment:
        return None
    return environment.get("MASTER_ADDR", ""), port


def _answers(host: str, port: int) -> bool:
    """Return whether a host answers within CUT_OFF_S; a refused connection is an answer, which the agent gets, too."""
    deadline_s = time.monotonic() + CUT_OFF_S
    while (left_s := deadline_s - time.monotonic()) > 0:
        try:
            with socket.create_connection((host, port), timeout=min(_TRY_S, left_s)):
                return True
        except ConnectionRefusedError:
            return True
        except OSError:
            # No route, no answer, or a host name that no server resolves now.
            time.sleep(min(0.5, max(0.0, deadline_s - time.monotonic())))
    return False


def _command_of(pid: int) -> list[str]:
    """Return the words of a process of this host; [] where it has ended."""
    with suppress(OSError):
        line = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        return line.split("\0") if line else []
    return []
