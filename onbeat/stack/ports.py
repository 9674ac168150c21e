"""Ports on loopback on which no process listens.

They lie below the range from which kernels draw the local port of a connection (32768 on Linux, 49152 on macOS): a
client that keeps trying to reach a server that is down could otherwise be given the server's own port, and either
connect to itself or keep the server from coming back.
"""

from __future__ import annotations

import random
import socket
from collections import deque

from contracts.errors import Unavailable

HOST = "127.0.0.1"
FIRST, LAST = 20_000, 32_000
ATTEMPTS = 200
_recent_ports: deque[int] = deque(maxlen=1000)
"""Ports that this process was given last: some of them may not be bound yet."""


def free_port() -> int:
    """Finds a port that could be bound a moment ago, and another one each time; the caller's bind may still lose a race
    against another process."""
    for port in random.SystemRandom().sample(range(FIRST, LAST), ATTEMPTS):
        if port not in _recent_ports and is_free(port):
            _recent_ports.append(port)
            return port
    raise Unavailable(f"{ATTEMPTS} ports between {FIRST} and {LAST} are all in use", field="port")


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True
