"""Ports for servers that tests start."""

from __future__ import annotations

import secrets
import socket
from pathlib import Path

RAYS_LAST = 19_999
"""Ray gives its workers ports up to this one."""


def free_port() -> int:
    """A port that nobody listens on, and that the kernel gives to no connection.

    One of those could be taken, by one of the many connections that are made meanwhile, before the server has it.
    """
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = RAYS_LAST + 1 + secrets.randbelow(max(1000, first_given - RAYS_LAST - 1))
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
