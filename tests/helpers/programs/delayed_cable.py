"""A cable between two network namespaces that delivers each packet after a delay: a relay between two TUN devices.

    python delayed_cable.py NAMESPACE0 NAMESPACE1 INTERFACE DELAY_S

Prints "ready" once both devices exist, and relays until it is killed. For kernels without netem.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import struct
import sys
import threading
import time
from collections import deque

_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000


def open_device(namespace: str, interface: str) -> int:
    """Return a descriptor of a new TUN device in a namespace."""
    found: list[int] = []

    def enter() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/var/run/netns/{namespace}", "rb") as own:
            if libc.setns(own.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"setns of {namespace}")
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", interface.encode(), _IFF_TUN | _IFF_NO_PI))
        found.append(device)

    # A namespace is a thread's own; the descriptor is the process's.
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    return found[0]


def relay(devices: tuple[int, int], delay_s: float) -> None:
    """Deliver what arrives at one device to the other, in order, after the delay."""
    waiting: deque[tuple[float, int, bytes]] = deque()
    while True:
        left_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        readable, _, _ = select.select(devices, (), (), left_s)
        now_s = time.monotonic()
        for device in readable:
            other = devices[1] if device == devices[0] else devices[0]
            try:
                waiting.append((now_s + delay_s, other, os.read(device, 65536)))
            except BlockingIOError:
                continue
        while waiting and waiting[0][0] <= now_s:
            _, device, packet = waiting.popleft()
            try:
                os.write(device, packet)
            except OSError:
                continue  # the device is down: the packet is lost


if __name__ == "__main__":
    ends = (open_device(sys.argv[1], sys.argv[3]), open_device(sys.argv[2], sys.argv[3]))
    print("ready", flush=True)
    relay(ends, float(sys.argv[4]))
