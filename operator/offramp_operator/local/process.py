"""One worker process: started, watched, probed, restarted with growing pauses, and ended for good."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from offramp_core.errors import UnavailableError
from offramp_core.protocol import WorkerState
from offramp_core.reasons import MaybeReason, Reason
from offramp_operator.local import parent_death
from offramp_operator.local.template import WorkerTemplate
from offramp_operator.shell import wire
from offramp_operator.shell.log import log_event
from offramp_operator.shell.platform import WorkerIdentity

WORKER_COMMAND = (sys.executable, "-m", "offramp_worker.main")
HOST = "127.0.0.1"
OF_THE_MACHINE = (  # what of ours workers inherit
    "OFFRAMP_VLLM_PYTHON",
    "OFFRAMP_VLLM_START_SECONDS",
    "OFFRAMP_CACHE_MIB",
    "OFFRAMP_RUNNING",
    "OFFRAMP_AUDIT_SHARE",
)
TERMINATION_SECONDS = 25.0  # a little longer than a worker takes to drain
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 30.0
SOUND_SECONDS = 60.0  # a process that lived this long was not broken from the start
_STARTING_PROBE_SECONDS, _SERVING_PROBE_SECONDS = 0.2, 1.0
_PROBE_DEADLINE_SECONDS = 3.0
_PROBES_UNTIL_UNREADY = 3
_LOG_LIMIT_BYTES = 10_000_000


@dataclass(slots=True)
class WorkerRecord:
    """What is kept of a worker over restarts of the shell. ``pid`` and ``pid_started`` (clock ticks since boot) name
    its process."""

    name: str
    uid: str
    template: WorkerTemplate
    port: int = 0
    admin_port: int = 0
    restarts: int = 0
    pid: int = 0
    pid_started: int = 0


@dataclass(frozen=True, slots=True)
class WorkerSurroundings:
    """What all workers of a service share. ``changed`` is called when a worker's record or health changed."""

    identity: WorkerIdentity
    token: str = field(repr=False)
    plan_file: Path
    state_dir: Path
    ramp_sets: Path
    log_dir: Path
    command: Sequence[str]
    client: httpx.AsyncClient
    changed: Callable[[], None]
    grace_seconds: float  # from SIGTERM to SIGKILL
    #: Variables of workers that are edges of a core.
    edge: Mapping[str, str] = field(default_factory=dict)


