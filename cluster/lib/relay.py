"""Relay of one TCP port on the machine's loopback into a network namespace.

Usage: relay.py NETNS-FILE PORT TARGET-IP:PORT. Prints nothing; ends when it is killed.
"""

import asyncio
import ctypes
import os
import socket
import sys
from functools import partial

CLONE_NEWNET = 0x40000000
CHUNK_BYTES = 256 * 1024


def listen_on_loopback(port: int) -> socket.socket:
    """Bind before the namespace is entered: a socket stays in the namespace that made it."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    return listener


def enter_network_namespace(path: str) -> None:
    """Make every later socket of this process one of the namespace at ``path``.

    Raises
    ------
    OSError
        The kernel refused (not root, or not a network namespace).
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), path)
    finally:
        os.close(descriptor)


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy one direction to its end, then pass the end on (the other direction may go on)."""
    try:
        while chunk := await reader.read(CHUNK_BYTES):
            writer.write(chunk)
            await writer.drain()
        writer.write_eof()
    except OSError:
        writer.close()


async def serve_client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, host: str, port: int) -> None:
    """Join one client with the target until both directions have ended."""
    try:
        target_reader, target_writer = await asyncio.open_connection(host, port)
    except OSError:
        writer.close()
        return
    try:
        await asyncio.gather(pump(reader, target_writer), pump(target_reader, writer))
    finally:
        writer.close()
        target_writer.close()


async def main(netns: str, port: str, target: str) -> None:
    listener = listen_on_loopback(int(port))
    enter_network_namespace(netns)
    host, _, target_port = target.rpartition(":")
    handler = partial(serve_client, host=host, port=int(target_port))
    server = await asyncio.start_server(handler, sock=listener, backlog=512)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
