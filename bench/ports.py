"""Ports for servers that are about to be started and cannot say themselves which one they took."""

from __future__ import annotations

import contextlib
import itertools
import secrets
import socket

FIRST, N = 20_000, 10_000  # below what the kernel hands out by itself: no other socket takes one before its server does
_turn = itertools.count(secrets.randbelow(N))


def free_port() -> int:
    """A port on loopback that nobody listens on; another one each time."""
    while True:
        port = FIRST + next(_turn) % N
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