class WorkerProcess:
    """Supervises one worker from :meth:`start` to :meth:`stop`."""

    def __init__(self, record: WorkerRecord, surroundings: WorkerSurroundings) -> None:
        self.record = record
        self.ready = False
        self.alive = False
        self.served = False  # in the present life of the process
        self.failure = ""
        self.failure_reason: MaybeReason = ""
        self.stopping = False
        self._around = surroundings
        self._supervisor: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()

    @property
    def admin_url(self) -> str | None:
        return f"http://{HOST}:{self.record.admin_port}" if self.alive else None

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.record.port}"

    def start(self) -> None:
        """Begin to supervise."""
        self._supervisor = asyncio.create_task(self._supervise(), name=f"worker-{self.record.name}")

    def retire(self) -> None:
        """Say that the worker is going to be stopped; it takes no new work from now on."""
        self.stopping = True

    async def stop(self) -> None:
        """SIGTERM, and after a while SIGKILL for the whole process group."""
        self.stopping = True
        self._stop.set()
        if self._supervisor is not None:
            await self._supervisor

    # --- supervision -------------------------------------------------------------------------------

    async def _supervise(self) -> None:
        failures = 0
        while not self._stop.is_set():
            started = time.monotonic()
            how, served = await self._live_once()
            if self._stop.is_set():
                return
            failures = 1 if served and time.monotonic() - started >= SOUND_SECONDS else failures + 1
            self._died(how)
            pause = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** (failures - 1))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), pause)

    async def _live_once(self) -> tuple[str, bool]:
        """One life of the process: how it ended, and whether it ever served."""
        try:
            process = await self._spawn()
        except OSError as error:
            return f"it could not be started: {error}", False
        record = self.record
        record.pid, record.pid_started = process.pid, process_started(process.pid) or 0
        self.alive = True
        self._around.changed()
        log_event("worker-started", f"{record.name} at {self.url}", worker=record.name, pid=record.pid, url=self.url)
        probe = asyncio.create_task(self._probe(process.pid), name=f"probe-{record.name}")
        code = await self._ended(process)
        probe.cancel()
        await asyncio.gather(probe, return_exceptions=True)
        served, self.alive, self.ready, self.served = self.served, False, False, False
        return (f"signal {-code}" if code < 0 else f"exit code {code}"), served

    async def _spawn(self) -> asyncio.subprocess.Process:
        self._choose_ports()
        log = _open_log(self._around.log_dir / f"{self.record.name}.log")
        return await start_logged(self._around.command, log=log, env=self._environment())

    async def _ended(self, process: asyncio.subprocess.Process) -> int:
        """Wait for the end, by itself or because of :meth:`stop`."""
        ended, stopping = asyncio.create_task(process.wait()), asyncio.create_task(self._stop.wait())
        await asyncio.wait({ended, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not ended.done():
            _signal(process.pid, signal.SIGTERM)
            await asyncio.wait({ended}, timeout=self._around.grace_seconds)
        if not ended.done():
            message = f"{self.record.name} did not end within {self._around.grace_seconds:.0f} s and was killed"
            log_event("worker-killed", message, level=logging.WARNING, worker=self.record.name)
            _signal(process.pid, signal.SIGKILL, group=True)
        return await ended

    def _died(self, how: str) -> None:
        record = self.record
        record.restarts += 1
        last = _last_words(self._around.log_dir / f"{record.name}.log")
        message = f"the process ended with {how}{': ' + last if last else ''}"
        if self.failure_reason != Reason.INVALID_BUNDLE:
            self.failure, self.failure_reason = message, Reason.CRASHED
        log_event(
            "worker-died",
            f"{record.name}: {message}",
            level=logging.WARNING,
            worker=record.name,
            restarts=record.restarts,
        )
        self._around.changed()

    def _choose_ports(self) -> None:
        """Keep the ports of the last life while they are free, so that URLs in people's hands stay right."""
        record = self.record
        with contextlib.ExitStack() as held:
            record.port = _free_port(record.port, held)
            record.admin_port = _free_port(record.admin_port, held)

    def _environment(self) -> dict[str, str]:
        record, around = self.record, self._around
        state_dir = around.state_dir / record.name
        state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        inherited = {n: value for n, value in os.environ.items() if not n.startswith("OFFRAMP_") or n in OF_THE_MACHINE}
        template = record.template
        return {
            **inherited,
            **dict(template.env),
            "OFFRAMP_BUNDLE": template.bundle,
            "OFFRAMP_HOST": HOST,
            "OFFRAMP_PORT": str(record.port),
            "OFFRAMP_ADMIN_PORT": str(record.admin_port),
            "OFFRAMP_SERVICE": template.service,
            "OFFRAMP_SERVICE_UID": template.service_uid,
            "OFFRAMP_UID": record.uid,
            "OFFRAMP_PLAN_FILE": str(around.plan_file.resolve()),
            "OFFRAMP_PUBLIC_KEY": around.identity.public_key,
            "OFFRAMP_TOKEN_SHA256": around.identity.token_sha256,
            "OFFRAMP_STATE_DIR": str(state_dir.resolve()),
            "OFFRAMP_RAMP_SETS": str(around.ramp_sets.resolve()),
            "OFFRAMP_CAPTURE_DIR": str((state_dir / "captures").resolve()),
            "OFFRAMP_THREADS": str(template.threads),
            **({"OFFRAMP_LATENCY_SECONDS": f"{template.latency_seconds:.6g}"} if template.latency_seconds else {}),
            **({"OFFRAMP_MODEL_DIGEST": template.model_digest} if template.model_digest else {}),
            **dict(template.options),
            **around.edge,
        }

    # --- health ------------------------------------------------------------------------------------

    async def _probe(self, pid: int) -> None:
        """Readiness from the public port. A single missed probe of a serving worker means a busy machine, not a sick
        worker."""
        missed, dead = 0, 0
        while True:
            answered = await self._answers("ready")
            missed = 0 if answered else missed + 1
            if answered and not self.ready:
                self.failure, self.failure_reason = "", ""
                self._set_ready(True)
            elif not answered and self.ready and missed >= _PROBES_UNTIL_UNREADY:
                self._set_ready(False)
            elif not answered and not self.ready:
                await self._ask_why()
            # An explicit "not alive" is the worker's own request to be restarted.
            dead = dead + 1 if answered is False and await self._answers("live") is False else 0
            if dead >= _PROBES_UNTIL_UNREADY and not self.stopping:
                log_event(
                    "worker-hung",
                    f"{self.record.name} says that it cannot go on",
                    level=logging.WARNING,
                    worker=self.record.name,
                )
                _signal(pid, signal.SIGKILL, group=True)
                return
            await asyncio.sleep(_SERVING_PROBE_SECONDS if self.ready else _STARTING_PROBE_SECONDS)

    def _set_ready(self, ready: bool) -> None:
        self.ready, self.served = ready, True
        name = self.record.name
        log_event(
            "worker-ready" if ready else "worker-unready",
            f"{name} {'serves' if ready else 'does not answer its probe'}",
            worker=name,
        )
        self._around.changed()

    async def _answers(self, probe: str) -> bool | None:
        """Whether a health probe says yes; None when nobody answers."""
        try:
            reply = await self._around.client.get(f"{self.url}/v2/health/{probe}", timeout=_PROBE_DEADLINE_SECONDS)
        except httpx.HTTPError:
            return None
        return reply.status_code == httpx.codes.OK

    async def _ask_why(self) -> None:
        """A worker that cannot serve its bundle says so in its state."""
        headers = {"Authorization": f"Bearer {self._around.token}"}
        try:
            reply = await self._around.client.get(
                f"{self.admin_url}/v1/state", headers=headers, timeout=_PROBE_DEADLINE_SECONDS
            )
            state = wire.decode(reply.content, WorkerState) if reply.status_code == httpx.codes.OK else None
        except (httpx.HTTPError, httpx.InvalidURL, UnavailableError):
            return
        failure = "" if state is None or state.ready else state.failing or state.message
        if state is not None and failure and failure != self.failure:
            reason = Reason.EXECUTOR_FAILING if state.failing else Reason.INVALID_BUNDLE
            self.failure, self.failure_reason = failure, reason
            log_event("worker-failed", f"{self.record.name}: {failure}", level=logging.WARNING, worker=self.record.name)
            self._around.changed()


# --- processes, ports and logs ---------------------------------------------------------------------


async def start_logged(
    command: Sequence[str], *, log: int, env: Mapping[str, str] | None = None
) -> asyncio.subprocess.Process:
    """Start a process that ends with this one. What it writes goes to the file descriptor ``log``, which is closed
    here."""
    try:
        return await asyncio.create_subprocess_exec(
            *parent_death.command(*command),
            env=env,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    finally:
        os.close(log)


def process_started(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; with the pid it names one process for good. None: there is
    none."""
    stat = _stat(pid)
    return int(stat[19]) if stat else None


async def end_leftover(record: WorkerRecord, *, grace_seconds: float) -> None:
    """End the process of an earlier shell that was killed, if it is still there."""
    deadline = time.monotonic() + grace_seconds
    signalled = False
    while record.pid and process_started(record.pid) == record.pid_started and record.pid_started:
        if time.monotonic() > deadline:
            _signal(record.pid, signal.SIGKILL, group=True)
            deadline += grace_seconds
        elif not signalled:
            _signal(record.pid, signal.SIGTERM)
            signalled = True
        await asyncio.sleep(0.05)
        if _is_zombie(record.pid):
            return


def _is_zombie(pid: int) -> bool:
    stat = _stat(pid)
    return not stat or stat[0] == "Z"


def _stat(pid: int) -> list[str]:
    """What the kernel tells of a process after its name; nothing of one that is not there."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _signal(pid: int, number: signal.Signals, *, group: bool = False) -> None:
    """Signal a process (or the group it leads); one that has ended is fine."""
    with contextlib.suppress(ProcessLookupError):
        if group:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)


def _free_port(wanted: int, held: contextlib.ExitStack) -> int:
    """``wanted`` if it is free (0: any), else another. Held open until the caller has chosen all of its ports."""
    for port in (wanted, 0):
        listener = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, port))
        except OSError:
            continue
        return int(listener.getsockname()[1])
    raise UnavailableError(f"no free port on {HOST}")


def _open_log(path: Path) -> int:
    if path.exists() and path.stat().st_size > _LOG_LIMIT_BYTES:
        path.replace(path.with_suffix(".log.1"))
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def _last_words(path: Path) -> str:
    """The message of the last line a process wrote, or the line itself."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 8192))
            lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    except OSError:
        return ""
    if not lines:
        return ""
    with contextlib.suppress(ValueError, AttributeError):
        facts = json.loads(lines[-1])
        return str(facts.get("error") or facts.get("message") or facts.get("event"))[:500]
    return lines[-1].strip()[:500]
