"""ForkServer: a process that has imported torch and the tracer, and forks one that traces for each order.

Importing them takes seconds, more than tracing a small program. The server itself traces nothing and starts no thread,
so that each fork is what a new interpreter would be: it gets the environment, the folder and the module path of who
asks. Processes that are given the server's socket, such as the workers of a pool, share it.
"""

from __future__ import annotations

import atexit
import importlib
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from meshwright.garbage import kept_garbage

_RANKS = "meshwright.tracer.programs.rank_process"
_READ_AT_IMPORT = ("LD_", "MKL_", "OMP_", "PYTHON", "PYTORCH_", "TORCH")
"""How variables begin that the interpreter or torch reads only once: others are set after the fork."""
_KILLED = 128 + signal.SIGKILL

_server: _Server | None = None
_shared: socket.socket | None = None
"""The socket of another process's server."""
_lock = threading.Lock()


class Tracing:
    """A process that follows an order, in a session of its own."""

    def __init__(self, connection: Connection, stderr: Path) -> None:
        self._connection, self._stderr = connection, stderr
        self._pid = 0

    def begin(self, order: dict[str, Any]) -> None:
        """Send the order, once the process exists."""
        self._pid = self._connection.recv()
        self._connection.send((order, _environment(), os.getcwd(), [path for path in sys.path if path]))

    def wait(self, timeout_s: float) -> int | None:
        """Return the exit code, None where the process still runs after `timeout_s`."""
        if not self._connection.poll(timeout_s):
            return None
        self._pid = 0
        try:
            code: int = self._connection.recv()
        except (EOFError, ConnectionResetError):
            return _KILLED
        return code

    def stderr(self) -> str:
        """Return what the process wrote to stderr."""
        return self._stderr.read_text(encoding="utf-8", errors="replace")

    def kill(self) -> None:
        """End the process and those that it forked, whether the order was sent or not."""
        if self._pid:
            with suppress(ProcessLookupError):
                os.killpg(self._pid, signal.SIGKILL)
        self._connection.close()


def fork(stderr: Path) -> Tracing:
    """Return a process that waits for its order and writes to the file `stderr`."""
    ours, theirs = Pipe()
    with theirs, stderr.open("wb") as file:
        fds = [theirs.fileno(), file.fileno()]
        try:
            socket.send_fds(server_socket(), [b"+"], fds)
        except OSError:
            # It was killed, as for memory.
            _stop()
            socket.send_fds(server_socket(), [b"+"], fds)
    return Tracing(ours, stderr)


def server_socket() -> socket.socket:
    """Return the socket of the server, which is started unless it runs; its imports take place meanwhile."""
    global _server
    with _lock:
        if _shared is not None:
            return _shared
        settings = _settings()
        if _server is None or _server.settings != settings:
            if _server is not None:
                _server.stop()
            _server = _Server(settings)
            atexit.register(_server.stop)
        return _server.socket


def share(server: socket.socket) -> None:
    """Use the server of another process, whose server_socket() this is."""
    global _shared
    _shared = server


def _stop() -> None:
    global _server, _shared
    with _lock:
        if _server is not None:
            _server.stop()
        _server = _shared = None


def _settings() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_READ_AT_IMPORT)}


def _environment() -> dict[str, str]:
    # Fake tensors compute nothing, so threads would only wait; and a process that has some cannot be forked.
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


class _Server:
    """The process of main(), and this side of its socket."""

    def __init__(self, settings: dict[str, str]) -> None:
        self.settings, self._owner = settings, os.getpid()
        self.socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=_environment(),
                start_new_session=True,
            )

    def stop(self) -> None:
        """End the server; processes that it forked trace on."""
        if os.getpid() != self._owner:
            return
        self.socket.close()
        self._process.kill()
        self._process.wait()


def main() -> None:
    """Serve the socket argv[1] until all who could ask have ended; each fork ends when its order is done."""
    # A fork imports once more what could not be imported, and says so where it is read.
    with suppress(Exception), kept_garbage():
        importlib.import_module(_RANKS)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as orders:
        while (asked := socket.recv_fds(orders, 1, 2))[0]:
            fds = asked[1]
            if not os.fork():
                break
            for fd in fds:
                os.close(fd)
        else:
            return
    _follow(Connection(fds[0]), fds[1])


def _follow(connection: Connection, stderr: int) -> None:
    """Follow the order that comes, in another fork, and report how that one ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    os.dup2(stderr, sys.stderr.fileno())
    os.close(stderr)
    try:
        connection.send(os.getpid())
        order, environment, folder, path = connection.recv()
    except (EOFError, OSError):
        return
    pid = os.fork()
    if pid:
        _, status = os.waitpid(pid, 0)
        with suppress(OSError):
            connection.send(os.waitstatus_to_exitcode(status))
        # Where the order ended early, ranks may still be traced.
        os.killpg(0, signal.SIGKILL)
    connection.close()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[:] = [folder, *path]
    importlib.invalidate_caches()
    importlib.import_module(_RANKS).main(order)


if __name__ == "__main__":
    main()
