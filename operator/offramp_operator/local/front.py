"""One address for all workers: starts, feeds and restarts the proxy process. The socket is kept here, so the address
outlives the proxy."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import sys
from collections.abc import Mapping

from offramp_core.errors import InvalidArgumentError
from offramp_operator.local import parent_death
from offramp_operator.shell.log import log_event

HOST = "127.0.0.1"
DRAIN_SECONDS = 10.0
_RESTART_PAUSE_SECONDS = 0.5
_BACKLOG = 1024


class FrontProcess:
    """The proxy and the last set of workers it was sent. All methods are for one event loop."""

    def __init__(self, port: int) -> None:
        """Take the port (0: any free one).

        Raises
        ------
        InvalidArgumentError
            The port is taken or not allowed.
        """
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((HOST, port))
        except OSError as error:
            self._socket.close()
            raise InvalidArgumentError(
                f"port {port} cannot be used ({error.strerror}); choose another with --port, 0 for any"
            ) from error
        self._socket.listen(_BACKLOG)
        self._backends: dict[str, tuple[str, int]] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._drained: dict[str, asyncio.Event] = {}
        self._closing = False

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self._socket.getsockname()[1]}"

    def start(self) -> None:
        """Run the proxy from now on."""
        self._keeper = asyncio.create_task(self._keep(), name="front")

    async def serve(self, backends: Mapping[str, tuple[str, int]]) -> None:
        """Send new work to these workers; sending the same again does nothing."""
        if backends != self._backends:
            self._backends = dict(backends)
            await self._send({"backends": self._backends})

    async def drain(self, name: str) -> None:
        """Move clients off a worker; returns when nobody uses it, at the latest after ``DRAIN_SECONDS``."""
        self._backends.pop(name, None)
        done = self._drained[name] = asyncio.Event()
        await self._send({"drain": name})
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(done.wait(), DRAIN_SECONDS)
        del self._drained[name]

    async def close(self, *, grace_seconds: float = DRAIN_SECONDS) -> None:
        """Take no more connections, let the requests under way finish, and end the proxy."""
        self._closing = True
        self._socket.close()
        await self._send({"stop": grace_seconds})
        process = self._process
        if process is not None:
            try:
                await asyncio.wait_for(process.wait(), grace_seconds + 2.0)
            except TimeoutError:
                process.kill()
        if self._keeper is not None:
            await self._keeper

    async def _keep(self) -> None:
        while not self._closing:
            self._process = process = await asyncio.create_subprocess_exec(
                *parent_death.command(sys.executable, "-m", "offramp_operator.local.proxy", str(self._socket.fileno())),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                pass_fds=[self._socket.fileno()],
                start_new_session=True,
            )
            if self._closing:  # changed while the process was being made, which so did not hear of it
                process.kill()
            await self._send({"backends": self._backends})
            await self._listen(process)
            code = await process.wait()
            if not self._closing:
                log_event("front-died", f"the front ended with {code} and is started again", level=logging.WARNING)
                await asyncio.sleep(_RESTART_PAUSE_SECONDS)

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            name = json.loads(line).get("drained")
            if name in self._drained:
                self._drained[name].set()

    async def _send(self, order: Mapping[str, object]) -> None:
        process = self._process
        if process is None or process.stdin is None or process.returncode is not None:
            return  # the next proxy is sent the whole set when it starts
        with contextlib.suppress(ConnectionError):
            process.stdin.write(json.dumps(order).encode() + b"\n")
            await process.stdin.drain()
