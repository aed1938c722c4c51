"""One process of vLLM's: started, watched, started again.

It listens at a socket in a folder of the worker's own, so no port is taken and nobody else reaches it.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from offramp_core.errors import InvalidBundleError
from offramp_worker.generate.vllm.command import SERVED_NAME, version_fault
from offramp_worker.logs import log_event

WATCH_SECONDS = 1.0
STARTED_POLL_SECONDS = 0.2
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 60.0
SOUND_SECONDS = 120.0  # one that ends sooner than this is started again later and later
SICK_IN_A_ROW = 3  # times that it does not say it is well, until it is started again
END_SECONDS, START_AGAIN_SECONDS = 20.0, 1800.0
KEPT_LINES, MAX_LINE = 40, 500
ASK_SECONDS = 10.0
WARM_UP = {"model": SERVED_NAME, "prompt": [0, 0, 0, 0], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
_FAULT = re.compile(r"error|exception|refused|invalid", re.IGNORECASE)


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a socket of the file system."""

    def __init__(self, path: Path, *, seconds: float) -> None:
        super().__init__("localhost", timeout=seconds)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class VllmProcess:
    """``up`` while it answers; ``trouble`` says why it does not, in one sentence."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        at: Path,
    ) -> None:
        """``command`` makes it listen at the socket ``at``."""
        self.name, self.at = name, at
        self._command, self._environment = list(command), dict(environment)
        self.up, self.trouble, self.version, self.restarts = False, "it has not been started", "", 0
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name=f"vllm-{name}", daemon=True)
        self._drafts, self._drafts_taken = (0, 0), (0, 0)
        self._group = 0  # of processes: vLLM's, and those that it starts
        self._unread = ""  # why its metrics could not be read last

    def start(self, *, seconds: float) -> None:
        """Start it and wait until it answers; from then on it is watched.

        Raises
        ------
        InvalidBundleError
            It ended, or did not answer in time; has the last that it said.
        """
        try:
            self._spawn()
            self._wait(seconds)
        except InvalidBundleError:
            self._end()
            raise
        except Exception as error:  # whatever it replied
            self._end()
            raise InvalidBundleError(f"configurations: {self.name!r}: vLLM cannot be started: {error!r}") from error
        self._watcher.start()

    def let_go(self) -> None:
        """Ask it to end, for good."""
        self._closed.set()
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def close(self) -> None:
        """End it for good. Blocks until it has ended."""
        self.let_go()
        self._end()
        if self._watcher.ident is not None:
            self._watcher.join(END_SECONDS)

    def take_drafts(self) -> tuple[int, int]:
        """Tokens that its draft proposed, and those that were accepted, since this was last asked."""
        now, before = self._drafts, self._drafts_taken
        self._drafts_taken = now
        return max(0, now[0] - before[0]), max(0, now[1] - before[1])

    def ask(self, path: str, *, seconds: float = ASK_SECONDS) -> tuple[int, bytes]:
        """Status and body of a ``GET``. Raises ``OSError`` or ``HTTPException`` where there is no reply."""
        connection = UnixConnection(self.at, seconds=seconds)
        try:
            connection.request("GET", path)
            reply = connection.getresponse()
            return reply.status, reply.read()
        finally:
            connection.close()

    # --- starting and ending ------------------------------------------------------------------------

    def _spawn(self) -> None:
        self.at.unlink(missing_ok=True)
        self._lines.clear()
        keeper = Path(__file__).with_name("keeper.py")
        reads, writes = os.pipe()
        with os.fdopen(reads, "rb") as reports, os.fdopen(writes, "wb") as tells:
            self._process = subprocess.Popen(
                [sys.executable, "-I", str(keeper), str(writes), *self._command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=self._environment,
                cwd=self.at.parent,
                pass_fds=(writes,),
                start_new_session=True,  # a terminal's Ctrl-C is for the worker, which drains
            )
            assert self._process.stdout is not None
            threading.Thread(target=self._listen, args=(self._process.stdout,), daemon=True).start()
            tells.close()
            self._group = int(reports.read() or 0)

    def _wait(self, seconds: float) -> None:
        assert self._process is not None
        until = time.monotonic() + seconds
        while self._health() != http.client.OK:
            if (code := self._process.poll()) is not None:
                raise InvalidBundleError(f"configurations: {self.name!r}: vLLM ended with {code}: {self._last_words()}")
            if time.monotonic() > until or self._closed.wait(STARTED_POLL_SECONDS):
                raise InvalidBundleError(
                    f"configurations: {self.name!r}: vLLM did not answer within {seconds:.0f} s: {self._last_words()}"
                )
        self.version = str(json.loads(self.ask("/version")[1]).get("version", ""))
        if wrong := version_fault(self.version):
            raise InvalidBundleError(f"configurations: {self.name!r}: {wrong}; install a newer one beside the worker")
        self._warm_up(until)
        self.up, self.trouble, self._drafts, self._drafts_taken = True, "", (0, 0), (0, 0)
        log_event("vllm-started", configuration=self.name, version=self.version, pid=self._process.pid)

    def _warm_up(self, until: float) -> None:
        """The first answer of a new process can take longer than its start."""
        connection = UnixConnection(self.at, seconds=max(1.0, until - time.monotonic()))
        try:
            connection.request("POST", "/v1/completions", json.dumps(WARM_UP), {"Content-Type": "application/json"})
            reply = connection.getresponse()
            if reply.status != http.client.OK:
                raise InvalidBundleError(
                    f"configurations: {self.name!r}: vLLM answered {reply.status} to a first request: "
                    f"{reply.read(MAX_LINE).decode(errors='replace')}"
                )
            reply.read()
        except (OSError, http.client.HTTPException) as error:
            raise InvalidBundleError(
                f"configurations: {self.name!r}: vLLM did not answer a first request ({error}): {self._last_words()}"
            ) from error
        finally:
            connection.close()

    def _end(self) -> None:
        """The keeper ends vLLM when its standard input does; what a keeper that was killed left behind ends here."""
        process = self._process
        self.up = False
        if process is None or process.stdin is None:
            return
        process.stdin.close()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        group, self._group = self._group, 0
        if group:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)

    def _listen(self, stream: IO[bytes]) -> None:
        for raw in stream:
            line = raw.decode(errors="replace").rstrip()[:MAX_LINE]
            if line:
                self._lines.append(line)
                log_event("vllm", configuration=self.name, line=line)

    def _last_words(self) -> str:
        """What it said last that looks like a reason."""
        time.sleep(STARTED_POLL_SECONDS)  # the pipe may still be read
        lines = list(self._lines)
        return next(
            (line for line in reversed(lines) if _FAULT.search(line)), lines[-1] if lines else "it said nothing"
        )

    def _health(self) -> int:
        try:
            return self.ask("/health")[0]
        except (OSError, http.client.HTTPException):
            return 0

    # --- watching -----------------------------------------------------------------------------------

    def _watch(self) -> None:
        pause, since, sick = FIRST_PAUSE_SECONDS, time.monotonic(), 0
        while True:
            ended = self._ended(WATCH_SECONDS)
            if self._closed.is_set():
                return
            if self.up and not ended:
                sick = 0 if self._health() == http.client.OK else sick + 1
                if sick < SICK_IN_A_ROW:
                    if not sick:
                        self._read_metrics()
                    continue
            sick, pause = 0, FIRST_PAUSE_SECONDS if time.monotonic() - since > SOUND_SECONDS else pause
            self.up, self.trouble = False, f"{self.name}: vLLM is away; it is started again"
            self._fell(f"vLLM ended: {self._last_words()}" if ended else "vLLM does not say that it is well")
            if self._closed.wait(pause):
                return
            pause = min(LONGEST_PAUSE_SECONDS, 2 * pause)
            self._again()
            since = time.monotonic()

    def _ended(self, seconds: float) -> bool:
        """Whether it ends within that time; known as soon as it has."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self._process.poll() is not None

    def _fell(self, why: str) -> None:
        self._end()
        self.trouble = f"{self.name}: {why}; it is started again"
        log_event("vllm-ended", level="error", configuration=self.name, reason=why)

    def _again(self) -> None:
        self.restarts += 1
        try:
            self._spawn()
            self._wait(START_AGAIN_SECONDS)
        except Exception as error:  # whatever it replied: nobody else would start it again
            self.trouble = f"{error}; it is started again"
            self._end()
            log_event("vllm-not-started", level="error", configuration=self.name, reason=str(error))

    def _read_metrics(self) -> None:
        try:
            status, text = self.ask("/metrics")
            if status == http.client.OK:
                self._drafts = draft_tokens(text.decode(errors="replace"))
            unread = ""
        except Exception as error:  # whatever it replied: the next ones may be read
            unread = str(error) or type(error).__name__
        if unread and unread != self._unread:
            log_event("vllm-metrics-unread", level="warning", configuration=self.name, reason=unread)
        self._unread = unread


def draft_tokens(metrics: str) -> tuple[int, int]:
    """Tokens proposed and accepted, by the text of vLLM's ``/metrics``.

    Examples
    --------
    >>> draft_tokens('vllm:spec_decode_num_draft_tokens_total{engine="0"} 12.0\\n')
    (12, 0)
    """

    def total(name: str) -> int:
        found = re.findall(
            rf"^vllm:spec_decode_num_{name}_tokens_total(?:{{[^}}]*}})? ([0-9.e+]+)$", metrics, re.MULTILINE
        )
        return int(sum(map(float, found)))

    return total("draft"), total("accepted")
