"""Hands bytes between two addresses and nothing else: ``python -m bench.forwarder HOST:PORT``, the address that it
connects to. It prints the port of this machine at which it listens."""

from __future__ import annotations

import socket
import sys
import threading

MOST_BYTES = 65536


def hand_on(come: socket.socket, go: socket.socket) -> None:
    """Bytes of one direction, until it ends."""
    while some := come.recv(MOST_BYTES):
        go.sendall(some)
    go.shutdown(socket.SHUT_WR)


def main() -> None:
    host, _, port = sys.argv[1].rpartition(":")
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(server.getsockname()[1], flush=True)
        while True:
            client, _ = server.accept()
            core = socket.create_connection((host, int(port)))
            for end in (client, core):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for ends in ((client, core), (core, client)):
                threading.Thread(target=hand_on, args=ends, daemon=True).start()


if __name__ == "__main__":
    main()
